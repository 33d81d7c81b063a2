"""Sharded matrices: split over ranks by the columns of the output, or by those of the input.

    x [.., in] -> ColumnLinear -> [.., out share]
    x [.., in share] -> RowLinear -> this rank's part of [.., out], which the ranks have to sum

A layer is one column-parallel and one row-parallel matrix, so it needs one sum over the ranks. The
norm that reads the result takes that sum (Ops.sum_add_rms_norm), so that a backend can do both in
one operation. Weights arrive cut (parallel/shard.py says how); for one rank they are whole.
"""

from __future__ import annotations

from torch import Tensor

from outrider.parallel.device import Device
from outrider.parallel.formats import Matrix
from outrider.parallel.operands import PartialSum


class ColumnLinear:
    """weight [out share, in]; no communication."""

    def __init__(self, weight: Matrix, device: Device) -> None:
        self.weight, self.ops = weight, device.ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., in] -> [.., out share]."""
        return self.ops.linear(x, self.weight)


class RowLinear:
    """weight [out, in share]; the ranks of `device.tp` sum the results."""

    def __init__(self, weight: Matrix, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp

    def __call__(self, x: Tensor) -> PartialSum:
        """x [.., in share] -> this rank's part of [.., out]."""
        return self.ops.linear_part(x, self.weight, self.group)
