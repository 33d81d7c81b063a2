"""Which part of a whole tensor a rank holds: rows or columns, in units such as heads.

    Cut(dim, parts).spans(rank, size) -> [(start, stop), ...] of the whole along dim

A tensor that is several matrices in one (q | k | v) has one Part for each, split by its own units.
A unit is what must stay together, such as the columns of a head; size is the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """`length` rows or columns, which are `units` units of equal width."""

    length: int
    units: int
    taken: tuple[int, int] | None = None
    """(first, width): the only rows or columns of each unit that are taken; None: all of them."""

    def granule(self, size: int) -> int:
        """A number that divides the start and the length of every rank's ranges in this part."""
        unit = self.length // self.units
        if self.taken:
            return math.gcd(unit, *self.taken)
        if self.units == self.length and self.length % size == 0:
            return self.length // size
        return unit

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The ranges of this part that the rank holds, in order."""
        start, length = self.share(rank, size)
        if not self.taken:
            return [(start, start + length)]
        (first, width), unit = self.taken, self.length // self.units
        return [(a + first, a + first + width) for a in range(start, start + length, unit)]

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """(start, length) of this rank's units. Where there are fewer units than ranks, several
        ranks hold the same one."""
        width = self.length // self.units
        if self.units % size == 0:
            count = self.units // size
            return rank * count * width, count * width
        assert size % self.units == 0, f"{self.units} units over {size} ranks"
        return rank * self.units // size * width, width


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is split along `dim`. Without parts every rank holds the whole."""

    dim: int = 0
    parts: tuple[Part, ...] = ()

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The ranges of the whole along `dim` that the rank holds, in order."""
        spans, offset = [], 0
        for part in self.parts:
            spans += [(offset + a, offset + b) for a, b in part.spans(rank, size)]
            offset += part.length
        return spans

    def granule(self, length: int, size: int) -> int:
        """A number that divides the start and the length of every rank's ranges of a tensor that
        has `length` along dim."""
        parts = self.parts or (Part(length, 1),)
        return math.gcd(*(n for p in parts for n in (p.length, p.granule(size))))

    def local_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Shape of a rank's share of a tensor of `shape`. Every rank's share has the same."""
        if not self.parts:
            return shape
        length = sum(stop - start for start, stop in self.spans(0, size))
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's share of a tensor in memory: a view where it is one range, else a copy."""
        if not self.parts or size == 1:
            return whole
        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.spans(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


WHOLE = Cut()


def rows(length: int, units: int | None = None) -> Cut:
    """Split along dim 0, by `units` units of equal width or, without them, by single rows."""
    return Cut(0, (Part(length, units or length),))


def columns(length: int, units: int | None = None) -> Cut:
    """As rows, along dim 1."""
    return Cut(1, (Part(length, units or length),))
