"""Norms, gates, rotary, page writes and the best logit in Triton, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import place, rows
from outrider.parallel.ops import Ops
from tests.parallel.cases import written_rows

OPS = Ops()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7 if DEVICE == "cuda" else 2.0**-5}
"""Relative: float32 sums in another order; bfloat16 one rounding more or less. Interpreted,
bfloat16 is cut, not rounded: one unit of each of its roundings."""
EPS = 1e-6


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(*tensors):
    return [t.to(DEVICE) for t in tensors]


def close(got, want) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.float() - want.float()).abs()
    assert (error <= TOLERANCE[want.dtype] * (1.0 + want.float().abs())).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96,), (1, 256), (5, 100), (2, 3, 64), (2, 3, 4, 32), (0, 8)])
def test_rms_norm(dtype, shape) -> None:
    x, scale = rand(*shape, dtype=dtype), rand(shape[-1], seed=1)
    close(rows.rms_norm(*on_device(x, scale), EPS), OPS.rms_norm(x, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_views_with_a_scale_a_head(dtype) -> None:
    """Heads of a wider projection, NaN around them, three leading dims and two."""
    wide = torch.full((2, 3, 8 + 4 * 48 + 5), float("nan"), dtype=dtype)
    wide[..., 8 : 8 + 4 * 48] = rand(2, 3, 4 * 48, dtype=dtype)
    scale = rand(4, 48, seed=1)
    heads = wide[..., 8 : 8 + 4 * 48].unflatten(-1, (4, 48))
    got = rows.rms_norm(
        wide.to(DEVICE)[..., 8 : 8 + 4 * 48].unflatten(-1, (4, 48)), scale.to(DEVICE), EPS
    )
    close(got, OPS.rms_norm(heads, scale, EPS))
    flat = wide[:, :, 8:56]
    got = rows.rms_norm(wide.to(DEVICE)[:, :, 8:56], scale[0].to(DEVICE), EPS)
    close(got, OPS.rms_norm(flat, scale[0], EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 130), (2, 3, 64)])
def test_add_rms_norm(dtype, shape) -> None:
    """The sum rounds before it is normed; the residual may be a view."""
    x, scale = rand(*shape, dtype=dtype), rand(shape[-1], seed=1)
    residual = rand(*shape[:-1], shape[-1] + 7, seed=2, dtype=dtype)[..., 7:]
    total = x + residual
    normed, added = rows.add_rms_norm(*on_device(x, residual, scale), EPS)
    close(added, total)
    if DEVICE == "cuda" or dtype == torch.float32:
        assert torch.equal(added.cpu(), total)
    close(normed, OPS.rms_norm(total, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2 * 700), (2, 3, 2 * 65), (2 * 48,)])
def test_swiglu(dtype, shape) -> None:
    x = rand(*shape, dtype=dtype) * 4
    close(rows.swiglu(x.to(DEVICE)), OPS.swiglu(x))
    wide = torch.cat((x, x), -1).to(DEVICE)
    close(rows.swiglu(wide[..., : shape[-1]]), OPS.swiglu(x))


def rotated(x, cos, sin):
    width = cos.shape[-1]
    left, right = x[..., :width].chunk(2, -1)
    turned = x[..., :width] * cos + torch.cat((-right, left), -1) * sin
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)


def attention_inputs(dtype, b=2, r=3, n=4, m=2, d=64, turn=16):
    """qk and v as views of one projection, angles, scales; what the definition makes of qk."""
    wide = rand(b, r, (n + 2 * m) * d + 40, dtype=dtype)
    angle = rand(b, r, 1, turn // 2, seed=2) * 10
    angle = torch.cat((angle, angle), -1)
    scale = rand(n + m, d, seed=3)
    qk, v, _ = wide.split(((n + m) * d, m * d, 40), -1)
    qk, v = qk.unflatten(-1, (n + m, d)), v.unflatten(-1, (m, d))
    want = rotated(OPS.rms_norm(qk, scale, EPS), angle.cos(), angle.sin())
    return qk, v, scale, angle.cos(), angle.sin(), want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "turn"), [(64, 16), (48, 48), (256, 64)])
def test_qk_norm_rope(dtype, d, turn) -> None:
    qk, v, scale, cos, sin, want = attention_inputs(dtype, d=d, turn=turn)
    pages = on_device(torch.zeros(2, 4, 2, d, dtype=dtype), torch.zeros(2, 4, 2, d, dtype=dtype))
    where = written_rows(*on_device(cos, sin, torch.arange(6).view(2, 3)))
    q = rows.qk_norm_rope_write(*on_device(qk, v, scale), EPS, *pages, where)
    close(q, want[:, :, :4])
    close(pages[0].flatten(0, 1)[:6].view(2, 3, 2, d), want[:, :, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_without_queries(dtype) -> None:
    qk, v, scale, cos, sin, want = attention_inputs(dtype, d=64, turn=16)
    kv = torch.cat((qk[:, :, 4:], v), 2).to(DEVICE)
    pages = on_device(torch.zeros(2, 4, 2, 64, dtype=dtype), torch.zeros(2, 4, 2, 64, dtype=dtype))
    where = written_rows(*on_device(cos, sin, torch.arange(6).view(2, 3)))
    k, v_there = kv[:, :, :2], kv[:, :, 2:]
    q = rows.qk_norm_rope_write(k, v_there, scale[4:].to(DEVICE), EPS, *pages, where)
    assert q.shape == (2, 3, 0, 64)
    close(pages[0].flatten(0, 1)[:6].view(2, 3, 2, 64), want[:, :, 4:])
    close(pages[1].flatten(0, 1)[:6].view(2, 3, 2, 64), v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_touch_their_own_places_only(dtype) -> None:
    """Pages are NaN before, and NaN elsewhere after."""
    n, m, d, page = 4, 2, 64, 4
    qk, v, scale, cos, sin, want = attention_inputs(dtype, n=n, m=m, d=d)
    index = torch.tensor([[9, 2, 23], [16, 17, 5]])
    empty = torch.full((6, page, m, d), float("nan"), dtype=dtype)
    expected = [empty.clone(), empty.clone()]
    where = written_rows(cos, sin, index)
    defined = OPS.qk_norm_rope_write(qk, v, scale, EPS, *expected, where)
    assert torch.equal(defined, want[:, :, :n])

    k_pages, v_pages = on_device(empty.clone(), empty.clone())
    qk, v, scale, *where = on_device(qk, v, scale, cos, sin, index)
    q = rows.qk_norm_rope_write(qk, v, scale, EPS, k_pages, v_pages, written_rows(*where))
    close(q, want[:, :, :n])
    assert torch.equal(v_pages.cpu().nan_to_num(-99.0), expected[1].nan_to_num(-99.0))
    assert torch.equal(k_pages.isnan().cpu(), expected[0].isnan())
    close(k_pages.nan_to_num(-99.0), expected[0].nan_to_num(-99.0))


def top_of(logits):
    """Value and index that top_pair names."""
    bits, index = rows.top_pair(logits, 0).unbind(-1)
    return bits.contiguous().view(torch.float32), index.long()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 5000), (7, 2048), (3, 4097), (2, 9), (40, 33)])
def test_top_row(dtype, num_rows, width) -> None:
    """Few distinct values, so that nearly every row has ties; the wider row is a view."""
    logits = (rand(num_rows, width + 3, dtype=torch.float32).round() - 1).to(dtype)
    logits[:, width:] = 99.0
    value, index = top_of(logits.to(DEVICE)[:, :width])
    best = logits[:, :width].float().amax(-1)
    first = (logits[:, :width] == best[:, None].to(dtype)).int().argmax(-1)
    assert torch.equal(value.cpu(), best)
    assert torch.equal(index.cpu(), first)


def test_top_row_of_odd_values() -> None:
    """NaN, infinities, both zeros, denormals, all negative: torch's order, first of ties."""
    nan, inf = float("nan"), float("inf")
    logits = torch.full((7, 2500), -inf)
    logits[0] = nan
    logits[1, 2100] = -nan
    logits[2, 30], logits[2, 2400] = -0.0, 0.0
    logits[3, 7], logits[3, 2300] = inf, inf
    logits[4, 2050:] = -3.5
    logits[5, 99], logits[5, 98] = 1e-40, 0.0
    value, index = top_of(logits.to(DEVICE))
    assert index.tolist() == [0, 2100, 30, 7, 2050, 99, 0]
    want = torch.tensor([nan, nan, 0.0, inf, -3.5, 1e-40, -inf])
    assert torch.equal(value.cpu().nan_to_num(-99.0), want.nan_to_num(-99.0))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_pairs_name_the_first_best_of_all_ranks(size, num_rows) -> None:
    """The whole row cut over ranks: the same id as over the whole row, ties and NaN included."""
    share = 50
    whole = rand(num_rows, size * share).mul(2).round()
    whole[0, 3] = float("nan")
    pairs = [
        rows.top_pair(part.to(DEVICE), rank * share)
        for rank, part in enumerate(whole.split(share, -1))
    ]
    gathered = torch.stack(pairs)
    assert gathered.dtype == torch.int32
    ids = rows.choose_pair(gathered).cpu()
    best = whole.nan_to_num(99.0)
    first = (best == best.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(ids, first)
    values = gathered.cpu()[..., 0].contiguous().view(torch.float32).nan_to_num(99.0).amax(0)
    assert torch.equal(values, best.amax(-1))


@pytest.mark.parametrize(("page_tokens", "num_rows"), [(4, 1), (16, 6)])
@pytest.mark.parametrize(("shift", "more"), [(0, 0), (3, 1)])
def test_rows_are_placed_as_defined(page_tokens, num_rows, shift, more) -> None:
    """Negative and overlong positions, padding rows, a table that is a view."""
    table = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    first = torch.tensor([-1, 0, 7, 6 * page_tokens - 2])
    counts = torch.tensor([0, num_rows, 1, num_rows])
    cos, sin = rand(6 * page_tokens + 1, 6), rand(6 * page_tokens + 1, 6, seed=1)
    moved = (num_rows, page_tokens, shift, more)
    want = OPS.locate_rows(first, counts, table[:, :7], cos, sin, *moved)
    first, counts, table, cos, sin = on_device(first, counts, table, cos, sin)
    got = place.locate_rows(first, counts, table[:, :7], cos, sin, *moved)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other)
