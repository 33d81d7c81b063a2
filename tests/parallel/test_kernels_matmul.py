"""Products of few rows, plain, gated and as the best logit, and SwiGLU, against the definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.backends.cuda import MAX_ARRIVALS
from outrider.parallel.kernels import matmul
from outrider.parallel.ops import Ops
from outrider.parallel.vocab import quantise_rows
from tests.parallel import cases
from tests.parallel.cases import DEVICE, DTYPES, rand

OPS = Ops()
CUDA = DEVICE == "cuda"
close = partial(cases.close, float32=1e-5)
NUM_ROWS = [1, 2, 6, 16, 17, 48, 64]


def weight(rows, inner, dtype, seed=1):
    return (rand(rows, inner, seed=seed) * inner**-0.5).to(dtype)


def counters():
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=DEVICE)


@pytest.fixture
def split(monkeypatch):
    """Small weights, as tests have, are split as large ones are."""
    monkeypatch.setattr(matmul, "LEAST_DEPTH", 128)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("columns", "inner"), [(96, 1024), (67, 272), (33, 100)])
def test_few_rows(dtype, num_rows, columns, inner) -> None:
    x, w, arrivals = rand(num_rows, inner, dtype=dtype), weight(columns, inner, dtype), counters()
    got = matmul.few_rows(x.to(DEVICE), w.to(DEVICE), arrivals)
    close(got, OPS.linear(x, w))
    assert not arrivals.any()
    tiling = matmul.rows_tiling(num_rows, columns, inner, x.element_size())
    held = inner == 1024 and num_rows <= 32 and dtype == torch.bfloat16
    assert tiling.held == held
    assert tiling.split == (2 if held else min(8, max(1, inner // 128)))


def test_tilings_of_many_shapes() -> None:
    """There are enough counters, and every split has at least LEAST_DEPTH of K."""
    for columns in (32, 1000, 2048, 2560, 4112, 6144, 12288, 124160):
        for inner in (512, 1024, 2048, 3072, 4096, 6144):
            for num_rows in NUM_ROWS:
                tiling = matmul.rows_tiling(num_rows, columns, inner, 2)
                assert tiling.split == 1 or -(-columns // tiling.columns) <= MAX_ARRIVALS
                assert tiling.split == 1 or inner // tiling.split >= matmul.LEAST_DEPTH


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [2, 34])
def test_views_and_leading_dims(dtype, num_rows) -> None:
    """x is a view of wider rows, which are NaN elsewhere."""
    wide = torch.full((2, num_rows // 2, 300 + 33), float("nan"), dtype=dtype)
    wide[..., 16:272] = rand(2, num_rows // 2, 256, dtype=dtype)
    w, arrivals = weight(40, 256, dtype), counters()
    got = matmul.few_rows(wide.to(DEVICE)[..., 16:272], w.to(DEVICE), arrivals)
    close(got, OPS.linear(wide[..., 16:272].contiguous(), w))
    got = matmul.few_rows_swiglu(wide.to(DEVICE)[..., 16:272], w.to(DEVICE), arrivals)
    close(got, OPS.swiglu(OPS.linear(wide[..., 16:272].contiguous(), w)))
    row = wide[1, 0, 16:272]
    close(
        matmul.few_rows(wide.to(DEVICE)[1, 0, 16:272], w.to(DEVICE), arrivals), OPS.linear(row, w)
    )
    assert matmul.few_rows(wide.to(DEVICE)[:0, :, 16:272], w.to(DEVICE), arrivals).numel() == 0
    with pytest.raises(ValueError, match="64"):
        matmul.few_rows(rand(65, 256).to(DEVICE), w.to(DEVICE), arrivals)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("width", "inner"), [(96, 1024), (37, 144)])
def test_few_rows_swiglu(dtype, num_rows, width, inner) -> None:
    x, w = rand(num_rows, inner, dtype=dtype), weight(2 * width, inner, dtype)
    arrivals = counters()
    got = matmul.few_rows_swiglu(x.to(DEVICE), w.to(DEVICE), arrivals)
    close(got, OPS.swiglu(OPS.linear(x, w)))
    assert not arrivals.any()


@pytest.mark.usefixtures("split")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_others(dtype) -> None:
    """A row has the same bits beside any other rows, also NaN and infinity, and in each launch."""
    x, w, arrivals = rand(7, 512, dtype=dtype), weight(70, 512, dtype).to(DEVICE), counters()
    other = rand(7, 512, seed=5, dtype=dtype)
    other[2], other[5] = float("nan"), float("inf")
    other[3] = x[3]
    for run in (
        lambda x: matmul.few_rows(x, w, arrivals),
        lambda x: matmul.few_rows_swiglu(x, w, arrivals),
        lambda x: matmul.head_top_pair(x, w, 0),
    ):
        first = run(x.to(DEVICE))
        assert torch.equal(first, run(x.to(DEVICE)))
        assert torch.equal(first[3], run(other.to(DEVICE))[3])


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_other_tilings(monkeypatch, weight_first, gated) -> None:
    """Any tiling computes the same, also where the last split of K is short or empty."""
    x, w, arrivals = rand(5, 200), weight(150, 200, torch.float32), counters()
    for split in (1, 3, 4):
        tiling = matmul.Tiling(64, 256, split, 4, 2, weight_first)
        monkeypatch.setattr(matmul, "rows_tiling", lambda *_, t=tiling: t)
        run = matmul.few_rows_swiglu if gated else matmul.few_rows
        want = OPS.linear(x, w)
        close(run(x.to(DEVICE), w.to(DEVICE), arrivals), OPS.swiglu(want) if gated else want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2 * 700), (2, 3, 2 * 65), (2 * 48,)])
def test_swiglu(dtype, shape) -> None:
    x = rand(*shape, dtype=dtype) * 4
    close(matmul.swiglu(x.to(DEVICE)), OPS.swiglu(x))
    wide = torch.cat((x, x), -1).to(DEVICE)
    close(matmul.swiglu(wide[..., : shape[-1]]), OPS.swiglu(x))


def integers(*shape, seed, dtype):
    """-1, 0 and 1: sums of products of these are exact in any order, and are often equal."""
    return rand(*shape, seed=seed).round().clamp(-1, 1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("share", "inner"), [(700, 64), (65, 100)])
def test_head_top_pair(dtype, num_rows, share, inner) -> None:
    """Sums of small integers are exact, so the pair is the same: that of the first best logit."""
    x = integers(num_rows, inner, seed=0, dtype=dtype)
    w = integers(share, inner, seed=1, dtype=dtype)
    got = matmul.head_top_pair(x.to(DEVICE), w.to(DEVICE), 1000)
    want = OPS.top_pair(OPS.linear(x, w), 1000)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), want)


def test_logits_round_before_they_are_compared() -> None:
    """256 and 257 are the same bfloat16, so the first of the two is chosen."""
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    w = torch.zeros(130, 64, dtype=torch.bfloat16)
    w[3, 0], w[129, 0], w[129, 1] = 256.0, 256.0, 1.0
    got = matmul.head_top_pair(x.to(DEVICE), w.to(DEVICE), 10)
    assert got[0, 1].item() == 13


def test_negative_logits_and_nan() -> None:
    """Columns beyond the share are never chosen; NaN is, as in torch."""
    x, w = torch.ones(2, 64), -weight(67, 64, torch.float32).abs() - 1
    x[1, 5] = float("nan")
    got = matmul.head_top_pair(x.to(DEVICE), w.to(DEVICE), 0).cpu()
    assert got[0, 1] == (x @ w.T)[0].argmax()
    assert got[1, 1] == 0


@pytest.mark.skipif(
    CUDA and torch.cuda.get_device_capability() < (8, 9), reason="float8 needs capability 8.9"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("share", "inner"), [(300, 64), (65, 112)])
def test_head_top_pair_fp8(dtype, num_rows, share, inner) -> None:
    """With integers and scales that are powers of two logits are exact, so the pair is the same."""
    x = integers(num_rows, inner, seed=0, dtype=dtype)
    w8 = integers(share, inner, seed=1, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = 2.0 ** rand(share, seed=2).round().clamp(-2, 2)
    got = matmul.head_top_pair_fp8(*(t.to(DEVICE) for t in (x, w8, scales)), 7)
    logits = ((x.float() @ w8.float().T) * scales).to(dtype)
    assert torch.equal(got.cpu(), OPS.top_pair(logits, 7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_rows(dtype) -> None:
    """Each row is at most half a step of float8 from what it was; a row of zeros stays zeros."""
    w = rand(9, 64, dtype=dtype) * torch.arange(9)[:, None].to(dtype)
    w8, scales = quantise_rows(w)
    assert w8.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    error = (w8.float() * scales[:, None] - w.float()).abs()
    largest = w.float().abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(w.float().abs() / 16, largest / 448 / 512) * 1.001).all()
    assert not w8[0].float().any()
