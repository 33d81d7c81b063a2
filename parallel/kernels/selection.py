"""What one program does with its row: find the best values, merge those of all ranks, cut, draw.

    best_of_row -> merge_over_ranks -> kept_candidates -> draw        draw_from_large: any kept set

Values travel as keys (kernels/argmax.py), which sort as values do and name their ids. Nothing is
sorted: the best of many values are found by bisection, and candidates are few enough to compare
each with each. Ranks exchange words as kernels/one_shot.py does; `number` is that of the row's last
exchange. parallel/sampling.py defines what is found.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from outrider.parallel import sampling
from outrider.parallel.kernels.argmax import LOWEST, bits_and_index, key_of
from outrider.parallel.kernels.noise import noise
from outrider.parallel.kernels.one_shot import receive_words, send_words

MASS_UNIT = tl.constexpr(sampling.MASS_UNIT)
LOWEST_BITS = tl.constexpr(-(1 << 31))
ALL, HIGHEST = tl.constexpr(1 << 40), tl.constexpr((1 << 63) - 1)
LAST_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The value float32 of keys; -inf for LOWEST."""
    value = bits_and_index(key)[0].to(tl.float32, bitcast=True)
    return tl.where(key > LOWEST, value, float("-inf"))


@triton.jit
def mass_of(x, top):
    """As sampling.mass of x - top. NaN counts as nothing, and so does a row without any number."""
    below = x - tl.where(top > float("-inf"), top, 0.0)
    share = tl.where(below == below, tl.exp(below), 0.0)
    return (share * MASS_UNIT).to(tl.int64)


@triton.jit
def element(values, index, i):
    """values[i] of a vector, where `index` counts its elements; 0 outside."""
    return tl.sum(tl.where(index == i, values, 0), 0)


@triton.jit
def _words_of(keys, COUNT: tl.constexpr):
    """int64 [COUNT] -> their int32 words [2 * COUNT]."""
    low, high = (keys & 0xFFFFFFFF).to(tl.int32), (keys >> 32).to(tl.int32)
    return tl.reshape(tl.join(low, high), (2 * COUNT,))


@triton.jit
def _keys_of(words, COUNT: tl.constexpr):
    """The inverse of _words_of."""
    low, high = tl.split(tl.reshape(words, (COUNT, 2)))
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _nth_largest(bits, count):
    """A number that `count` of the int32 `bits` reach, and as few more as there are equal ones."""
    low, high = tl.full((), LOWEST_BITS, tl.int32), tl.max(bits, 0) + 1
    going = 1
    while going > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        reached = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached >= count, high, middle)
        going = ((reached != count) & (low + 1 < high)).to(tl.int32)
    return low


