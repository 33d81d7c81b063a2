"""Sums and choices over ranks that write into each other's memory, one launch each.

    part [T, d] of every rank -> sum_add_rms_norm -> (norm of residual + sum, residual + sum)
    pieces of this rank's logits -> choose_over_ranks -> the best id [N] of all ranks

Each 4 bytes travel in one 8-byte store beside the number of the turn, so a word that shows this
turn's number has arrived whole: no barrier, no fence, one way over the link. A row has two places
for each sender, used in turn. A rank that has read turn t of a row knows that every peer has ended
turn t - 1 of it, so the place of t - 1 is free for t + 1. Sums run in rank order.
Letters: T, N rows | d width | size ranks
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import Mail
from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.kernels.rows import LOWEST, _sortable, _unsorted


def sum_add_rms_norm(
    part: Tensor, residual: Tensor, scale: Tensor, eps: float, mail: Mail, *, sent: bool = False
) -> tuple[Tensor, Tensor]:
    """part, residual [.., d] bfloat16, scale [d] float32 -> (rms_norm(x), x) with x = residual +
    sum of `part` over the ranks.

    The sum rounds before it is added, as all_reduce would. At most mail.rows rows, d even; every
    rank makes the same calls in the same order. sent: the kernel that made `part` has sent it.
    """
    d = part.shape[-1]
    tokens = part.numel() // d
    assert part.is_contiguous()
    assert residual.is_contiguous()
    assert fits(part, mail)
    y, total = torch.empty_like(part), torch.empty_like(part)
    _sum_norm_kernel[(tokens,)](
        part.view(torch.int32), residual.view(torch.int32), scale, y.view(torch.int32),
        total.view(torch.int32), mail.peers, mail.inbox, mail.turns, eps,
        ROWS=mail.rows, WORDS=mail.words, RANK=mail.rank, SIZE=mail.size, D=d, SENT=sent,
        BLOCK=triton.next_power_of_2(d // 2), num_warps=8 if d >= 2048 else 4, **overlapped(part),
    )  # fmt: skip
    return y, total


def fits(part: Tensor, mail: Mail) -> bool:
    """Whether sum_add_rms_norm takes such rows."""
    d = part.shape[-1]
    return part.dtype == torch.bfloat16 and takes(part.numel() // d, d, mail)


def takes(num_rows: int, d: int, mail: Mail) -> bool:
    """Whether bfloat16 rows of width d find their place in an inbox."""
    return num_rows <= mail.rows and d % 2 == 0 and d // 2 <= mail.words


def choose_over_ranks(best: Tensor, first_id: int, mail: Mail) -> Tensor:
    """best [N, pieces] int64, this rank's sortable (logit, index) keys -> ids [N] int64.

    first_id: of this rank's index 0. Ties go to the smallest id.
    """
    num_rows, pieces = best.shape
    assert num_rows <= mail.rows
    ids = torch.empty(num_rows, dtype=torch.int64, device=best.device)
    if num_rows:
        _choose_kernel[(num_rows,)](
            best, ids, mail.peers, mail.inbox, mail.turns, first_id, pieces,
            ROWS=mail.rows, WORDS=mail.words, RANK=mail.rank, SIZE=mail.size,
            BLOCK=triton.next_power_of_2(pieces), num_warps=4, **overlapped(best),
        )  # fmt: skip
    return ids


@triton.jit
def _place(turn, sender, row, ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr):
    """Where a row's words of one sender lie in an inbox [2, size, rows, words]."""
    return (((turn & 1) * SIZE + sender) * ROWS + row).to(tl.int64) * WORDS


