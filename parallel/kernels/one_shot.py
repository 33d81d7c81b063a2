"""Sums and choices over ranks in one shot: each rank writes what it has into every other's memory.

    part [T, d] of every rank -> sum_add_rms_norm -> (norm of residual + sum, residual + sum)
    keys of this rank's logits -> choose_over_ranks -> the best id [N] over all ranks

A packet of 8 bytes, written in one store, holds 4 bytes of data and the sequence number of this
exchange of the row. One that shows the expected number is complete, so no barrier is needed. Even
and odd numbers have their own places: a rank that has received all packets t of a row knows that
every rank has read its packets t-1, so their places are free for t+1. Sums run in rank order.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import OneShotBuffers
from outrider.parallel.kernels.argmax import LOWEST, bits_and_index, key_of
from outrider.parallel.kernels.launch import after_previous, overlapped


def sum_add_rms_norm(
    part: Tensor,
    residual: Tensor,
    scale: Tensor,
    eps: float,
    buffers: OneShotBuffers,
    *,
    sent: bool = False,
) -> tuple[Tensor, Tensor]:
    """part, residual [.., d] bfloat16, scale [d] float32 -> (rms_norm(x), x) with x = residual +
    sum of `part` over the ranks.

    The sum is rounded to bfloat16 before it is added, as that of all_reduce is. `part` must satisfy
    `fits`, and every rank makes the same calls in the same order. sent: the kernel that made `part`
    has also sent it (gemv), so that this one only receives.
    """
    d = part.shape[-1]
    tokens = part.numel() // d
    assert part.is_contiguous()
    assert residual.is_contiguous()
    assert fits(part, buffers)
    y, total = torch.empty_like(part), torch.empty_like(part)
    _sum_norm_kernel[(tokens,)](
        part.view(torch.int32), residual.view(torch.int32), scale, y.view(torch.int32),
        total.view(torch.int32), buffers.addresses, buffers.received, buffers.sequence, eps,
        ROWS=buffers.rows, WORDS=buffers.words, RANK=buffers.rank, SIZE=buffers.size, D=d,
        SENT=sent, BLOCK=triton.next_power_of_2(d // 2), num_warps=8 if d >= 2048 else 4,
        **overlapped(part),
    )  # fmt: skip
    return y, total


def fits(part: Tensor, buffers: OneShotBuffers) -> bool:
    """Whether sum_add_rms_norm takes `part`: bfloat16 rows for which there is place."""
    d = part.shape[-1]
    return part.dtype == torch.bfloat16 and has_place(part.numel() // d, d, buffers)


def has_place(num_rows: int, d: int, buffers: OneShotBuffers) -> bool:
    """Whether the buffers have a place for so many bfloat16 rows of width d, which must be even."""
    return num_rows <= buffers.rows and d % 2 == 0 and d // 2 <= buffers.words


def choose_over_ranks(best: Tensor, first_id: int, buffers: OneShotBuffers) -> Tensor:
    """best [N, pieces] int64, the keys of this rank's best logits (argmax.top_keys), at most
    buffers.rows rows of them -> the id [N] int64 of the best logit of all ranks, the smallest of
    equals.

    first_id: the id of this rank's logit at index 0.
    """
    num_rows, pieces = best.shape
    assert num_rows <= buffers.rows
    ids = torch.empty(num_rows, dtype=torch.int64, device=best.device)
    if num_rows:
        _choose_over_ranks_kernel[(num_rows,)](
            best, ids, buffers.addresses, buffers.received, buffers.sequence, first_id, pieces,
            ROWS=buffers.rows, WORDS=buffers.words, RANK=buffers.rank, SIZE=buffers.size,
            BLOCK=triton.next_power_of_2(pieces), num_warps=4, **overlapped(best),
        )  # fmt: skip
    return ids


@triton.jit
def _place(number, sender, row, ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr):
    """Where the packets of a row from one sender lie in `received` [2, size, rows, words]."""
    return (((number & 1) * SIZE + sender) * ROWS + row).to(tl.int64) * WORDS


@triton.jit
def send_words(
    word, at, inside, number, addresses, row,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the int32 words at indices `at` of a row to every other rank, with their number."""
    packet = (number.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, SIZE):
        received = tl.load(addresses + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.store(received + _place(number, RANK, row, ROWS, WORDS, SIZE) + at, packet, mask=inside)


@triton.jit
def receive_words(
    received, at, inside, number, sender, row,
    ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait until all packets of a row from one rank have this number; -> their int32 words."""
    place = received + _place(number, sender, row, ROWS, WORDS, SIZE) + at
    missing = 1
    while missing > 0:
        packet = tl.load(place, mask=inside, other=0, volatile=True)
        late = inside & ((packet >> 32).to(tl.int32) != number)
        missing = tl.max(late.to(tl.int32), 0)
    packet = tl.load(place, mask=inside, other=0, volatile=True)
    return (packet & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _halves(word):
    """An int32 word of two bfloat16 -> both as float32."""
    first = (word << 16).to(tl.float32, bitcast=True)
    return first, (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """float32 to the nearest bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def word_of(first, second):
    """Two float32 whose values are bfloat16 -> the int32 word of both."""
    low = first.to(tl.int32, bitcast=True) >> 16 & 0xFFFF
    return low | (second.to(tl.int32, bitcast=True) & -65536)


@triton.jit(do_not_specialize=["eps"])
def _sum_norm_kernel(
    part, residual, scale, y, total, addresses, received, sequence, eps,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, SENT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, whose words are pairs of neighbours."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < D // 2
    scale_1 = tl.load(scale + 2 * at, mask=inside, other=0.0)
    scale_2 = tl.load(scale + 2 * at + 1, mask=inside, other=0.0)
    after_previous(PDL)
    place = row.to(tl.int64) * (D // 2) + at
    number = tl.load(sequence + row) + 1
    mine = tl.load(part + place, mask=inside, other=0)
    if not SENT:
        send_words(mine, at, inside, number, addresses, row, ROWS, WORDS, RANK, SIZE)
    x = tl.load(residual + place, mask=inside, other=0)
    sum_1, sum_2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        word = mine
        if rank != RANK:
            word = receive_words(received, at, inside, number, rank, row, ROWS, WORDS, SIZE)
        first, second = _halves(word)
        sum_1 += first
        sum_2 += second
    x_1, x_2 = _halves(x)
    x_1, x_2 = _rounded(x_1 + _rounded(sum_1)), _rounded(x_2 + _rounded(sum_2))
    tl.store(total + place, word_of(x_1, x_2), mask=inside)
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, 0)
    rate = tl.rsqrt(squares / D + eps)
    y_1, y_2 = _rounded(x_1 * rate * scale_1), _rounded(x_2 * rate * scale_2)
    tl.store(y + place, word_of(y_1, y_2), mask=inside)
    tl.store(sequence + row, number)


@triton.jit(do_not_specialize=["first_id", "pieces"])
def _choose_over_ranks_kernel(
    best, ids, addresses, received, sequence, first_id, pieces,
    ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: the best of this rank's pieces, then the best of all ranks."""
    row = tl.program_id(0)
    after_previous(PDL)
    at = tl.arange(0, BLOCK)
    keys = tl.load(best + row.to(tl.int64) * pieces + at, mask=at < pieces, other=LOWEST)
    bits, index = bits_and_index(tl.max(keys, 0))
    number = tl.load(sequence + row) + 1
    two = tl.arange(0, 2)
    mine = tl.where(two == 0, bits, index + first_id)
    send_words(mine, two, two < 2, number, addresses, row, ROWS, WORDS, RANK, SIZE)
    winner = tl.full((), LOWEST, tl.int64)
    for rank in tl.static_range(SIZE):
        pair = mine
        if rank != RANK:
            pair = receive_words(received, two, two < 2, number, rank, row, ROWS, WORDS, SIZE)
        value = tl.sum(tl.where(two == 0, pair, 0), 0).to(tl.float32, bitcast=True)
        winner = tl.maximum(winner, key_of(value, tl.sum(tl.where(two == 1, pair, 0), 0)))
    tl.store(ids + row, bits_and_index(winner)[1].to(tl.int64))
    tl.store(sequence + row, number)
