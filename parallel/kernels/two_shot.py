"""The sum over ranks of many rows, with residual and norm: each rank sums a share of the rows.

    part [T, d] of every rank -> each row to its owner -> sum, residual, norm -> each row to all

A two-shot all-reduce with the work of the rows between its two halves, so the residual stream of a
row is kept by its owner alone. One launch, over memory that the ranks write for each other. A
program of one rank deals with the same rows as that program of the others: it sends, tells their
programs by a flag, and waits for theirs. A program that has the rows of turn t from all others
knows that they have read what it sent in turn t, so one place for each suffices.
Letters: T rows | d width | size ranks
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import Hall
from outrider.parallel.kernels.launch import after_previous, overlapped

TILE = 8192
"""Elements that a program deals with at a time, in rows of one owner."""


def rows_of(d: int) -> int:
    """How many rows of width d that is."""
    padded = 1 << (d - 1).bit_length()
    return min(4, max(1, TILE // padded))


def fits(part: Tensor, hall: Hall) -> bool:
    """Whether sum_add_rms_norm takes such rows."""
    d = part.shape[-1]
    step = rows_of(d) * hall.size
    rows = -(-part.numel() // d // step) * step
    return part.dtype == torch.bfloat16 and d % 8 == 0 and rows * d <= hall.room.numel()


def sum_add_rms_norm(
    part: Tensor, residual: Tensor, scale: Tensor, eps: float, hall: Hall
) -> tuple[Tensor, Tensor]:
    """As peer.sum_add_rms_norm, for any number of rows that `fits`.

    The norm lies in `hall` until the next call. Of the stream, the second result, only the rows
    that this rank owns are written: it is the `residual` of a next call with as many rows, and
    good for nothing else. Every rank makes the same calls in the same order.
    """
    d = part.shape[-1]
    tokens = part.numel() // d
    assert part.is_contiguous()
    assert residual.is_contiguous()
    assert fits(part, hall)
    total = torch.empty_like(part)
    turns = triton.cdiv(tokens, rows_of(d) * hall.size)
    _two_shot_kernel[(min(turns, hall.programs),)](
        part, residual, scale, total, hall.parts, hall.room, hall.flags, hall.turns, hall.peers,
        tokens, turns, hall.parts.stride(0), eps,
        PROGRAMS=hall.programs, RANK=hall.rank, SIZE=hall.size, D=d, ROWS=rows_of(d),
        BLOCK=triton.next_power_of_2(d), num_warps=8, **overlapped(part),
    )  # fmt: skip
    return hall.room[: part.numel()].view(part.shape), total


@triton.jit
def _peer(peers, what: tl.constexpr, rank, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Where the parts (0), the rows (1) or the flags (2) of a rank lie."""
    address = tl.load(peers + what * SIZE + rank).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _tell(
    peers, shot: tl.constexpr, turn,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The same program of every other rank learns that all it gets in this shot is there."""
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flags = _peer(peers, 2, (RANK + step) % SIZE, SIZE, tl.int32)
        at = flags + (shot * SIZE + RANK) * PROGRAMS + tl.program_id(0)
        tl.atomic_xchg(at, turn, sem="release", scope="sys")


@triton.jit
def _hear(
    flags, shot: tl.constexpr, turn,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait until the same program of every other rank has told."""
    for step in tl.static_range(1, SIZE):
        at = flags + (shot * SIZE + (RANK + step) % SIZE) * PROGRAMS + tl.program_id(0)
        while tl.atomic_add(at, 0, sem="acquire", scope="sys") < turn:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["eps", "tokens", "turns"])
def _two_shot_kernel(
    part, residual, scale, total, parts, room, flags, counts, peers, tokens, turns, share, eps,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: every so many-th ROWS rows of each owner."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)[None, :]
    scales = tl.load(scale + at, mask=at < D, other=0.0)
    after_previous(PDL)
    count = tl.load(counts + program) + 1
    for turn in range(program, turns, programs):
        for step in tl.static_range(1, SIZE):
            owner = (RANK + step) % SIZE
            row = (turn * SIZE + owner) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < tokens) & (at < D)
            mine = tl.load(part + row.to(tl.int64) * D + at, mask=inside, other=0.0)
            place = turn * ROWS + tl.arange(0, ROWS)[:, None]
            box = _peer(peers, 0, owner, SIZE, tl.bfloat16) + RANK * share
            tl.store(box + place.to(tl.int64) * D + at, mine, mask=inside)
    _tell(peers, 0, count, PROGRAMS, RANK, SIZE)
    _hear(flags, 0, count, PROGRAMS, RANK, SIZE)
    for turn in range(program, turns, programs):
        row = (turn * SIZE + RANK) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < tokens) & (at < D)
        where = row.to(tl.int64) * D + at
        place = (turn * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64) * D + at
        x = tl.zeros((ROWS, BLOCK), tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                x += tl.load(part + where, mask=inside, other=0.0).to(tl.float32)
            else:  # .cg: others wrote it, so not from this processor's first-level cache
                theirs = parts + rank * share + place
                x += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = x.to(tl.bfloat16).to(tl.float32)
        x += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        x = x.to(tl.bfloat16)
        tl.store(total + where, x, mask=inside)
        x = x.to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        y = (x * rate[:, None] * scales).to(tl.bfloat16)
        tl.store(room + where, y, mask=inside)
        for step in tl.static_range(1, SIZE):
            other = _peer(peers, 1, (RANK + step) % SIZE, SIZE, tl.bfloat16)
            tl.store(other + where, y, mask=inside)
    _tell(peers, 1, count, PROGRAMS, RANK, SIZE)
    _hear(flags, 1, count, PROGRAMS, RANK, SIZE)
    tl.store(counts + program, count)
