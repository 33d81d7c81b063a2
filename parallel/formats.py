"""How a matrix is stored: as plain numbers, or as small codes with a scale for each block of them.

    UniformMatrix = Tensor | Fp8Matrix | Int4Matrix     Matrix = UniformMatrix | StackedMatrix

Operations take any of them as a weight (Ops.linear). A block that a cut over ranks divides becomes
several smaller blocks with the same scale, so that every share is made of whole blocks. Matrices of
several experts have one more dim in front.
Letters: O rows, which are columns of the product | K columns, the inner width
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
"""The largest number that float8_e4m3fn holds."""
FP8_BLOCK = 128
"""Rows and columns of a block where this engine quantises."""
INT4_ZERO = 8
"""The code of zero."""
PIECE_ROWS = 1024
"""Rows of a matrix in codes that the definition makes plain at a time."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Codes times the scale of their block. All blocks have one size."""

    values: Tensor
    """[.., O, K] float8_e4m3fn"""
    scales: Tensor
    """[.., O / block rows, K / block columns] float32"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        (o, k), (a, b) = self.values.shape[-2:], self.scales.shape[-2:]
        return o // a, k // b

    def __getitem__(self, index: int | Tensor) -> Fp8Matrix:
        """One of several experts' matrices, or several."""
        return Fp8Matrix(self.values[index], self.scales[index])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[.., O, K]: the products, made in float32, in `dtype`."""
        return (self.values.float() * spread(self.scales, self.block)).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """Codes of 4 bits, of which INT4_ZERO is subtracted, times the scale of their group."""

    codes: Tensor
    """[.., O, K / 2] uint8: the code of an even column in the low half of a byte, of the next one
    in the high half."""
    scales: Tensor
    """[.., O, K / group] float32"""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    def __getitem__(self, index: int | Tensor) -> Int4Matrix:
        """One of several experts' matrices, or several."""
        return Int4Matrix(self.codes[index], self.scales[index])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[.., O, K]: the products, made in float32, in `dtype`."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2).float()
        group = codes.shape[-1] // self.scales.shape[-1]
        return ((codes - INT4_ZERO) * spread(self.scales, (1, group))).to(dtype)


UniformMatrix = Tensor | Fp8Matrix | Int4Matrix
"""A matrix that is stored in one way."""


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices of one inner width whose rows follow each other, each stored in its own way."""

    parts: tuple[UniformMatrix, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(p.shape[0] for p in self.parts), self.parts[0].shape[1]))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[O, K]: all rows, in `dtype`."""
        return torch.cat([dequantised(part, dtype) for part in self.parts])


Matrix = UniformMatrix | StackedMatrix


def dequantised(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as plain numbers; itself where it is that already."""
    return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantised(dtype)


def row_range(matrix: Matrix, start: int, stop: int) -> Matrix:
    """A view of rows start..stop, which in an Fp8Matrix are whole blocks, and lie within one part
    of a StackedMatrix."""
    if isinstance(matrix, StackedMatrix):
        first, *rest = matrix.parts
        if stop <= first.shape[0]:
            return row_range(first, start, stop)
        below = first.shape[0]
        assert start >= below, f"rows {start}:{stop} over a border at {below}"
        return row_range(StackedMatrix(tuple(rest)), start - below, stop - below)
    if isinstance(matrix, Tensor):
        return matrix[start:stop]
    if isinstance(matrix, Int4Matrix):
        return Int4Matrix(matrix.codes[start:stop], matrix.scales[start:stop])
    rows = matrix.block[0]
    assert start % rows == stop % rows == 0, f"rows {start}:{stop} in blocks of {rows}"
    return Fp8Matrix(matrix.values[start:stop], matrix.scales[start // rows : stop // rows])


def row_pieces(matrix: UniformMatrix) -> list[Matrix]:
    """Views of the matrix's rows, whole blocks and about PIECE_ROWS of them at a time."""
    block_rows = matrix.block[0] if isinstance(matrix, Fp8Matrix) else 1
    step, num_rows = max(1, PIECE_ROWS // block_rows) * block_rows, matrix.shape[0]
    starts = range(0, num_rows, step)
    return [row_range(matrix, start, min(start + step, num_rows)) for start in starts]


def spread(scales: Tensor, block: Sequence[int]) -> Tensor:
    """scales [.., a, b] -> [.., a * block rows, b * block columns]: each one for its block."""
    return scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)


def quantise_fp8(weight: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """weight [O, K] -> (codes float8_e4m3fn [O, K], scales float32 [ceil(O / block), ceil(K /
    block)]).

    A code times the scale of its block is close to the weight, and the largest of a block is exact
    up to the rounding of its scale. Blocks begin at row and column 0; the last ones may be smaller.
    """
    rows, columns = weight.shape
    grid = math.ceil(rows / block), math.ceil(columns / block)
    wide = torch.zeros(grid[0] * block, grid[1] * block, device=weight.device)
    wide[:rows, :columns] = weight
    blocks = wide.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [a, block, b, block]
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    codes = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales
