"""Products with weights in FP8 blocks, against float32 products with the dequantised weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from outrider.parallel.backends.cuda import MAX_ARRIVALS, CudaOps
from outrider.parallel.formats import Fp8Matrix, Int4Matrix, StackedMatrix, dequantised
from outrider.parallel.group import Group, OneShotBuffers
from outrider.parallel.kernels import fp8, gemv, matmul
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, DTYPES, close, rand

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9),
    reason="float8 needs capability 8.9",
)
OPS = Ops()
NUM_ROWS = [1, 2, 6, 8, 9, 31, 48, 64, 90]
SHAPES = [(256, 384, 128, 128), (96, 320, 32, 64), (48, 416, 16, 32), (64, 576, 64, 192)]
"""O, K, and rows and columns of a block: no K is a power of two, and all are more than one step."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory of floating point numbers holds NaN."""
    empty = torch.empty

    def filled(*shape: int, **how: Any) -> Tensor:
        made = empty(*shape, **how)
        return made.fill_(float("nan")) if made.dtype in DTYPES else made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are not all held before the wait, and are split, as large ones are."""
    monkeypatch.setattr(gemv, "FP8_DEPTH", 192)
    monkeypatch.setattr(matmul, "LEAST_DEPTH", 128)


def blocks(num_rows: int, inner: int, rows: int, columns: int, seed: int = 1) -> Fp8Matrix:
    """Random codes, and scales of which neighbours differ by a factor of 2 to 8."""
    codes = (rand(num_rows, inner, seed=seed) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = num_rows // rows, inner // columns
    place = torch.arange(grid[0])[:, None] + torch.arange(grid[1])
    scales = 2.0 ** -(place % 4) * (1 + rand(*grid, seed=seed).abs() / 8)
    return Fp8Matrix(codes, scales * inner**-0.5 / 40)


def there(w: Fp8Matrix) -> Fp8Matrix:
    return Fp8Matrix(w.values.to(DEVICE), w.scales.to(DEVICE))


def product(x: Tensor, w: Fp8Matrix | StackedMatrix) -> Tensor:
    return x.float() @ dequantised(w, torch.float32).T


def counters() -> Tensor:
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows(num_rows: int, shape: tuple[int, ...]) -> None:
    w, arrivals = blocks(*shape), counters()
    x = rand(num_rows, shape[1], dtype=torch.bfloat16)
    got = matmul.few_rows(x.to(DEVICE), there(w), arrivals)
    close(got, product(x, w).to(torch.bfloat16))
    assert not arrivals.any()


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_weight_is_rounded(num_rows: int, gated: bool, shape: tuple[int, ...]) -> None:
    """Results in float32 are those of the float32 product. They go into columns of a wider tensor,
    of which the others stay as they were."""
    w, x = blocks(*shape), rand(num_rows, shape[1], dtype=torch.bfloat16)
    width = shape[0] // 2 if gated else shape[0]
    y = torch.full((num_rows, 8 + width + 5), float("nan"), device=DEVICE)
    gemv.gemv(x.to(DEVICE), there(w), y[:, 8 : 8 + width], gated=gated)
    want = product(x, w)
    close(y[:, 8 : 8 + width], OPS.swiglu(want) if gated else want, float32=1e-5)
    assert y[:, :8].isnan().all()
    assert y[:, 8 + width :].isnan().all()


@pytest.mark.parametrize("num_rows", [9, 31, 64, 90])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_rows(num_rows: int, shape: tuple[int, ...]) -> None:
    w, x = blocks(*shape), rand(num_rows, shape[1])
    got = matmul.few_rows(x.to(DEVICE), there(w), counters())
    close(got, product(x, w), float32=1e-5)


@pytest.mark.parametrize("num_rows", [2, 6, 9, 48, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_swiglu(num_rows: int, shape: tuple[int, ...]) -> None:
    """Also where a block holds rows of the gate and of the up part."""
    w, arrivals = blocks(*shape), counters()
    x = rand(num_rows, shape[1], dtype=torch.bfloat16)
    got = matmul.few_rows_swiglu(x.to(DEVICE), there(w), arrivals)
    close(got, OPS.swiglu(product(x, w).to(torch.bfloat16)))
    assert not arrivals.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_row_is_the_same_beside_any_others() -> None:
    """A row has the same bits beside any other rows, also NaN and infinity."""
    w, arrivals = there(blocks(*SHAPES[0])), counters()
    for count in (7, 20):
        x = rand(count, SHAPES[0][1], dtype=torch.bfloat16)
        other = rand(count, SHAPES[0][1], seed=5, dtype=torch.bfloat16)
        other[2], other[5], other[3] = float("nan"), float("inf"), x[3]
        for run in (matmul.few_rows, matmul.few_rows_swiglu):
            first, second = (run(t.to(DEVICE), w, arrivals) for t in (x, other))
            assert torch.equal(first[3], second[3])


def test_a_part_in_fp8_is_sent() -> None:
    """The packets that the other rank receives hold the words of the result."""
    received = [torch.zeros(2, 2, 8, 32, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    addresses = torch.tensor([t.data_ptr() for t in received], device=DEVICE)
    sequence = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    group = Group()
    group.one_shot = OneShotBuffers(received[0], addresses, sequence, 0, 2)
    w, x = blocks(64, 320, 32, 64), rand(3, 1, 320, dtype=torch.bfloat16)
    part = CudaOps(torch.device(DEVICE)).linear_part(x.to(DEVICE), there(w), group)
    assert part.sent
    close(part.values, product(x, w).to(torch.bfloat16))
    packets = received[1][1, 0, :3]  # of number 1, from rank 0
    assert (packets >> 32 == 1).all()
    assert torch.equal(
        (packets & 0xFFFFFFFF).to(torch.int32), part.values.flatten(0, 1).view(torch.int32)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 6, 9, 70, 260])
def test_stacked(dtype: torch.dtype, num_rows: int) -> None:
    """FP8 rows and plain rows write their columns of one result."""
    first, last = blocks(96, 320, 32, 64), rand(6, 320, seed=3, dtype=dtype) / 16
    x = rand(1, num_rows, 320, dtype=dtype)
    stacked = StackedMatrix((there(first), last.to(DEVICE), there(blocks(32, 320, 16, 32))))
    want = product(x, StackedMatrix((first, last, blocks(32, 320, 16, 32))))
    ops = CudaOps(torch.device(DEVICE))
    close(ops.linear(x.to(DEVICE), stacked), want.to(dtype), float32=1e-5)
    even = StackedMatrix(stacked.parts[:2])
    swiglu = OPS.swiglu(want[..., :102].to(dtype))
    close(ops.linear_swiglu(x.to(DEVICE), even), swiglu, float32=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    w, last = blocks(*shape), rand(6, shape[1], seed=3, dtype=dtype)
    close(fp8.plain(there(w), dtype), w.dequantised(dtype), float32=0.0)
    stacked = StackedMatrix((there(w), last.to(DEVICE)))
    want = torch.cat((w.dequantised(dtype), last))
    close(fp8.plain(stacked, dtype), want, float32=0.0)


READABLE = [(128, 128), (16, 32), (48, 96)]


@pytest.mark.parametrize(("rows", "columns"), [*READABLE, (8, 128), (24, 32), (128, 16), (128, 48)])
def test_other_blocks_are_multiplied_as_defined(rows: int, columns: int) -> None:
    """One predicate decides, and every operation gives the right result on either side of it."""
    w, ops = blocks(2 * rows, 3 * columns, rows, columns), CudaOps(torch.device(DEVICE))
    readable = (rows, columns) in READABLE
    assert fp8.readable(w) == readable
    assert fp8.readable(StackedMatrix((w, w.values.float()))) == readable
    group = Group()
    for num_rows in (3, 17, 260):
        x = rand(num_rows, 3 * columns, dtype=torch.bfloat16)
        want = product(x, w).to(torch.bfloat16)
        close(ops.linear(x.to(DEVICE), there(w)), want)
        close(ops.linear_swiglu(x.to(DEVICE), there(w)), OPS.swiglu(want))
        close(ops.linear_part(x.to(DEVICE), there(w), group).values, want)


def test_int4_is_multiplied_as_defined() -> None:
    w = Int4Matrix(torch.randint(0, 256, (8, 32), dtype=torch.uint8), rand(8, 2).abs())
    assert not fp8.readable(w)
    x = rand(3, 64, dtype=torch.bfloat16)
    moved = Int4Matrix(w.codes.to(DEVICE), w.scales.to(DEVICE))
    got = CudaOps(torch.device(DEVICE)).linear(x.to(DEVICE), moved)
    close(got, OPS.linear(x, w))


def test_every_split_has_columns_and_a_counter() -> None:
    for columns in (256, 5120, 7168, 8192, 17408):
        for inner in (512, 3072, 5120, 8704):
            for num_rows in (9, 48, 96):
                tiling = matmul.blocks_tiling(num_rows, columns, inner, 128, 2)
                assert tiling.split == 1 or inner // tiling.split >= matmul.LEAST_DEPTH
                assert 4 * -(-columns // tiling.columns) <= MAX_ARRIVALS


def test_more_rows_are_refused() -> None:
    w = there(blocks(32, 64, 16, 32))
    with pytest.raises(ValueError, match="96"):
        matmul.few_rows(rand(257, 64).to(DEVICE), w, counters())
