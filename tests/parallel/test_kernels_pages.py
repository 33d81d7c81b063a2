"""Rows located in their pages, and keys and values written there, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import pages
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, DTYPES, EPS, close, on_device, rand, written_rows

OPS = Ops()


def rotated(x, cos, sin):
    width = cos.shape[-1]
    left, right = x[..., :width].chunk(2, -1)
    turned = x[..., :width] * cos + torch.cat((-right, left), -1) * sin
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)


def attention_inputs(dtype, b=2, r=3, n=4, m=2, d=64, turn=16):
    """qk and v as views of one projection, scale, cos and sin, and the normed and rotated qk."""
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
    cache = on_device(torch.zeros(2, 4, 2, d, dtype=dtype), torch.zeros(2, 4, 2, d, dtype=dtype))
    where = written_rows(*on_device(cos, sin, torch.arange(6).view(2, 3)))
    q = pages.qk_norm_rope_write(*on_device(qk, v, scale), EPS, *cache, where)
    close(q, want[:, :, :4])
    close(cache[0].flatten(0, 1)[:6].view(2, 3, 2, d), want[:, :, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_without_queries(dtype) -> None:
    qk, v, scale, cos, sin, want = attention_inputs(dtype, d=64, turn=16)
    kv = torch.cat((qk[:, :, 4:], v), 2).to(DEVICE)
    cache = on_device(torch.zeros(2, 4, 2, 64, dtype=dtype), torch.zeros(2, 4, 2, 64, dtype=dtype))
    where = written_rows(*on_device(cos, sin, torch.arange(6).view(2, 3)))
    k, v_there = kv[:, :, :2], kv[:, :, 2:]
    q = pages.qk_norm_rope_write(k, v_there, scale[4:].to(DEVICE), EPS, *cache, where)
    assert q.shape == (2, 3, 0, 64)
    close(cache[0].flatten(0, 1)[:6].view(2, 3, 2, 64), want[:, :, 4:])
    close(cache[1].flatten(0, 1)[:6].view(2, 3, 2, 64), v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_touch_their_own_places_only(dtype) -> None:
    """Pages are NaN before, and afterwards still NaN where no row was written."""
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
    q = pages.qk_norm_rope_write(qk, v, scale, EPS, k_pages, v_pages, written_rows(*where))
    close(q, want[:, :, :n])
    assert torch.equal(v_pages.cpu().nan_to_num(-99.0), expected[1].nan_to_num(-99.0))
    assert torch.equal(k_pages.isnan().cpu(), expected[0].isnan())
    close(k_pages.nan_to_num(-99.0), expected[0].nan_to_num(-99.0))


@pytest.mark.parametrize(("page_tokens", "num_rows"), [(4, 1), (16, 6)])
@pytest.mark.parametrize(("shift", "more"), [(0, 0), (3, 1)])
def test_rows_are_located_as_defined(page_tokens, num_rows, shift, more) -> None:
    """Positions below 0 and beyond the table, padding rows, a block table that is a view."""
    table = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    first = torch.tensor([-1, 0, 7, 6 * page_tokens - 2])
    counts = torch.tensor([0, num_rows, 1, num_rows])
    cos, sin = rand(6 * page_tokens + 1, 6), rand(6 * page_tokens + 1, 6, seed=1)
    moved = (num_rows, page_tokens, shift, more)
    want = OPS.locate_rows(first, counts, table[:, :7], cos, sin, *moved)
    first, counts, table, cos, sin = on_device(first, counts, table, cos, sin)
    got = pages.locate_rows(first, counts, table[:, :7], cos, sin, *moved)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other)
