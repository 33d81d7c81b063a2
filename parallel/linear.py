"""Sharded matrices: columns of the output over the ranks, or of the input with a sum to follow.

    x [.., in] -> ColumnLinear -> [.., out share]      x [.., in share] -> RowLinear -> [.., out]

A layer is one column-parallel and one row-parallel matrix, so it needs one sum over the ranks: the
norm that reads it takes it (Ops.sum_add_rms_norm), in one operation where a backend can.
Weights arrive cut (parallel/shard.py says how); a group of one makes both plain.
"""

from __future__ import annotations

from torch import Tensor

from outrider.parallel.device import Device
from outrider.parallel.operands import PartialSum


class ColumnLinear:
    """weight [out share, in]; no communication."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops = weight, device.ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., in] -> [.., out share]."""
        return self.ops.linear(x, self.weight)


class RowLinear:
    """weight [out, in share]; the ranks of `device.tp` sum the results."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp

    def __call__(self, x: Tensor) -> PartialSum:
        """x [.., in share] -> this rank's part of [.., out]."""
        return self.ops.linear_part(x, self.weight, self.group)
