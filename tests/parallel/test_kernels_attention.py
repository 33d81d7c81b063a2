"""Paged attention in Triton against the definition, which runs in float32 on the same inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import attention
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, attending_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2 if DEVICE == "cuda" else 6e-2}
"""Absolute, for results up to about 3. Triton's interpreter truncates to bfloat16."""


def filled(lengths, rows, n, m, d, page, dtype=torch.float32, seed=0, spare=0):
    """Slots of these lengths, with pages in no order that are NaN beyond the lengths.

    -> q, k pages, v pages, block table, positions, lengths
    """
    generator = torch.Generator().manual_seed(seed)
    slots, width = len(lengths), max(1, -(-max(lengths) // page)) + spare
    pages = torch.randperm(slots * width, generator=generator) + 1
    table = pages.view(slots, width)
    k_pages = torch.full((slots * width + 1, page, m, d), float("nan"), dtype=dtype)
    v_pages = k_pages.clone()
    for b, length in enumerate(lengths):
        for t in range(length):
            place = table[b, t // page], t % page
            k_pages[place] = torch.randn(m, d, generator=generator).to(dtype)
            v_pages[place] = torch.randn(m, d, generator=generator).to(dtype)
    # q is a view of a projection's row, as the layers hand it over.
    wide = torch.randn(slots, rows, n + 2, d, generator=generator).to(dtype)
    last = torch.tensor(lengths)[:, None]
    positions = (last - rows + torch.arange(rows)).clamp(min=0)
    return wide[:, :, :n], k_pages, v_pages, table, positions, torch.tensor(lengths)


def open_gate(q):
    """A gate of 100, whose sigmoid is 1."""
    return torch.full((*q.shape[:2], q.shape[2] * q.shape[3]), 100.0, dtype=q.dtype)


def defined(q, k_pages, v_pages, *where):
    pages = k_pages.float(), v_pages.float()
    return Ops().paged_attention(q.float(), *pages, attending_rows(*where), open_gate(q.float()))


def run(arguments, gate=None):
    gate = open_gate(arguments[0]) if gate is None else gate
    q, k_pages, v_pages, *where, gate = (t.to(DEVICE) for t in (*arguments, gate))
    return attention.paged_attention(q, k_pages, v_pages, attending_rows(*where), gate).cpu()


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 16 keys, added up two at a time, so that a short context has many of them."""
    set_chunk(monkeypatch, 16)


def set_chunk(monkeypatch, keys: int) -> None:
    monkeypatch.setattr(attention, "MIN_CHUNK", keys)
    monkeypatch.setattr(attention, "MAX_CHUNK", keys)
    monkeypatch.setattr(attention, "COMBINE_PARTS", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "n", "m", "d", "page"),
    [
        (1, 4, 1, 64, 16),
        (6, 4, 1, 32, 32),
        (17, 4, 2, 32, 16),
        (3, 6, 2, 64, 128),
        (2, 2, 2, 32, 4),
    ],
)
@pytest.mark.parametrize("chunk", [16, 256])
def test_equals_the_definition(monkeypatch, dtype, rows, n, m, d, page, chunk) -> None:
    """Different lengths, 1 to 4 query heads a kv head, one and several tiles and parts."""
    set_chunk(monkeypatch, chunk)
    arguments = filled([33, 1, 61], rows, n, m, d, page, dtype)
    cut = attention.split_work(3, rows, n, m, arguments[3].shape[1] * page)
    assert (cut.parts > 1) is (chunk == 16)
    out = run(arguments)
    assert out.dtype == dtype
    assert (out.float() - defined(*arguments)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_served_shape(dtype) -> None:
    """Width 256 and six rows. Parts beyond a slot's length do nothing."""
    arguments = filled([70, 5], 6, 4, 1, 256, 16, dtype, spare=12)
    assert attention.split_work(2, 6, 4, 1, arguments[3].shape[1] * 16).parts == 5
    assert (run(arguments).float() - defined(*arguments)).abs().max() < TOLERANCE[dtype]


def test_prefill_tiles() -> None:
    """A chunk of many rows after an earlier chunk, in several tiles."""
    arguments = filled([70, 50], 40, 4, 1, 32, 16)
    assert attention.split_work(2, 40, 4, 1, 80).tiles == 3
    out = run(arguments)
    assert (out - defined(*arguments)).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_a_view_of_the_projection(monkeypatch, dtype, chunk) -> None:
    set_chunk(monkeypatch, chunk)
    arguments = filled([40, 9], 3, 4, 2, 32, 16, dtype)
    gate = torch.randn(2, 3, 4 * 32 + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate = gate[..., 8:]
    plain = run(arguments)
    want = plain * torch.sigmoid(gate)
    error = (run(arguments, gate).float() - want.float()).abs().max()
    assert error < TOLERANCE[dtype]


def test_nothing_to_see_is_zero(small_parts) -> None:
    """Padding has length 0 or negative positions. The other rows are as without it."""
    arguments = filled([20, 0, 37], 3, 4, 2, 32, 16)
    arguments[4][0, 0] = -1
    out, want = run(arguments), defined(*arguments)
    assert not out[1].any()
    assert not out[0, 0].any()
    assert (out[0, 1:] - want[0, 1:]).abs().max() < TOLERANCE[torch.float32]
    assert (out[2] - want[2]).abs().max() < TOLERANCE[torch.float32]


def test_a_row_depends_on_its_position_only(small_parts) -> None:
    """A row has the same bits at another place of its tile, and with a longer context after it."""
    q, k_pages, v_pages, table, positions, lengths = filled([50], 6, 4, 1, 32, 16)
    want = run((q, k_pages, v_pages, table, positions, lengths))
    shifted = torch.cat((q[:, 4:], q[:, :4]), 1)
    moved = torch.cat((positions[:, 4:], positions[:, :4]), 1)
    again = run((shifted, k_pages, v_pages, table, moved, lengths))[:, 2:]
    others = positions.clone()
    others[:, 1:] = 0
    first = run((q, k_pages, v_pages, table, others, lengths - 5))[:, 0]
    slack = 0.0 if DEVICE == "cuda" else 1e-6  # NumPy's products depend on a row's place
    assert (again - want[:, :4]).abs().max() <= slack
    assert (first - want[:, 0]).abs().max() <= slack


@pytest.mark.parametrize("context", [16, 2048, 32768])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2)])
@pytest.mark.parametrize("rows", [1, 6, 17, 512])
@pytest.mark.parametrize("slots", [1, 8, 64])
def test_cuts_cover_the_context_within_bounds(slots, rows, heads, context) -> None:
    cut = attention.split_work(slots, rows, *heads, context)
    assert cut.parts * cut.chunk >= context
    assert cut.parts == 1 or (cut.parts - 1) * cut.chunk < context
    assert cut.tile * cut.tiles >= rows * heads[0] // heads[1]
    assert cut.chunk % cut.keys == 0
    assert cut.parts <= attention.MAX_PARTS
    lines = slots * rows * heads[0]
    assert cut.parts * lines <= max(attention.MAX_PARTIAL_ROWS, lines)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of kv heads"):
        run(filled([5], 1, 3, 2, 32, 16))
    with pytest.raises(ValueError, match="powers of two"):
        run(filled([5], 1, 2, 2, 24, 16))
