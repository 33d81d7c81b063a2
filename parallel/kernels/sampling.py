"""Sampling in Triton, as parallel/sampling.py defines it: filters, edits and log probabilities.

    logits [N, v] -> kernels/scan.py -> candidates: the best of all ranks, which decide most rows
    -> mass: sums over all ids -> finish: rows whose kept set is large, and log probabilities
    drafts: logits -> kernels/scan.py -> draft

Each is one launch; mass and finish return at once for rows that need none of it. One program has a
row, and exchanges what it needs with the same row's program on the other ranks as
kernels/one_shot.py does. Shapes: B slots | R rows a slot | N = B R | v ids of this rank
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import OneShotBuffers
from outrider.parallel.kernels.argmax import LOWEST, bits_and_index, key_of
from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.kernels.noise import EXACT_SUMS, position_of, row_keys, slot_of
from outrider.parallel.kernels.scan import DRAFT_FLOOR, TILE, is_filtered, scan, settings_of
from outrider.parallel.kernels.selection import (
    ALL,
    LAST_INDEX,
    MASS_UNIT,
    best_of_row,
    best_over_ranks,
    combine_over_ranks,
    draw,
    draw_from_large,
    element,
    kept_candidates,
    mass_of,
    merge_over_ranks,
    value_of,
)
from outrider.parallel.operands import PickRows, SlotSampling
from outrider.parallel.sampling import CANDIDATES

MASS_PIECE, SEARCH_PIECE = 4096, 4096
"""Logits that a program of `mass`, and one of `finish`, reads at a time."""
REPORTED = 32
"""The likeliest ids that a rank offers for log probabilities: a power of two, at least 20."""
MOST_ROWS = 256
"""Rows of a launch, where no buffers limit them."""
SUM_OVER_ALL, SEARCH = tl.constexpr(1), tl.constexpr(2)
"""What a row needs after `candidates`; 0 for nothing."""


def pick_ids(
    logits: Tensor,
    first_id: int,
    buffers: OneShotBuffers | None,
    rows: PickRows,
    by_slot: SlotSampling,
    num_top: int | None,
    *,
    exact: bool,
) -> tuple[Tensor, ...]:
    """As Ops.pick_ids with all features, from logits [B, R, v]; num_top: features.logprobs.

    buffers: those of the group, None for a group of one.
    """
    num_slots, num_rows = logits.shape[:2]
    most = max(1, (buffers.rows if buffers else MOST_ROWS) // num_rows)
    parts = []
    for start in range(0, num_slots, most):
        part = slice(start, start + most)
        some = PickRows(
            slots=rows.slots[part],
            last=rows.last[part],
            shift=rows.shift,
            drafts=None if rows.drafts is None else rows.drafts[part],
        )
        parts.append(_pick(logits[part], first_id, buffers, some, by_slot, num_top, exact))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts))


def _exchange_of(buffers: OneShotBuffers | None, unused: Tensor) -> tuple[Any, dict[str, Any]]:
    """The arguments of kernels that exchange words over ranks: tensors, and constants."""
    if buffers is None:
        return (unused,) * 3, {"ROWS": 1, "WORDS": 1, "RANK": 0, "SIZE": 1}
    tensors = (buffers.addresses, buffers.received, buffers.sequence)
    return tensors, {
        "ROWS": buffers.rows,
        "WORDS": buffers.words,
        "RANK": buffers.rank,
        "SIZE": buffers.size,
    }


def _pick(
    logits: Tensor,
    first_id: int,
    buffers: OneShotBuffers | None,
    rows: PickRows,
    by_slot: SlotSampling,
    num_top: int | None,
    exact: bool,
) -> tuple[Tensor, ...]:
    num_slots, num_rows, width = logits.shape
    n, where, flat = num_slots * num_rows, logits.device, logits.reshape(-1, width)
    assert num_top is None or num_top <= REPORTED
    assert buffers is None or 2 * max(CANDIDATES, REPORTED) <= buffers.words
    reports, integers = num_top is not None, partial(torch.empty, dtype=torch.int64, device=where)
    made = scan(flat, first_id, rows, by_slot, exact=exact, reports=reports)
    pieces, num_tiles = made.best.shape[1], made.tiles.shape[1]
    settings, ids = settings_of(rows, by_slot), integers(num_slots, num_rows)
    exchange, places = _exchange_of(buffers, ids)
    if not exact:
        _draft_kernel[(n,)](
            made.x, made.tiles, made.best, *settings, ids, *exchange,
            num_rows, first_id, width, pieces, num_tiles,
            TILES=triton.next_power_of_2(num_tiles), PIECES=triton.next_power_of_2(pieces),
            num_warps=4, **places, **EXACT_SUMS, **overlapped(logits),
        )  # fmt: skip
        return (ids,)
    size = places["SIZE"]
    merged = integers(2 * n, triton.next_power_of_2(size * max(CANDIDATES, REPORTED)))
    tops = torch.empty(n, 2, dtype=torch.float32, device=where)
    top_ids = integers(num_slots, num_rows, 1 + (num_top or 0))
    top_values = torch.empty(top_ids.shape, dtype=torch.float32, device=where)
    facts, sums = integers(n, 2), integers(n, 2)
    outputs = (ids, merged, facts, sums, tops, top_ids, top_values)
    _candidates_kernel[(n,)](
        flat, *made, *settings, *outputs, *exchange,
        num_rows, first_id, width, flat.stride(0), rows.shift, pieces, num_tiles, num_top or 0,
        REPORTS=reports, COUNT=CANDIDATES, REPORTED=REPORTED, TILE=TILE,
        TILES=max(CANDIDATES, triton.next_power_of_2(num_tiles)),
        PIECES=triton.next_power_of_2(pieces), MERGED=triton.next_power_of_2(size * CANDIDATES),
        MERGED_TOPS=triton.next_power_of_2(size * REPORTED), STRIDE=merged.shape[1],
        num_warps=8, **places, **EXACT_SUMS, **overlapped(logits),
    )  # fmt: skip
    _mass_kernel[(triton.cdiv(width, MASS_PIECE), n)](
        flat, made.x, rows.slots, by_slot.reported, facts, sums, tops,
        num_rows, width, flat.stride(0),
        REPORTS=reports, PIECE=MASS_PIECE, **EXACT_SUMS, **overlapped(logits),
    )  # fmt: skip
    _finish_kernel[(n,)](
        flat, made.x, *settings, *outputs, *exchange,
        num_rows, first_id, width, flat.stride(0), rows.shift, num_top or 0,
        REPORTS=reports, MERGED=triton.next_power_of_2(size * CANDIDATES),
        STRIDE=merged.shape[1], TOPS=REPORTED, PIECE=SEARCH_PIECE, num_warps=16,
        **places, **EXACT_SUMS, **overlapped(logits),
    )  # fmt: skip
    return (ids, top_ids, top_values) if reports else (ids,)


@triton.jit
def _filters(slot, top_k, top_p, log_min_p):
    """How many ids the slot keeps at most, which share of the mass, and how far below the top."""
    limit = tl.load(top_k + slot)
    return tl.where(limit > 0, limit, ALL), tl.load(top_p + slot), tl.load(log_min_p + slot)


@triton.jit(do_not_specialize=["R", "first_id", "pieces", "num_tiles"])
def _draft_kernel(
    x, tiles, best, slots, last, seed, drawn, top_k, top_p, log_min_p, reported,
    ids, addresses, received, sequence, R, first_id, width, pieces, num_tiles,
    TILES: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: a draft, the best of its pieces over all ranks. Of a filtered row a piece
    counts if its best x is near enough to the row's largest (sampling.near_top)."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot, number = slot_of(slots, row, R, True), 0
    if SIZE > 1:
        number = tl.load(sequence + row)
    at, of_tile = tl.arange(0, PIECES), tl.arange(0, TILES)
    keys = tl.load(best + row * pieces + at, mask=at < pieces, other=LOWEST)
    if is_filtered(slot, drawn, top_k, top_p, log_min_p):
        index = bits_and_index(keys)[1]
        value = tl.load(x + row * width + index, mask=index < width, other=float("-inf"))
        tops = tl.load(tiles + row * num_tiles + of_tile, mask=of_tile < num_tiles, other=LOWEST)
        number += 1
        lane = tl.arange(0, 4)
        top = tl.where(lane == 3, tl.max(tops, 0), 0)
        top = combine_over_ranks(top, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
        floor = tl.maximum(tl.load(log_min_p + slot), DRAFT_FLOOR)
        keys = tl.where(value >= value_of(element(top, lane, 3)) + floor, keys, LOWEST)
    bits, index = bits_and_index(tl.max(keys, 0))
    key = key_of(bits.to(tl.float32, bitcast=True), index + first_id)
    key = tl.where(tl.max(keys, 0) > LOWEST, key, LOWEST)
    number += 1
    token = best_over_ranks(key, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
    # Where the largest x is no number, nothing is near it, and any draft is as good.
    tl.store(ids + row, tl.where(token == LAST_INDEX, 0, token).to(tl.int64))
    if SIZE > 1:
        tl.store(sequence + row, number)


@triton.jit
def _best_of_pieces(best, pieces, first_id, PIECES: tl.constexpr):
    """The largest of the keys of a row's pieces, its id counted over all ranks."""
    at = tl.arange(0, PIECES)
    key = tl.max(tl.load(best + at, mask=at < pieces, other=LOWEST), 0)
    bits, index = bits_and_index(key)
    return key_of(bits.to(tl.float32, bitcast=True), index + first_id)


