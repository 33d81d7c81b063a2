"""Sharded matrices: columns of the output over the ranks, or of the input with a sum after.

    x [.., in] -> ColumnLinear -> [.., out share]      x [.., in share] -> RowLinear -> [.., out]

A layer is one column-parallel and one row-parallel matrix, so it needs one all-reduce.
Weights arrive cut (parallel/shard.py says how); a group of one makes both plain.
"""

from __future__ import annotations

from torch import Tensor

from parallel.device import Device


class ColumnLinear:
    """weight [out share, in]; no communication."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops = weight, device.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight)


class RowLinear:
    """weight [out, in share]; the partial products are summed over `device.tp`."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.ops.linear(x, self.weight))
