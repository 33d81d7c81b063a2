"""Which part of a whole tensor a rank holds: rows or columns, in pieces that follow the heads.

    Cut(dim, parts).spans(rank, size) -> [(start, stop), ...] of the whole along dim

A fused tensor (q | k | v) has one part a section, so each section is split by its own heads.
Letters: units: what must stay together (heads, columns) | size ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """`length` rows made of `units` equal units."""

    length: int
    units: int

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """(start, length) of this rank's units; with fewer units than ranks, one is repeated."""
        width = self.length // self.units
        if self.units % size == 0:
            count = self.units // size
            return rank * count * width, count * width
        assert size % self.units == 0, f"{self.units} units over {size} ranks"
        return rank * self.units // size * width, width


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is split along `dim`; no parts: every rank holds the whole."""

    dim: int = 0
    parts: tuple[Part, ...] = ()

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Ranges of the whole along `dim` that rank holds, in order."""
        spans, offset = [], 0
        for part in self.parts:
            start, length = part.share(rank, size)
            spans.append((offset + start, offset + start + length))
            offset += part.length
        return spans

    def local_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Shape of a rank's share of a tensor of `shape`; the same on every rank."""
        if not self.parts:
            return shape
        length = sum(stop - start for start, stop in self.spans(0, size))
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's share of a tensor in memory (a view where one span suffices)."""
        if not self.parts or size == 1:
            return whole
        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.spans(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


WHOLE = Cut()


def rows(length: int, units: int | None = None) -> Cut:
    """Rows (dim 0) by units; by single rows when `units` is not given."""
    return Cut(0, (Part(length, units or length),))


def columns(length: int, units: int | None = None) -> Cut:
    """Columns (dim 1) by units."""
    return Cut(1, (Part(length, units or length),))
