"""Causal attention over pages, for a few rows a slot and for prompt chunks (split-K attention).

    q, pages -> a program a (part of the context, tile of rows, kv head, slot) -> partial sums
             -> a program a query head of a row adds its parts -> out * sigmoid(gate)

A tile holds some rows, each with the query heads that share a kv head. The parts of the context
begin at multiples of `chunk`, and a row adds up those that reach to its position, so that its
result depends neither on the slot's length nor on other rows. The grid follows from shapes alone.
Letters: B slots | R rows | n, m query and kv heads | d head width
"""

# Pyright sees a kernel as the plain function under @triton.jit, without its launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.operands import Rows

MIN_CHUNK, MAX_CHUNK = 64, 1024
"""Fewest and most keys of a part, unless the context would have too many parts."""
SMALL_TILE, FEW_TILES = 16, 16
"""A part has MIN_CHUNK keys where a tile has at most so many rows, or where the batch has at most
so many tiles, so that one slot is enough work for the device. ..."""
CHUNK_PER_TILE, LONG_CHUNK = 8, 512
"""... Elsewhere it has so many keys for each tile of the batch, and at least LONG_CHUNK."""
MAX_PARTS = 256
MAX_PARTIAL_ROWS = 1 << 17
"""The most partial sums of a call, each a row of d float32."""
MAX_TILE = 64
KEYS = 64
"""The most keys that a program reads in one step."""
COMBINE_PARTS, COMBINE_WIDTH = 32, 64
"""Parts, and elements of a head, that one step of the combining kernel reads."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a call is divided into programs."""

    tile: int
    """Rows of q, by head, of a tile."""
    tiles: int
    """Tiles of one slot and kv head."""
    keys: int
    """Keys of one step."""
    chunk: int
    """Keys of a part."""
    parts: int


