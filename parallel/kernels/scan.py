"""The first pass over stored logits of sampled rows: edits, temperature, noise, best of each tile.

    logits [N, v] -> scan -> x, and keys of what is best in it -> kernels/sampling.py
    logits [N, v] -> noised_keys -> keys, for rows that are drawn from all ids

Shapes: N rows | v ids of this rank
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.argmax import LOWEST, key_of
from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.kernels.noise import EXACT_SUMS, noise, position_of, row_keys, slot_of
from outrider.parallel.operands import PickRows, SlotSampling
from outrider.parallel.sampling import BANNED, COUNT_SHIFT, DRAFT_SHARE, IN_PROMPT

TILE, PIECE = 64, 2048
"""Logits of a tile, whose best one is kept, and of a program."""
DRAFT_FLOOR = tl.constexpr(math.log(DRAFT_SHARE))
PROMPT_BIT, BAN_BIT = tl.constexpr(IN_PROMPT), tl.constexpr(BANNED)
SHIFT = tl.constexpr(COUNT_SHIFT)


class Scanned(NamedTuple):
    """What `scan` made of N rows."""

    x: Tensor
    """[N, v] float32: the logits, edited and scaled."""
    tiles: Tensor
    """[N, tiles] int64: the key of the best x of each tile, ids counted from 0."""
    raw_tiles: Tensor
    """[N, tiles] int64: the same of the logits, where log probabilities are reported."""
    best: Tensor
    """[N, pieces] int64: the key of the best x with noise of each piece of a row; in filtered rows,
    for drafts alone."""


def scan(
    logits: Tensor,
    first_id: int,
    rows: PickRows,
    by_slot: SlotSampling,
    *,
    exact: bool,
    reports: bool,
) -> Scanned:
    """The first pass over the logits [N, v] of all rows, of which there is one at least.

    exact: the rows are the target's, which have masks, not drafts; reports: some of them report log
    probabilities.
    """
    (num_rows, width), where = logits.shape, logits.device
    pieces, per_slot = triton.cdiv(width, PIECE), num_rows // len(rows.slots)
    tiles = torch.empty(num_rows, pieces * (PIECE // TILE), dtype=torch.int64, device=where)
    made = Scanned(
        x=torch.empty(num_rows, width, dtype=torch.float32, device=where),
        tiles=tiles,
        raw_tiles=torch.empty_like(tiles) if reports else tiles,
        best=torch.empty(num_rows, pieces, dtype=torch.int64, device=where),
    )
    drafts = None if rows.drafts is None else rows.drafts.contiguous()
    _scan_kernel[(pieces, num_rows)](
        logits, *made, *settings_of(rows, by_slot), by_slot.scale, by_slot.edited,
        by_slot.repetition, by_slot.frequency, by_slot.presence, by_slot.banned_until,
        by_slot.history, by_slot.bias, by_slot.masked, by_slot.masks,
        rows.slots if drafts is None else drafts,
        per_slot, first_id, width, logits.stride(0), rows.shift,
        0 if drafts is None else drafts.shape[1], *by_slot.masks.shape[1:],
        EXACT=exact, REPORTS=reports, PIECE=PIECE, TILE=TILE, **EXACT_SUMS, **overlapped(logits),
    )  # fmt: skip
    return made


def settings_of(rows: PickRows, by_slot: SlotSampling) -> tuple[Tensor, ...]:
    """The arguments that say how rows pick: those from `slots` to `reported` of a kernel."""
    return (
        rows.slots, rows.last, by_slot.seed, by_slot.drawn, by_slot.top_k, by_slot.top_p,
        by_slot.log_min_p, by_slot.reported,
    )  # fmt: skip


def noised_keys(logits: Tensor, first_id: int, rows: PickRows, by_slot: SlotSampling) -> Tensor:
    """logits [N, v] -> the keys of the best logit, scaled and with its row's noise, of each piece
    of a row [N, pieces] int64; no slot filters or edits."""
    num_rows, width = logits.shape
    best = torch.empty(num_rows, triton.cdiv(width, PIECE), dtype=torch.int64, device=logits.device)
    per_slot = num_rows // max(1, len(rows.slots))
    if num_rows:
        _noised_kernel[(best.shape[1], num_rows)](
            logits, best, rows.slots, rows.last, by_slot.seed, by_slot.drawn, by_slot.scale,
            per_slot, first_id, width, logits.stride(0), rows.shift,
            PIECE=PIECE, **EXACT_SUMS, **overlapped(logits),
        )  # fmt: skip
    return best


@triton.jit
def _noised(x, drawn, seed, position, ids):
    """x, with noise where the row is drawn."""
    if drawn:
        first, second = row_keys(seed, position)
        x = x + noise(first, second, ids)
    return x


@triton.jit(do_not_specialize=["R", "first_id", "shift"])
def _noised_kernel(
    logits, best, slots, last, seed, drawn, scale, R, first_id, width, stride, shift,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row."""
    after_previous(PDL)
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, at = slot_of(slots, row, R, True), piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    position = position_of(last, row, shift, R, True)
    x = x * tl.load(scale + slot)
    x = _noised(x, tl.load(drawn + slot), tl.load(seed + slot), position, at + first_id)
    key = tl.where(at < width, key_of(x, at), LOWEST)
    tl.store(best + row * tl.num_programs(0) + piece, tl.max(key, 0))


