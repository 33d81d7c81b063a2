"""Sampling without gathering logits: each rank looks at its own slice, and only pairs cross.

    logits [N, v] -> edited -> x = logits / temperature -> kept set -> best x + noise -> (value, id)

A token is the best x + noise among the kept ids of its row (Gumbel-max: Gumbel 1954; Maddison,
Tarlow, Minka 2014), which is a draw from their renormalised softmax. The noise is a hash of (seed,
position, id): a token depends on its row alone, not on batch, drafts or ranks. This is the
definition in plain torch. Shapes: B slots | R rows a slot | N = B R | v ids of this rank
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from outrider.parallel.group import Group
from outrider.parallel.operands import PickRows, SlotSampling

DRAFT_SHARE = 0.02
"""Of the largest probability of a row: the least that a draft of a filtered row may have. Finding
the kept set itself would cost each draft more than it brings (docs/log.md)."""
CANDIDATES = 64
"""The best ids that a rank offers of each row. A kept set of at most so many is found at once."""
MASS_UNIT = 2.0**40
"""Probabilities are added up as integers, in parts of this share of the largest one of the row. So
sums do not depend on their order, and have the same bits however the ids are split over ranks."""
IN_PROMPT, BANNED, COUNT_SHIFT = 1, 2, 2
"""The bits of SlotSampling.history: two flags, then how often the answer holds the id."""
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
ALL = 1 << 40
"""More ids than any vocabulary has."""
_MASK, _LAST_INDEX = 0xFFFFFFFF, 0x7FFFFFFF


def positions_of(rows: PickRows, num_rows: int) -> Tensor:
    """Where the tokens that the rows make will stand [B, R] int64."""
    ahead = torch.arange(num_rows, device=rows.slots.device)
    return rows.last.unsqueeze(1) + (ahead + rows.shift + 1)


def _signed(x):
    """Numbers of 32 bits, ints or int64, as int32 lanes hold them."""
    return (x ^ 0x80000000) - 0x80000000


def lanes(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers, as int32."""
    return _signed(x & _MASK).to(torch.int32)