def split_work(slots: int, rows: int, heads: int, kv_heads: int, context: int) -> Split:
    """The split for B, R, n, m and the number of keys that the block table can hold."""
    packed = rows * (heads // kv_heads)
    tile = min(MAX_TILE, max(16, triton.next_power_of_2(packed)))
    tiles = triton.cdiv(packed, tile)
    all_tiles = slots * kv_heads * tiles
    few = tile <= SMALL_TILE or all_tiles <= FEW_TILES
    wanted = MIN_CHUNK if few else min(MAX_CHUNK, max(LONG_CHUNK, CHUNK_PER_TILE * all_tiles))
    most = max(1, min(MAX_PARTS, MAX_PARTIAL_ROWS // (slots * rows * heads)))
    chunk = triton.next_power_of_2(max(wanted, triton.cdiv(context, most)))
    return Split(tile, tiles, min(KEYS, chunk), chunk, triton.cdiv(context, chunk))


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, gate: Tensor
) -> Tensor:
    """As Ops.paged_attention; the result of a row that sees no key is zero.

    q [B, R, n, d] and pages [P, page, m, d] may be views whose last dim has stride 1; d and `page`
    are powers of two; gate [B, R, n * d] may be a view of wider rows. -> [B, R, n * d].
    """
    slots, num_rows, heads, d = q.shape
    block_table, positions, lengths = rows.block_table, rows.positions, rows.lengths
    page, kv_heads = k_pages.shape[1:3]
    _check(q, k_pages, v_pages)
    out = torch.empty(slots, num_rows, heads * d, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    cut = split_work(slots, num_rows, heads, kv_heads, block_table.shape[1] * page)
    whole = cut.parts == 1
    partial, stats = out, out
    if not whole:
        shape = (slots * num_rows * heads, cut.parts)
        partial = torch.empty(*shape, d, dtype=torch.float32, device=q.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    gate_rows = gate.flatten(0, 1)
    wide = q.element_size() > 2
    keys = min(cut.keys, 32) if wide else cut.keys
    _attend_kernel[(cut.parts, cut.tiles, slots * kv_heads)](
        q, k_pages, v_pages, block_table, positions, lengths, gate_rows, out, partial, stats,
        q.stride(0), q.stride(1), q.stride(2), *k_pages.stride()[:3], *v_pages.stride()[:3],
        block_table.stride(0), positions.stride(0), gate_rows.stride(0), num_rows, cut.chunk,
        block_table.shape[1] * page, d**-0.5 * 1.4426950408889634,
        HEADS=heads, KV=kv_heads, D=d, PAGE=page, TILE=cut.tile,
        KEYS=keys, ONE=keys == cut.chunk, WHOLE=whole, WIDEN=not q.is_cuda,
        num_warps=8 if cut.tile == MAX_TILE else 4,
        num_stages=1 if wide else (2 if cut.tile == MAX_TILE else 3), **overlapped(q),
    )  # fmt: skip
    if not whole:
        width = min(d, COMBINE_WIDTH) if slots * num_rows * heads < 512 else d
        _combine_kernel[(slots * num_rows * heads, d // width)](
            partial, stats, positions, lengths, gate_rows, out,
            positions.stride(0), gate_rows.stride(0), num_rows, cut.chunk, cut.parts,
            HEADS=heads, D=d, WIDTH=width, PARTS=COMBINE_PARTS * COMBINE_WIDTH // width,
            num_warps=4, **overlapped(q),
        )  # fmt: skip
    return out


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    page, kv_heads, d = k_pages.shape[1:]
    if q.shape[2] % kv_heads or d != q.shape[3] or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"q {tuple(q.shape)} against k pages {tuple(k_pages.shape)} and v pages "
            f"{tuple(v_pages.shape)}: query heads a multiple of kv heads, one width, one shape"
        )
    if d < 16 or d & (d - 1) or page & (page - 1):
        raise ValueError(f"head width {d}, page {page}: powers of two (width at least 16) needed")
    if any(t.stride(-1) != 1 for t in (q, k_pages, v_pages)):
        raise ValueError("q and pages: the last dimension must be contiguous")


@triton.jit
def _product(a, b, total, WIDEN: tl.constexpr):
    """total + a @ b. WIDEN: in float32, for Triton's interpreter, which has no bfloat16 product."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _gated(out, gate, dtype: tl.constexpr):
    """out * sigmoid(gate), where both factors are rounded first, as in plain torch."""
    factor = tl.sigmoid(gate.to(tl.float32)).to(dtype)
    return out.to(dtype).to(tl.float32) * factor.to(tl.float32)


@triton.jit
def _page_rows(
    k_ptr, v_ptr, table_ptr, key, live, dim, k_page, k_token, v_page, v_token, PAGE: tl.constexpr
):  # fmt: skip
    """Keys and values at some positions [KEYS, D]; zero where `live` is False."""
    page = tl.load(table_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
    k_at, v_at = page * k_page + key % PAGE * k_token, page * v_page + key % PAGE * v_token
    k = tl.load(k_ptr + k_at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    return k, tl.load(v_ptr + v_at[:, None] + dim[None, :], mask=live[:, None], other=0.0)


@triton.jit
def _attend(
    q, k, v, key, end, position, high, weight, total, scale,
    TILE: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One step of the softmax over all keys -> the highest score so far, the sum of the weights and
    the weighted sum of the values, both relative to that score."""
    score = _product(q, tl.trans(k), tl.zeros((TILE, KEYS), tl.float32), WIDEN) * scale
    seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(high, tl.max(score, 1))
    p = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(high - higher)
    total = _product(p.to(v.dtype), v, total * shrink[:, None], WIDEN)
    return higher, weight * shrink + tl.sum(p, 1), total


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, position_ptr, length_ptr, gate_ptr, out_ptr, partial_ptr,
    stats_ptr, q_slot, q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    table_slot, position_slot, gate_token, rows, chunk, context, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr,
    WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of the context for one tile. WHOLE: there is one part only, so that its sums are the
    result. ONE: the part is one step, whose keys and values are loaded before it is known which of
    them the rows may see.
    """
    after_previous(PDL)
    dim = tl.arange(0, D)
    slot, kv = (tl.program_id(2) // KV).to(tl.int64), tl.program_id(2) % KV
    group: tl.constexpr = HEADS // KV
    packed = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, head = packed // group, kv * group + packed % group
    real = row < rows
    start = tl.program_id(0) * chunk
    k_ptr, v_ptr = k_ptr + kv * k_head, v_ptr + kv * v_head
    table_ptr += slot * table_slot
    if ONE:
        key = start + tl.arange(0, KEYS)
        k, v = _page_rows(
            k_ptr, v_ptr, table_ptr, key, key < context, dim,
            k_page, k_token, v_page, v_token, PAGE,
        )  # fmt: skip
    at = position_ptr + slot * position_slot + row
    position = tl.load(at, mask=real, other=-1).to(tl.int32)
    length = tl.load(length_ptr + slot).to(tl.int32)
    q_at = slot * q_slot + row * q_row + head * q_head
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    end = tl.minimum(tl.minimum(length, tl.max(position, 0) + 1), start + chunk)
    if (start >= end) & (not WHOLE):
        return

    high = tl.full((TILE,), -1e38, tl.float32)
    weight, total = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, D), tl.float32)
    if ONE:
        v = tl.where((key < end)[:, None], v, 0.0)
        high, weight, total = _attend(
            q, k, v, key, end, position, high, weight, total, scale, TILE, KEYS, WIDEN
        )
    else:
        for first in tl.range(start, end, KEYS):
            key = first + tl.arange(0, KEYS)
            k, v = _page_rows(
                k_ptr, v_ptr, table_ptr, key, key < end, dim,
                k_page, k_token, v_page, v_token, PAGE,
            )  # fmt: skip
            high, weight, total = _attend(
                q, k, v, key, end, position, high, weight, total, scale, TILE, KEYS, WIDEN
            )

    vector = (slot * rows + row) * HEADS + head
    if WHOLE:
        y = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        gate_at = ((slot * rows + row) * gate_token + head * D)[:, None] + dim[None, :]
        to = out_ptr + (vector * D)[:, None] + dim[None, :]
        gate = tl.load(gate_ptr + gate_at, mask=real[:, None], other=0.0)
        y = _gated(y, gate, out_ptr.dtype.element_ty)
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        _store_part(total, high, weight, partial_ptr, stats_ptr, vector, real, dim, D)


@triton.jit
def _store_part(total, high, weight, partial_ptr, stats_ptr, vector, real, dim, D: tl.constexpr):
    """Store a part's sums and their scale, for _combine_kernel."""
    at = vector * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + (at * D)[:, None] + dim[None, :], total, mask=real[:, None])
    tl.store(stats_ptr + at * 2, high, mask=real)
    tl.store(stats_ptr + at * 2 + 1, weight, mask=real)


@triton.jit
def _combine_kernel(
    partial_ptr, stats_ptr, position_ptr, length_ptr, gate_ptr, out_ptr,
    position_slot, gate_token, rows, chunk, parts,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program WIDTH elements of a query head of a row: adds up the parts that reach to it."""
    after_previous(PDL)
    vector = tl.program_id(0).to(tl.int64)
    token, head = vector // HEADS, vector % HEADS
    position = tl.load(position_ptr + token // rows * position_slot + token % rows)
    length = tl.load(length_ptr + token // rows)
    count = ((tl.minimum(position + 1, length) + chunk - 1) // chunk).to(tl.int32)
    dim = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    high = -1e38
    weight = 0.0
    total = tl.zeros((WIDTH,), tl.float32)
    for first in tl.range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        live = part < count
        place = vector * parts + part
        highs = tl.load(stats_ptr + place * 2, mask=live, other=float("-inf"))
        weights = tl.load(stats_ptr + place * 2 + 1, mask=live, other=0.0)
        at = partial_ptr + (place * D)[:, None] + dim[None, :]
        sums = tl.load(at, mask=live[:, None], other=0.0)
        higher = tl.maximum(high, tl.max(highs, 0))
        factor = tl.exp2(highs - higher)
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(sums * factor[:, None], 0)
        weight = weight * shrink + tl.sum(weights * factor, 0)
        high = higher
    y = total / tl.where(weight == 0.0, 1.0, weight)
    dtype = out_ptr.dtype.element_ty
    y = _gated(y, tl.load(gate_ptr + token * gate_token + head * D + dim), dtype)
    tl.store(out_ptr + vector * D + dim, y.to(dtype))