@triton.jit
def _send(
    word, at, inside, turn, peers, row,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """int32 words, each beside the turn, to every other rank."""
    letter = (turn.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, SIZE):
        inbox = tl.load(peers + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.store(inbox + _place(turn, RANK, row, ROWS, WORDS, SIZE) + at, letter, mask=inside)


@triton.jit
def _receive(
    inbox, at, inside, turn, sender, row,
    ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The words of this turn from one rank, once all of them are there."""
    place = inbox + _place(turn, sender, row, ROWS, WORDS, SIZE) + at
    missing = 1
    while missing > 0:
        letter = tl.load(place, mask=inside, other=0, volatile=True)
        late = inside & ((letter >> 32).to(tl.int32) != turn)
        missing = tl.max(late.to(tl.int32), 0)
    letter = tl.load(place, mask=inside, other=0, volatile=True)
    return (letter & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _halves(word):
    """int32 of two bfloat16 -> (the first, the second) float32."""
    first = (word << 16).to(tl.float32, bitcast=True)
    return first, (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """float32 to the nearest bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _word(first, second):
    """Two float32 that are bfloat16 already -> int32."""
    low = first.to(tl.int32, bitcast=True) >> 16 & 0xFFFF
    return low | (second.to(tl.int32, bitcast=True) & -65536)


@triton.jit(do_not_specialize=["eps"])
def _sum_norm_kernel(
    part, residual, scale, y, total, peers, inbox, turns, eps,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, SENT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; a word is two neighbours of it."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < D // 2
    scale_1 = tl.load(scale + 2 * at, mask=inside, other=0.0)
    scale_2 = tl.load(scale + 2 * at + 1, mask=inside, other=0.0)
    after_previous(PDL)
    place = row.to(tl.int64) * (D // 2) + at
    turn = tl.load(turns + row) + 1
    mine = tl.load(part + place, mask=inside, other=0)
    if not SENT:
        _send(mine, at, inside, turn, peers, row, ROWS, WORDS, RANK, SIZE)
    x = tl.load(residual + place, mask=inside, other=0)
    sum_1, sum_2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        word = mine
        if rank != RANK:
            word = _receive(inbox, at, inside, turn, rank, row, ROWS, WORDS, SIZE)
        first, second = _halves(word)
        sum_1 += first
        sum_2 += second
    x_1, x_2 = _halves(x)
    x_1, x_2 = _rounded(x_1 + _rounded(sum_1)), _rounded(x_2 + _rounded(sum_2))
    tl.store(total + place, _word(x_1, x_2), mask=inside)
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, 0)
    rate = tl.rsqrt(squares / D + eps)
    y_1, y_2 = _rounded(x_1 * rate * scale_1), _rounded(x_2 * rate * scale_2)
    tl.store(y + place, _word(y_1, y_2), mask=inside)
    tl.store(turns + row, turn)


@triton.jit(do_not_specialize=["first_id", "pieces"])
def _choose_kernel(
    best, ids, peers, inbox, turns, first_id, pieces,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: its best of this rank's pieces, then of all ranks."""
    row = tl.program_id(0)
    after_previous(PDL)
    at = tl.arange(0, BLOCK)
    keys = tl.load(best + row.to(tl.int64) * pieces + at, mask=at < pieces, other=LOWEST)
    bits, index = _unsorted(tl.max(keys, 0))
    turn = tl.load(turns + row) + 1
    two = tl.arange(0, 2)
    mine = tl.where(two == 0, bits, index + first_id)
    _send(mine, two, two < 2, turn, peers, row, ROWS, WORDS, RANK, SIZE)
    winner = tl.full((), LOWEST, tl.int64)
    for rank in tl.static_range(SIZE):
        pair = mine
        if rank != RANK:
            pair = _receive(inbox, two, two < 2, turn, rank, row, ROWS, WORDS, SIZE)
        value = tl.sum(tl.where(two == 0, pair, 0), 0).to(tl.float32, bitcast=True)
        winner = tl.maximum(winner, _sortable(value, tl.sum(tl.where(two == 1, pair, 0), 0)))
    tl.store(ids + row, _unsorted(winner)[1].to(tl.int64))
    tl.store(turns + row, turn)