def mix(x: Tensor) -> Tensor:
    """32-bit finaliser of MurmurHash3 (A. Appleby, public domain) on int32 lanes."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x *= _signed(0x85EBCA6B)
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    return x


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """seeds, positions [N] int64 -> two numbers of 32 bits for each row, int32 [N]."""
    parts = (seeds, (seeds >> 32) + 0x9E3779B9, positions + 0x7F4A7C15)
    low, high, at = mix(lanes(torch.stack(parts)))
    both, other = mix(torch.stack((low ^ high, high + _signed(0x85EBCA77))))
    first = mix(both + at)
    return first, mix(other ^ mix(first + at + _signed(0x165667B1)) ^ low)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise of ids [v] in rows with these seeds and positions [N] int64 -> float32 [N, v].

    -ln E, where E = -ln(1 - u) and u has 32 random bits, so that the largest noise is 22.9. A
    uniform number of 24 bits would end at 16.6, which one row of 250,000 ids in 67 reaches. u stays
    below 1.
    """
    first, second = row_keys(seeds, positions)
    bits = mix(mix(lanes(ids) + first.unsqueeze(1)) ^ second.unsqueeze(1))
    u = (bits.to(torch.int64) & _MASK).to(torch.float32)
    u = ((u + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


@cache
def ids_from(first_id: int, width: int, device: torch.device) -> Tensor:
    """The ids of a rank's slice [width] int64."""
    return torch.arange(first_id, first_id + width, device=device)


def noise_after(
    slots: Tensor, last: Tensor, num_rows: int, sampling: SlotSampling, first_id: int
) -> Tensor:
    """The noise of this rank's ids for the num_rows tokens after position `last` [B] of slots [B]
    -> [B, num_rows, v] float32."""
    positions = last.unsqueeze(1) + torch.arange(1, num_rows + 1, device=last.device)
    seeds = sampling.seed[slots].unsqueeze(1).expand_as(positions)
    ids = ids_from(first_id, sampling.bias.shape[1], last.device)
    return gumbel(seeds.flatten(), positions.flatten(), ids).unflatten(0, positions.shape)


def order_keys(x: Tensor, ids: Tensor) -> Tensor:
    """x float32 and ids int64, which broadcast -> int64 keys: larger x is larger, and of equal x
    the smaller id. NaN counts as the smallest number."""
    x = (x + 0.0).nan_to_num_(float("-inf"), float("inf"), float("-inf"))  # -0.0 becomes 0.0
    bits = x.view(torch.int32)
    bits = (bits ^ ((bits >> 31) & _LAST_INDEX)).to(torch.int64)
    return bits.bitwise_left_shift_(32) | (ids ^ _LAST_INDEX)


def value_of(keys: Tensor) -> Tensor:
    """The x float32 of keys."""
    bits = (keys >> 32).to(torch.int32)
    return torch.where(bits < 0, bits ^ _LAST_INDEX, bits).view(torch.float32)


def id_of(keys: Tensor) -> Tensor:
    """The ids int64 of keys."""
    return (keys & _LAST_INDEX) ^ _LAST_INDEX


def mass(below: Tensor) -> Tensor:
    """How far below the largest x of its row each x is, at most 0 -> exp of it in parts of
    1 / MASS_UNIT, int64."""
    return (below.exp().nan_to_num(0.0) * MASS_UNIT).to(torch.int64)


def edit(logits: Tensor, rows: PickRows, sampling: SlotSampling, first_id: int) -> Tensor:
    """Penalties, bias and bans: logits [B, R, v] float32 of the ids from first_id on -> edited.

    In this order: repetition, frequency and presence penalty, bias, bans. They count in the text
    before each row's token, to which the drafts before it belong. Slots without edits keep every
    bit.
    """
    slots, num_rows, width = rows.slots, logits.shape[1], logits.shape[2]
    history = sampling.history[slots].unsqueeze(1)
    count = history >> COUNT_SHIFT
    if rows.drafts is not None and rows.drafts.shape[1]:
        num_drafts = rows.drafts.shape[1]
        local = rows.drafts - first_id
        local = local.masked_fill((local < 0) | (local >= width), width)
        ahead = torch.arange(num_rows, device=logits.device).unsqueeze(1) + rows.shift
        seen = (torch.arange(num_drafts, device=logits.device) < ahead).to(history.dtype)
        extra = history.new_zeros(len(slots), num_rows, width + 1)
        index = local.unsqueeze(1).expand(-1, num_rows, -1)
        extra.scatter_add_(2, index, seen.expand(len(slots), -1, -1))
        count = count + extra[..., :width]

    def by_slot(values: Tensor) -> Tensor:
        return values[slots][:, None, None]

    factor = by_slot(sampling.repetition)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    edited = torch.where((history & IN_PROMPT > 0) | (count > 0), repeated, logits)
    edited = edited - by_slot(sampling.frequency) * count
    edited = edited - by_slot(sampling.presence) * (count > 0)
    edited = edited + sampling.bias[slots].unsqueeze(1)
    early = positions_of(rows, num_rows) < sampling.banned_until[slots].unsqueeze(1)
    banned = (history & BANNED > 0) & early.unsqueeze(-1)
    edited = edited.masked_fill(banned, float("-inf"))
    return torch.where(by_slot(sampling.edited), edited, logits)


def mask(logits: Tensor, slots: Tensor, sampling: SlotSampling) -> Tensor:
    """Grammars: logits [B, R, v] of slots [B] int64 -> -inf for the ids that no row r may have.
    Slots without a grammar keep every bit."""
    ids = ids_from(0, logits.shape[2], logits.device)
    words = sampling.masks[slots, : logits.shape[1]][:, :, ids >> 5]
    forbidden = (words >> (ids & 31).to(torch.int32)) & 1 == 0
    return logits.masked_fill(forbidden & sampling.masked[slots][:, None, None], float("-inf"))


def kept_from(
    x: Tensor, keys: Tensor, slots: Tensor, sampling: SlotSampling, group: Group
) -> Tensor:
    """The smallest key that the filters of each row keep, over the ids of all ranks [N] int64.

    x [N, v] float32 and its keys (order_keys); slots [N] int64. The kept ids are the first ones in
    the order of keys: top_k of them, then as few as reach the share top_p of what top_k leaves,
    and those with min_p times the largest probability; at least one. Each rank offers its best
    CANDIDATES. Those above the least offer of each rank are surely the first of all, and if the end
    of the kept set is among them, it is known. Where it is not, it is searched.
    """
    top_k, top_p, min_p = sampling.top_k[slots], sampling.top_p[slots], sampling.log_min_p[slots]
    offered = keys.topk(min(CANDIDATES, keys.shape[1])).values
    merged = group.all_gather(offered)
    complete = offered.shape[1] == keys.shape[1]
    least = merged.amin((0, 2)) if complete else merged[..., -1].amax(0)
    merged = merged.transpose(0, 1).flatten(1).sort(descending=True).values
    known = (merged >= least.unsqueeze(1)).sum(1)
    values = value_of(merged)
    top = values[:, :1]
    reached = mass(values - top).cumsum(1)
    total = group.all_reduce(mass(x - top).sum(1))

    limit = torch.where(top_k > 0, top_k, ALL).clamp(max=merged.shape[1] + 1)
    in_limit = reached.gather(1, limit.clamp(max=merged.shape[1]).unsqueeze(1) - 1).squeeze(1)
    whole = torch.where(top_k > 0, in_limit, total)
    by_share = (reached < share_of(top_p, whole).unsqueeze(1)).sum(1) + 1
    by_share = by_share.masked_fill(top_p >= 1.0, ALL)
    by_floor = (values >= top + min_p.unsqueeze(1)).sum(1)
    # A largest x of infinity has no floor below it.
    count = torch.minimum(torch.minimum(limit, by_share), by_floor).clamp(min=1)
    # What ends later than the known candidates ends anywhere behind them.
    found = (limit <= known) | (by_share <= known) | (by_floor < known)
    found &= (limit <= known) | (top_k == 0) | (top_p >= 1.0)
    filtered = is_filtered(slots, sampling)
    first = merged.gather(1, torch.minimum(count, known).unsqueeze(1) - 1).squeeze(1)
    open_rows = (filtered & ~found).nonzero().squeeze(1)
    if not complete and len(open_rows):
        some = slots[open_rows]
        first[open_rows] = _search_kept(keys[open_rows], top[open_rows], some, sampling, group)
    return first.masked_fill(~filtered, LOWEST)


def is_filtered(slots: Tensor, sampling: SlotSampling) -> Tensor:
    """Whether the rows [N] of these slots draw from some of the ids only, bool."""
    some = (sampling.top_k > 0) | (sampling.top_p < 1.0) | sampling.log_min_p.isfinite()
    return (sampling.drawn & some)[slots]


def near_top(x: Tensor, slots: Tensor, sampling: SlotSampling, group: Group) -> Tensor:
    """Which ids a draft may be, bool [N, v]: in filtered rows those with DRAFT_SHARE, or min_p, of
    the largest probability, whatever the filters; x [N, v] float32, slots [N] int64."""
    top = group.all_gather(x.amax(1)).amax(0)
    floor = sampling.log_min_p[slots].clamp(min=math.log(DRAFT_SHARE))
    return (x >= (top + floor).unsqueeze(1)) | ~is_filtered(slots, sampling).unsqueeze(1)


def share_of(top_p: Tensor, whole: Tensor) -> Tensor:
    """The mass, int64, that the kept ids must reach; more than there is where all masses are 0, as
    beside a largest x of infinity."""
    return (top_p.double() * whole.double()).ceil().to(torch.int64).clamp(min=1)


def _search_kept(
    keys: Tensor, top: Tensor, slots: Tensor, sampling: SlotSampling, group: Group
) -> Tensor:
    """kept_from for any kept sets [n] int64, by bisection over the keys [n, v] of all ranks.

    top [n, 1] float32: the largest x. Each rank sorts its keys once, so that it can tell at once
    how many of them, and what mass, are not below some key.
    """
    top_k, top_p, min_p = sampling.top_k[slots], sampling.top_p[slots], sampling.log_min_p[slots]
    keys = keys.sort(1).values
    masses = _from_each_on(mass(value_of(keys) - top))
    by_limit = _search(keys, _from_each_on(torch.ones_like(keys)), top_k, group)
    by_limit = by_limit.masked_fill(top_k == 0, LOWEST)
    share = share_of(top_p, group.all_reduce(_from_key_on(keys, masses, by_limit)))
    by_share = _search(keys, masses, share, group).masked_fill(top_p >= 1.0, LOWEST)
    by_floor = order_keys(top.squeeze(1) + min_p, torch.full_like(slots, _LAST_INDEX))
    return torch.maximum(torch.maximum(by_limit, by_share), by_floor)


def _from_each_on(weights: Tensor) -> Tensor:
    """weights [n, v] int64 -> at each index what the weights from there on add up to [n, v + 1]."""
    sums = weights.flip(1).cumsum(1).flip(1)
    return torch.cat((sums, torch.zeros_like(sums[:, :1])), 1)


def _from_key_on(keys: Tensor, sums: Tensor, key: Tensor) -> Tensor:
    """Those of the sums [n, v + 1] that begin at the first of the sorted keys [n, v] that is not
    below `key` [n]."""
    return sums.gather(1, torch.searchsorted(keys, key.unsqueeze(1))).squeeze(1)


def _search(keys: Tensor, sums: Tensor, target: Tensor, group: Group) -> Tensor:
    """The largest key [n] such that it and all larger ones of its row, on all ranks, weigh at least
    `target` [n]; keys [n, v] int64, sorted, and sums (_from_each_on) of what they weigh."""
    low, high = torch.full_like(target, LOWEST), torch.full_like(target, HIGHEST)
    for _ in range(64):  # low is heavy enough, high is not
        middle = (low & high) + ((low ^ high) >> 1)
        heavy = group.all_reduce(_from_key_on(keys, sums, middle)) >= target
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    return low


def log_probs_of(logits: Tensor, ids: Tensor, first_id: int, group: Group) -> Tensor:
    """Logits [N, v] float32 of the ids from first_id on, and any ids [n] int64 of the vocabulary ->
    log probabilities of these [N, n] float32."""
    width = logits.shape[1]
    top = group.all_gather(logits.amax(1, keepdim=True)).amax(0)  # [N, 1]
    local = ids - first_id
    mine = (local >= 0) & (local < width)
    own = logits[:, local.clamp(0, width - 1)].masked_fill(~mine, 0.0)
    sums = group.all_reduce(torch.cat((own, (logits - top).exp().sum(1, keepdim=True)), 1))
    return sums[:, :-1] - top - sums[:, -1:].log()


def log_probs(
    logits: Tensor, tokens: Tensor, num_top: int, first_id: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Logits [N, v] float32 of the ids from first_id on, tokens [N] int64 -> ids [N, 1 + num_top]
    int64, log probabilities of them [N, 1 + num_top] float32.

    The first column is the token itself, the others are the likeliest ids, best first. Of a
    vocabulary smaller than num_top it is all of them.
    """
    width = logits.shape[1]
    keys = order_keys(logits, ids_from(first_id, width, logits.device))
    best = group.all_gather(keys.topk(min(num_top, width)).values)
    best = best.transpose(0, 1).flatten(1).sort(descending=True).values[:, :num_top]
    values = value_of(best)
    top = values[:, :1]
    local = tokens.unsqueeze(1) - first_id
    mine = (local >= 0) & (local < width)
    own = logits.gather(1, local.clamp(0, width - 1)).masked_fill(~mine, 0.0)
    sums = group.all_reduce(torch.cat((own, (logits - top).exp().sum(1, keepdim=True)), 1))
    values = torch.cat((sums[:, :1], values), 1) - top - sums[:, 1:].log()
    return torch.cat((tokens.unsqueeze(1), id_of(best)), 1), values