@triton.jit
def is_filtered(slot, drawn, top_k, top_p, log_min_p):
    """Whether the slot draws from some of the ids only."""
    some = (tl.load(top_k + slot) > 0) | (tl.load(top_p + slot) < 1.0)
    some = some | (tl.load(log_min_p + slot) > float("-inf"))
    return tl.load(drawn + slot) & some


@triton.jit(do_not_specialize=["R", "first_id", "shift", "num_drafts", "num_masks"])
def _scan_kernel(
    logits, x, tiles, raw_tiles, best,
    slots, last, seed, drawn, top_k, top_p, log_min_p, reported,
    scale, edited, repetition, frequency, presence, banned_until, history, bias, masked, masks,
    drafts, R, first_id, width, stride, shift, num_drafts, num_masks, words,
    EXACT: tl.constexpr, REPORTS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row: x, the key of the best x of each tile, and where nothing is
    filtered that of the best x with noise. With REPORTS also those of the best logits."""
    after_previous(PDL)
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, position = slot_of(slots, row, R, True), position_of(last, row, shift, R, True)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < width
    raw = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    value = raw
    if tl.load(edited + slot):
        table = slot * width + at
        marks = tl.load(history + table, mask=inside, other=0)
        count = marks >> SHIFT
        for i in range(tl.minimum(shift + row % R, num_drafts)):
            draft = tl.load(drafts + row // R * num_drafts + i) - first_id
            count += (at == draft).to(tl.int32)
        factor = tl.load(repetition + slot)
        repeated = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        value = tl.where((count > 0) | ((marks & PROMPT_BIT) > 0), repeated, value)
        value = value - tl.load(frequency + slot) * count.to(tl.float32)
        value = value - tl.load(presence + slot) * (count > 0).to(tl.float32)
        value = value + tl.load(bias + table, mask=inside, other=0.0)
        banned = ((marks & BAN_BIT) > 0) & (position < tl.load(banned_until + slot))
        value = tl.where(banned, float("-inf"), value)
    if EXACT:  # noqa: SIM102 (Triton)
        if tl.load(masked + slot):
            mask = masks + (slot * num_masks + row % R) * words
            word = tl.load(mask + (at >> 5), mask=inside, other=0)
            value = tl.where(((word >> (at & 31)) & 1) == 0, float("-inf"), value)
    value = value * tl.load(scale + slot)
    tl.store(x + row * width + at, value, mask=inside)
    each = tl.arange(0, PIECE // TILE)
    of_tile = (row * tl.num_programs(0) + piece) * (PIECE // TILE) + each
    key = tl.where(inside, key_of(value, at), LOWEST)
    tl.store(tiles + of_tile, tl.max(tl.reshape(key, (PIECE // TILE, TILE)), 1))
    if REPORTS:  # noqa: SIM102 (Triton)
        if tl.load(reported + slot):
            key = tl.where(inside, key_of(raw, at), LOWEST)
            tl.store(raw_tiles + of_tile, tl.max(tl.reshape(key, (PIECE // TILE, TILE)), 1))
    filtered = is_filtered(slot, drawn, top_k, top_p, log_min_p)
    if filtered & (not EXACT):
        floor = tl.maximum(tl.load(log_min_p + slot), DRAFT_FLOOR)
        value = tl.where(value >= tl.max(value, 0) + floor, value, float("-inf"))
        filtered = False
    if not filtered:
        value = _noised(value, tl.load(drawn + slot), tl.load(seed + slot), position, at + first_id)
        key = tl.where(inside, key_of(value, at), LOWEST)
        tl.store(best + row * tl.num_programs(0) + piece, tl.max(key, 0))