@triton.jit
def _target(share, whole):
    """The mass that the kept ids must reach (sampling.share_of)."""
    return tl.maximum(tl.ceil(share.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _compact(keys, memory, COUNT: tl.constexpr):
    """The COUNT largest of keys whose ids rise, in that order [COUNT]; LOWEST fills up.

    Values alone are compared: of equal ones those with smaller ids, the first, are larger.
    """
    bits = (keys >> 32).to(tl.int32)
    least = _nth_largest(bits, COUNT)
    larger, equal = bits > least, (bits == least) & (keys > LOWEST)
    left = COUNT - tl.sum(larger.to(tl.int32), 0)
    chosen = larger | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    tl.debug_barrier()
    tl.store(memory + tl.arange(0, COUNT), tl.full((COUNT,), LOWEST, tl.int64))
    tl.debug_barrier()
    tl.store(memory + tl.cumsum(chosen.to(tl.int32), 0) - 1, keys, mask=chosen)
    tl.debug_barrier()
    return tl.load(memory + tl.arange(0, COUNT))


@triton.jit
def best_of_row(
    values, keys, memory, width, num_tiles, first_id,
    COUNT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The keys of the COUNT best of a row's values [COUNT], their ids counted over all ranks.

    keys: that of the best value of each tile; the COUNT best values lie in the COUNT best tiles.
    memory: for COUNT keys.
    """
    at = tl.arange(0, TILES)
    best = _compact(tl.load(keys + at, mask=at < num_tiles, other=LOWEST), memory, COUNT)
    first = bits_and_index(best)[1] // TILE * TILE
    each = first[:, None] + tl.arange(0, TILE)[None, :]
    inside = (best > LOWEST)[:, None] & (each < width)
    value = tl.load(values + each, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, key_of(value, each + first_id), LOWEST)
    return _compact(tl.reshape(key, (COUNT * TILE,)), memory, COUNT)


@triton.jit
def merge_over_ranks(
    mine, memory, row, number, addresses, received,
    COUNT: tl.constexpr, MERGED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Exchange the keys of all ranks [COUNT] -> all of them [MERGED], filled up with LOWEST, and
    the largest of the ranks' least ones. memory: for MERGED of them."""
    each = tl.arange(0, COUNT)
    least = tl.min(mine, 0)
    if SIZE == 1:
        return mine, least
    at = tl.arange(0, 2 * COUNT)
    words = _words_of(mine, COUNT)
    send_words(words, at, at < 2 * COUNT, number, addresses, row, ROWS, WORDS, RANK, SIZE)
    tl.debug_barrier()
    tl.store(memory + RANK * COUNT + each, mine)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            words = receive_words(
                received, at, at < 2 * COUNT, number, rank, row, ROWS, WORDS, SIZE
            )
            keys = _keys_of(words, COUNT)
            least = tl.maximum(least, tl.min(keys, 0))
            tl.store(memory + rank * COUNT + each, keys)
    tl.debug_barrier()
    place = tl.arange(0, MERGED)
    return tl.load(memory + place, mask=place < SIZE * COUNT, other=LOWEST), least


@triton.jit
def combine_over_ranks(
    mine, row, number, addresses, received,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """int64 [4] of every rank -> the sums of the first two, the least third, the largest fourth."""
    lane, at = tl.arange(0, 4), tl.arange(0, 8)
    if SIZE > 1:
        words = _words_of(mine, 4)
        send_words(words, at, at < 8, number, addresses, row, ROWS, WORDS, RANK, SIZE)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                words = receive_words(received, at, at < 8, number, rank, row, ROWS, WORDS, SIZE)
                other = _keys_of(words, 4)
                extreme = tl.where(lane == 2, tl.minimum(mine, other), tl.maximum(mine, other))
                mine = tl.where(lane < 2, mine + other, extreme)
    return mine


@triton.jit
def lowest_kept(top, floor):
    """The least value that is at most `floor` below the top; without a floor, also of a row whose
    top is infinite, the least of all."""
    return tl.where(floor > float("-inf"), top + floor, float("-inf"))


@triton.jit
def kept_candidates(keys, least, whole, limit, share, floor):
    """Which of the candidates the filters of their row keep, and whether those are all that they
    keep (sampling.kept_from).

    keys: the candidates; least: the smallest that is surely one of the first of all ids, LOWEST if
    all ids are candidates. whole: the mass of all ids; where it is 0, that of the candidates stands
    for it.
    """
    sure = (keys >= least) & (keys > LOWEST)
    value = tl.where(sure, value_of(keys), float("-inf"))
    top = tl.max(value, 0)
    mass, known = tl.where(sure, mass_of(value, top), 0), tl.sum(sure.to(tl.int64), 0)
    larger = sure[None, :] & (keys[None, :] > keys[:, None])
    before = tl.sum(larger.to(tl.int64), 1)
    mass_before = tl.sum(tl.where(larger, mass[None, :], 0), 1)
    limited = tl.sum(tl.where(before < limit, mass, 0), 0)
    target = _target(share, tl.where((limit < ALL) | (whole == 0), limited, whole))
    target = tl.where(share < 1.0, target, HIGHEST)
    high = value >= lowest_kept(top, floor)
    kept = sure & (before < limit) & (mass_before < target) & high
    within = (limit <= known) | (tl.sum(mass, 0) >= target)
    within = within | (tl.sum((sure & high).to(tl.int64), 0) < known)
    within = within & ((limit <= known) | (limit == ALL) | (share >= 1.0))
    return kept, within | (least == LOWEST)


@triton.jit
def draw(keys, kept, first, second):
    """The id of the best of the kept candidates, with noise; of the best one where none is kept,
    since the largest value is no number."""
    ids = bits_and_index(keys)[1]
    key = key_of(value_of(keys) + noise(first, second, ids), ids)
    best = tl.max(tl.where(kept, key, LOWEST), 0)
    return bits_and_index(tl.where(best > LOWEST, best, tl.max(keys, 0)))[1]


@triton.jit
def best_over_ranks(
    key, row, number, addresses, received,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The id of the largest key of all ranks."""
    lane = tl.arange(0, 4)
    mine = tl.where(lane == 3, key, 0)
    best = combine_over_ranks(mine, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
    return bits_and_index(element(best, lane, 3))[1]


@triton.jit
def _between(low, high):
    """A key above `low` and below `high`: that of the value halfway, else halfway in their bits."""
    lower, upper = tl.maximum(value_of(low), -1e38), tl.minimum(value_of(high), 1e38)
    halfway = key_of(0.5 * lower + 0.5 * upper, tl.full((), LAST_INDEX, tl.int32))
    inside = (halfway > low) & (halfway < high)
    return tl.where(inside, halfway, (low & high) + ((low ^ high) >> 1))


@triton.jit
def _search(
    x, top, target, high, number, row, addresses, received, first_id, width,
    WEIGHED: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The largest key such that it and all larger ones of the row, on all ranks, weigh at least
    `target` > 0: their masses, or one each. Those from `high` on do not. -> the key, the number of
    the last exchange, and the mass of the found ones.

    Bisection; both ends move to the next key that there is, so that few passes suffice.
    """
    lane, zero = tl.arange(0, 4), tl.zeros((PIECE,), tl.int64)
    low, weight = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
    going = 1
    while going > 0:
        middle = _between(low, high)
        counts, masses = zero, zero
        above, below = zero + HIGHEST, zero + LOWEST
        for start in range(0, width, PIECE):
            at = start + tl.arange(0, PIECE)
            inside = at < width
            value = tl.load(x + at, mask=inside, other=float("-inf"))
            key = tl.where(inside, key_of(value, at + first_id), LOWEST)
            chosen = key >= middle
            counts += chosen.to(tl.int64)
            masses += tl.where(chosen, mass_of(value, top), 0)
            above = tl.minimum(above, tl.where(chosen, key, HIGHEST))
            below = tl.maximum(below, tl.where(chosen, LOWEST, key))
        number += 1
        ends = tl.where(lane == 2, tl.min(above, 0), tl.max(below, 0))
        mine = tl.where(lane == 1, tl.sum(masses, 0), ends)
        mine = tl.where(lane == 0, tl.sum(counts, 0), mine)
        mine = combine_over_ranks(mine, row, number, addresses, received, ROWS, WORDS, RANK, SIZE)
        mass, next_lower = element(mine, lane, 1), element(mine, lane, 3)
        heavy = (mass if WEIGHED else element(mine, lane, 0)) >= target
        weight = tl.where(heavy, mass, weight)
        low = tl.where(heavy, element(mine, lane, 2), low)
        high = tl.where(heavy, high, next_lower + 1)
        going = (low + 1 < high).to(tl.int32)
    return low, number, weight


@triton.jit
def draw_from_large(
    x, top, limit, share, floor, whole, keys, least, first, second,
    number, row, addresses, received, first_id, width,
    PIECE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The id of a row that keeps more ids than the candidates, and the number of the last exchange.

    whole: the mass of all ids, where limit is ALL. keys: the candidates, of which those from
    `least` on are surely the first of all ids, and fewer than limit.
    """
    kept = tl.full((), LOWEST, tl.int64)
    if limit < ALL:
        kept, number, whole = _search(
            x, top, limit, least, number, row, addresses, received, first_id, width,
            False, PIECE, ROWS, WORDS, RANK, SIZE,
        )  # fmt: skip
    if share < 1.0:
        target = _target(share, whole)
        reached = tl.sum(tl.where(keys >= least, mass_of(value_of(keys), top), 0), 0)
        high = tl.where(reached < target, least, tl.max(keys, 0) + 1)
        by_share, number, _ = _search(
            x, top, target, high, number, row, addresses, received, first_id, width,
            True, PIECE, ROWS, WORDS, RANK, SIZE,
        )  # fmt: skip
        kept = tl.maximum(kept, by_share)
    lowest = lowest_kept(top, floor)
    kept = tl.maximum(kept, key_of(lowest, tl.full((), LAST_INDEX, tl.int32)))
    best = tl.full((PIECE,), LOWEST, tl.int64)
    for start in range(0, width, PIECE):
        at = start + tl.arange(0, PIECE)
        value = tl.load(x + at, mask=at < width, other=float("-inf"))
        chosen = (at < width) & (key_of(value, at + first_id) >= kept)
        noised = key_of(value + noise(first, second, at + first_id), at + first_id)
        best = tl.maximum(best, tl.where(chosen, noised, LOWEST))
    number += 1
    token = best_over_ranks(
        tl.max(best, 0), row, number, addresses, received, ROWS, WORDS, RANK, SIZE
    )
    # Where the largest value is no number, nothing reaches it.
    return tl.where(token == LAST_INDEX, bits_and_index(tl.max(keys, 0))[1], token), number