@triton.jit
def _list_likeliest(
    logits, tiles, memory, row, tops, top_ids, top_values, number, addresses, received,
    width, num_tiles, num_top, first_id,
    COUNT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, MERGED: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the ids and logits of the num_top likeliest ids of a row, behind the first column."""
    mine = best_of_row(logits, tiles, memory, width, num_tiles, first_id, COUNT, TILE, TILES)
    keys, _ = merge_over_ranks(
        mine, memory, row, number, addresses, received, COUNT, MERGED, ROWS, WORDS, RANK, SIZE
    )
    better = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    place, listed = row * (1 + num_top) + 1 + better, (better < num_top) & (keys > LOWEST)
    value = value_of(keys)
    tl.store(top_ids + place, bits_and_index(keys)[1].to(tl.int64), mask=listed)
    tl.store(top_values + place, value, mask=listed)
    tl.store(tops + row * 2 + 1, tl.max(value, 0))


@triton.jit(do_not_specialize=["R", "first_id", "shift", "pieces", "num_tiles", "num_top"])
def _candidates_kernel(
    logits, x, tiles, raw_tiles, best,
    slots, last, seed, drawn, top_k, top_p, log_min_p, reported,
    ids, merged, facts, sums, tops, top_ids, top_values, addresses, received, sequence,
    R, first_id, width, stride, shift, pieces, num_tiles, num_top,
    REPORTS: tl.constexpr, COUNT: tl.constexpr,
    REPORTED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr,
    MERGED: tl.constexpr, MERGED_TOPS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: its id, where the best of each rank decide it; else what it needs."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot, number = slot_of(slots, row, R, True), 0
    if SIZE > 1:
        number = tl.load(sequence + row)
    need = tl.full((), 0, tl.int32)
    if is_filtered(slot, drawn, top_k, top_p, log_min_p):
        mine = best_of_row(
            x + row * width, tiles + row * num_tiles, merged + row * STRIDE, width, num_tiles,
            first_id, COUNT, TILE, TILES,
        )  # fmt: skip
        number += 1
        keys, least = merge_over_ranks(
            mine, merged + row * STRIDE, row, number, addresses, received,
            COUNT, MERGED, ROWS, WORDS, RANK, SIZE,
        )  # fmt: skip
        limit, share, floor = _filters(slot, top_k, top_p, log_min_p)
        kept, found = kept_candidates(keys, least, 0, limit, share, floor)
        sums_all = (limit == ALL) & (share < 1.0)
        need = tl.where(sums_all & (least != LOWEST), SUM_OVER_ALL, tl.where(found, 0, SEARCH))
        tl.debug_barrier()
        tl.store(merged + row * STRIDE + tl.arange(0, MERGED), keys)
        tl.store(facts + row * 2 + 1, least)
        tl.store(tops + row * 2, tl.max(value_of(keys), 0))
        if need == 0:
            position = position_of(last, row, shift, R, True)
            first, second = row_keys(tl.load(seed + slot), position)
            tl.store(ids + row, draw(keys, kept, first, second).to(tl.int64))
    else:
        key = _best_of_pieces(best + row * pieces, pieces, first_id, PIECES)
        number += 1
        token = best_over_ranks(key, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
        tl.store(ids + row, token.to(tl.int64))
    tl.store(facts + row * 2, need.to(tl.int64))
    tl.store(sums + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    if REPORTS:  # noqa: SIM102 (Triton)
        if tl.load(reported + slot):
            number += 1
            _list_likeliest(
                logits + row * stride, raw_tiles + row * num_tiles,
                # Its candidates lie in the row's place of `merged`: these pass through another.
                merged + (tl.num_programs(0) + row) * STRIDE,
                row, tops, top_ids, top_values, number, addresses, received,
                width, num_tiles, num_top, first_id,
                REPORTED, TILE, TILES, MERGED_TOPS, ROWS, WORDS, RANK, SIZE,
            )  # fmt: skip
    if SIZE > 1:
        tl.store(sequence + row, number)


@triton.jit(do_not_specialize=["R"])
def _mass_kernel(
    logits, x, slots, reported, facts, sums, tops, R, width, stride,
    REPORTS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row: adds its mass to the row's, where that is needed."""
    after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    if tl.load(facts + row * 2) == SUM_OVER_ALL:
        value = tl.load(x + row * width + at, mask=at < width, other=float("-inf"))
        tl.atomic_add(sums + row * 2, tl.sum(mass_of(value, tl.load(tops + row * 2)), 0))
    if REPORTS:  # noqa: SIM102 (Triton)
        if tl.load(reported + slot_of(slots, row, R, True)):
            value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf"))
            value = value.to(tl.float32)
            tl.atomic_add(
                sums + row * 2 + 1, tl.sum(mass_of(value, tl.load(tops + row * 2 + 1)), 0)
            )


@triton.jit
def _report(
    logits, token, top, mass, row, top_ids, top_values, number, addresses, received,
    first_id, width, num_top,
    TOPS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Turn the listed logits of a row into log probabilities, and put the token before them.

    mass: of this rank's ids, relative to `top`, the largest logit of all.
    """
    lane, local = tl.arange(0, 4), token - first_id
    mine = (local >= 0) & (local < width)
    own = tl.load(logits + local, mask=mine, other=0.0).to(tl.float32)
    bits = own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF  # 0 on the other ranks
    both = tl.where(lane == 0, mass, tl.where(lane == 1, bits, 0))
    both = combine_over_ranks(both, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
    below = top + tl.log(element(both, lane, 0).to(tl.float32) / MASS_UNIT)
    own = element(both, lane, 1).to(tl.int32).to(tl.float32, bitcast=True)
    place, at = row * (1 + num_top), tl.arange(0, TOPS)
    value = tl.load(top_values + place + 1 + at, mask=at < num_top, other=0.0)
    tl.store(top_values + place + 1 + at, value - below, mask=at < num_top)
    tl.store(top_values + place, own - below)
    tl.store(top_ids + place, token)


@triton.jit(do_not_specialize=["R", "first_id", "shift", "num_top"])
def _finish_kernel(
    logits, x, slots, last, seed, drawn, top_k, top_p, log_min_p, reported,
    ids, merged, facts, sums, tops, top_ids, top_values, addresses, received, sequence,
    R, first_id, width, stride, shift, num_top,
    REPORTS: tl.constexpr, MERGED: tl.constexpr, STRIDE: tl.constexpr,
    TOPS: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row that `candidates` did not decide, or that reports log probabilities."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot, need, lane = slot_of(slots, row, R, True), tl.load(facts + row * 2), tl.arange(0, 4)
    number = 0
    if SIZE > 1:
        number = tl.load(sequence + row)
    if need > 0:
        limit, share, floor = _filters(slot, top_k, top_p, log_min_p)
        top, least = tl.load(tops + row * 2), tl.load(facts + row * 2 + 1)
        keys = tl.load(merged + row * STRIDE + tl.arange(0, MERGED))
        first, second = row_keys(tl.load(seed + slot), position_of(last, row, shift, R, True))
        whole = tl.full((), 0, tl.int64)
        if limit == ALL:
            number += 1
            mine = tl.where(lane == 0, tl.load(sums + row * 2), 0)
            mine = combine_over_ranks(
                mine, row, number, addresses, received, ROWS, WORDS, RANK, SIZE
            )
            whole = element(mine, lane, 0)
        kept, found = kept_candidates(keys, least, whole, limit, share, floor)
        if (need == SUM_OVER_ALL) & found:
            token = draw(keys, kept, first, second)
        else:
            token, number = draw_from_large(
                x + row * width, top, limit, share, floor, whole, keys, least,
                first, second, number, row, addresses, received, first_id, width,
                PIECE, ROWS, WORDS, RANK, SIZE,
            )  # fmt: skip
        tl.store(ids + row, token.to(tl.int64))
    if REPORTS:  # noqa: SIM102 (Triton)
        if tl.load(reported + slot):
            number += 1
            tl.debug_barrier()
            _report(
                logits + row * stride, tl.load(ids + row), tl.load(tops + row * 2 + 1),
                tl.load(sums + row * 2 + 1), row, top_ids, top_values, number, addresses,
                received, first_id, width, num_top, TOPS, ROWS, WORDS, RANK, SIZE,
            )  # fmt: skip
    if SIZE > 1:
        tl.store(sequence + row, number)
