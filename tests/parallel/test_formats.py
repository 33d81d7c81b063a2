"""Matrices in codes: what they stand for, their rows, their products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import outrider.parallel.formats
from outrider.parallel.formats import (
    Fp8Matrix,
    Int4Matrix,
    Matrix,
    StackedMatrix,
    dequantised,
    quantise_fp8,
    row_pieces,
    row_range,
)
from outrider.parallel.ops import Ops

ROWS, COLUMNS = 24, 40


def random_fp8(rows: int = ROWS, block: tuple[int, int] = (8, 20)) -> Fp8Matrix:
    random = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, COLUMNS, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // block[0], COLUMNS // block[1], generator=random) + 0.1
    return Fp8Matrix(values, scales)


def random_int4() -> Int4Matrix:
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=random, dtype=torch.uint8)
    return Int4Matrix(codes, torch.rand(ROWS, 4, generator=random) + 0.1)


def by_hand(matrix: Fp8Matrix | Int4Matrix) -> Tensor:
    """Every number by itself."""
    result = torch.empty(matrix.shape)
    for o in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            if isinstance(matrix, Fp8Matrix):
                rows, columns = matrix.block
                code, scale = matrix.values[o, k].float(), matrix.scales[o // rows, k // columns]
            else:
                byte = int(matrix.codes[o, k // 2])
                code = float((byte >> 4 if k % 2 else byte & 15) - 8)
                scale = matrix.scales[o, k // (COLUMNS // matrix.scales.shape[1])]
            result[o, k] = code * scale
    return result


@pytest.mark.parametrize("matrix", [random_fp8(), random_int4()], ids=["fp8", "int4"])
def test_codes_stand_for_the_products_with_their_scales(matrix: Fp8Matrix | Int4Matrix) -> None:
    assert matrix.shape == (ROWS, COLUMNS)
    assert torch.equal(dequantised(matrix, torch.float32), by_hand(matrix))


@pytest.mark.parametrize(
    "matrix",
    [random_fp8(), random_int4(), StackedMatrix((random_fp8(16), torch.ones(3, COLUMNS)))],
    ids=["fp8", "int4", "stacked"],
)
def test_a_product_is_that_of_the_plain_matrix(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider.parallel.formats, "PIECE_ROWS", 10)  # several uneven pieces
    plain = dequantised(matrix, torch.float32)
    for shape in ((1,), (2, 3), (17,)):
        x = torch.randn(*shape, COLUMNS, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(Ops().linear(x, matrix), x @ plain.t())


def test_rows_of_a_matrix_are_views_of_whole_blocks() -> None:
    stacked = StackedMatrix((random_fp8(16), random_fp8()))
    plain = dequantised(stacked, torch.float32)
    for start, stop in ((0, 8), (8, 16), (16, 40), (24, 32)):
        part = row_range(stacked, start, stop)
        assert torch.equal(dequantised(part, torch.float32), plain[start:stop])
    with pytest.raises(AssertionError, match="over a border at 16"):
        row_range(stacked, 8, 24)
    with pytest.raises(AssertionError, match="in blocks of 8"):
        row_range(random_fp8(), 4, 12)


def test_pieces_are_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.parallel.formats, "PIECE_ROWS", 17)
    for matrix, sizes in ((random_fp8(), [16, 8]), (random_int4(), [17, 7])):
        pieces = row_pieces(matrix)
        assert [piece.shape[0] for piece in pieces] == sizes
        plain = torch.cat([dequantised(piece, torch.float32) for piece in pieces])
        assert torch.equal(plain, dequantised(matrix, torch.float32))


def test_rounding_keeps_each_block_within_its_own_step() -> None:
    """Blocks that differ a thousandfold, the last of them smaller, and one of zeros."""
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(3))
    factors = torch.tensor([[1e-3, 1.0, 1e3], [10.0, 0.0, 1e-2]])
    weight *= factors.repeat_interleave(32, 0).repeat_interleave(32, 1)[:40, :70]
    codes, scales = quantise_fp8(weight, 32)
    assert codes.shape == weight.shape
    assert scales.shape == (2, 3)
    back = codes.float() * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:40, :70]
    largest = torch.stack([b.abs().max() for a in weight.split(32) for b in a.split(32, 1)])
    step = (largest.view(2, 3) / 448 * 2**-9).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert ((back - weight).abs() <= 2**-4 * weight.abs() + step[:40, :70]).all()
    assert (back[32:, 32:64] == 0).all()
