"""The sum over ranks of many rows, with residual and norm, in two shots: each rank sums some rows.

    part [T, d] of every rank -> shot 0: each row to the rank that sums it
    sum, residual, norm of this rank's rows -> shot 1: the norms to every rank

It is a reduce-scatter and an all-gather in one launch, so only the rank that sums a row has its
residual stream. Each program works on the same rows as the program of its index on the other ranks:
it writes to their memory, raises a flag there, and waits for theirs. A program that has seen the
flags of shot 1 knows that all others have read what it wrote in shot 0: one buffer suffices.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import TwoShotBuffers
from outrider.parallel.kernels.launch import after_previous, overlapped

TILE = 8192
"""Elements of neighbouring rows that one rank sums, and that a program holds at a time."""


def rows_of(d: int) -> int:
    """How many rows of width d a tile has, at most 4."""
    padded = 1 << (d - 1).bit_length()
    return min(4, max(1, TILE // padded))


def fits(part: Tensor, buffers: TwoShotBuffers) -> bool:
    """Whether sum_add_rms_norm takes `part`: bfloat16 rows for which there is place."""
    d = part.shape[-1]
    step = rows_of(d) * buffers.size
    rows = -(-part.numel() // d // step) * step
    return part.dtype == torch.bfloat16 and d % 8 == 0 and rows * d <= buffers.results.numel()


def sum_add_rms_norm(
    part: Tensor, residual: Tensor, scale: Tensor, eps: float, buffers: TwoShotBuffers
) -> tuple[Tensor, Tensor]:
    """As one_shot.sum_add_rms_norm, for as many rows as `fits` allows.

    The norm lies in `buffers`, where the next call overwrites it. Of the residual stream, the
    second result, only the rows that this rank sums are written: it is good for nothing but to be
    the `residual` of a next call with as many rows. Every rank makes the same calls in the same
    order.
    """
    d = part.shape[-1]
    tokens = part.numel() // d
    assert part.is_contiguous()
    assert residual.is_contiguous()
    assert fits(part, buffers)
    total = torch.empty_like(part)
    tiles = triton.cdiv(tokens, rows_of(d) * buffers.size)  # of each rank
    programs = buffers.flags.shape[2]
    _two_shot_kernel[(min(tiles, programs),)](
        part, residual, scale, total, buffers.parts, buffers.results, buffers.flags,
        buffers.sequence, buffers.addresses, tokens, tiles, buffers.parts.stride(0), eps,
        PROGRAMS=programs, RANK=buffers.rank, SIZE=buffers.size, D=d, ROWS=rows_of(d),
        BLOCK=triton.next_power_of_2(d), num_warps=8, **overlapped(part),
    )  # fmt: skip
    return buffers.results[: part.numel()].view(part.shape), total


@triton.jit
def _buffer_of(addresses, which: tl.constexpr, rank, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Where the parts (0), the results (1) or the flags (2) of a rank lie."""
    address = tl.load(addresses + which * SIZE + rank).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _raise_flags(
    addresses, shot: tl.constexpr, number,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tell this program of every other rank that all it receives in this shot has been written."""
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flags = _buffer_of(addresses, 2, (RANK + step) % SIZE, SIZE, tl.int32)
        at = flags + (shot * SIZE + RANK) * PROGRAMS + tl.program_id(0)
        tl.atomic_xchg(at, number, sem="release", scope="sys")


@triton.jit
def _await_flags(
    flags, shot: tl.constexpr, number,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait until this program of every other rank has raised its flag of this shot here."""
    for step in tl.static_range(1, SIZE):
        at = flags + (shot * SIZE + (RANK + step) % SIZE) * PROGRAMS + tl.program_id(0)
        while tl.atomic_add(at, 0, sem="acquire", scope="sys") < number:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["eps", "tokens", "tiles"])
def _two_shot_kernel(
    part, residual, scale, total, parts, results, flags, sequence, addresses, tokens, tiles, share,
    eps, PROGRAMS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of ROWS rows of each rank."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)[None, :]
    scales = tl.load(scale + at, mask=at < D, other=0.0)
    after_previous(PDL)
    number = tl.load(sequence + program) + 1
    for tile in range(program, tiles, programs):
        for step in tl.static_range(1, SIZE):
            owner = (RANK + step) % SIZE
            row = (tile * SIZE + owner) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < tokens) & (at < D)
            mine = tl.load(part + row.to(tl.int64) * D + at, mask=inside, other=0.0)
            place = tile * ROWS + tl.arange(0, ROWS)[:, None]
            to = _buffer_of(addresses, 0, owner, SIZE, tl.bfloat16) + RANK * share
            tl.store(to + place.to(tl.int64) * D + at, mine, mask=inside)
    _raise_flags(addresses, 0, number, PROGRAMS, RANK, SIZE)
    _await_flags(flags, 0, number, PROGRAMS, RANK, SIZE)
    for tile in range(program, tiles, programs):
        row = (tile * SIZE + RANK) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < tokens) & (at < D)
        where = row.to(tl.int64) * D + at
        place = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64) * D + at
        x = tl.zeros((ROWS, BLOCK), tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                x += tl.load(part + where, mask=inside, other=0.0).to(tl.float32)
            else:  # .cg: another rank wrote it, so this processor's L1 cache may be out of date
                theirs = parts + rank * share + place
                x += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = x.to(tl.bfloat16).to(tl.float32)
        x += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        x = x.to(tl.bfloat16)
        tl.store(total + where, x, mask=inside)
        x = x.to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        y = (x * rate[:, None] * scales).to(tl.bfloat16)
        tl.store(results + where, y, mask=inside)
        for step in tl.static_range(1, SIZE):
            to = _buffer_of(addresses, 1, (RANK + step) % SIZE, SIZE, tl.bfloat16)
            tl.store(to + where, y, mask=inside)
    _raise_flags(addresses, 1, number, PROGRAMS, RANK, SIZE)
    _await_flags(flags, 1, number, PROGRAMS, RANK, SIZE)
    tl.store(sequence + program, number)
