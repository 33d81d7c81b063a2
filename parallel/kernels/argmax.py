"""The best logit of each row, among the logits of this rank and then among all ranks.

    logits [N, v] -> top_keys -> a key for each piece of a row -> pair_of -> (value, id) [N, 2]
    the pairs of all ranks -> choose_pair -> ids [N]

A key is an int64 that holds a logit and its index and sorts by both: a larger logit is larger, and
of equal logits the one with the smaller index. So the largest key of a row names its best logit.
Logits compare as in torch: NaN is above all numbers. Letters: N rows | v vocabulary of this rank
"""

# Pyright sees a kernel as the plain function under @triton.jit, without its launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped

TOP_PIECE = 2048
"""Logits of a piece of a row, which one program reads."""
LOWEST = tl.constexpr(-(1 << 63))
"""Smaller than every key."""


def top_pair(logits: Tensor, first_id: int) -> Tensor:
    """As Ops.top_pair."""
    return pair_of(top_keys(logits), first_id)


def top_keys(logits: Tensor) -> Tensor:
    """logits [N, v] -> the largest key of each piece of a row [N, pieces] int64."""
    num_rows, width = logits.shape
    pieces = triton.cdiv(width, TOP_PIECE)
    best = torch.empty(num_rows, pieces, dtype=torch.int64, device=logits.device)
    if num_rows:
        _top_kernel[(pieces, num_rows)](
            logits, best, logits.stride(0), width, BLOCK=TOP_PIECE, **overlapped(logits)
        )
    return best


def pair_of(best: Tensor, first_id: int) -> Tensor:
    """Keys [N, pieces], whose indices count from first_id on -> the pairs of the rows' largest keys
    [N, 2] int32, as Ops.top_pair."""
    num_rows, pieces = best.shape
    pair = torch.empty(num_rows, 2, dtype=torch.int32, device=best.device)
    if not num_rows:
        return pair
    _pair_kernel[(num_rows,)](
        best,
        pair,
        first_id,
        pieces,
        BLOCK=triton.next_power_of_2(pieces),
        num_warps=1,
        **overlapped(best),
    )
    return pair


def choose_pair(gathered: Tensor) -> Tensor:
    """As Ops.choose_pair."""
    size, num_rows, _ = gathered.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=gathered.device)
    if num_rows:
        block = min(128, triton.next_power_of_2(num_rows))
        _choose_kernel[(triton.cdiv(num_rows, block),)](
            gathered.contiguous(),
            ids,
            num_rows,
            SIZE=size,
            BLOCK=block,
            num_warps=1,
            **overlapped(ids),
        )
    return ids


@triton.jit
def key_of(value, index):
    """float32 value, int32 index >= 0 -> their key, int64.

    The bits of float32 numbers sort as int32 do, once all bits but the sign are flipped in those of
    negative numbers. Before that, -0.0 becomes 0.0; afterwards every NaN gets the bits of one that
    lies above all numbers.
    """
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(value == value, bits, 0x7FC00000)
    return (bits.to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def bits_and_index(key):
    """A key -> (bits of its float32 value, its index), both int32."""
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits, (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _top_kernel(x_ptr, best_ptr, x_row, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a piece of a row."""
    after_previous(PDL)
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + at, mask=at < width, other=float("-inf"))
    # Past the end of the row stands -inf, with indices above those of any -inf of the row itself.
    key = key_of(x.to(tl.float32), at)
    tl.store(best_ptr + row * tl.num_programs(0) + piece, tl.max(key, 0))


@triton.jit
def _pair_kernel(
    best_ptr, pair_ptr, first_id, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row: the pair of its largest key."""
    after_previous(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    keys = tl.load(best_ptr + row.to(tl.int64) * pieces + at, mask=at < pieces, other=LOWEST)
    bits, index = bits_and_index(tl.max(keys, 0))
    tl.store(pair_ptr + row * 2, bits)
    tl.store(pair_ptr + row * 2 + 1, index + first_id)


@triton.jit
def _choose_kernel(
    pair_ptr, ids_ptr, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a block of rows, each with the pairs of all ranks."""
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    best = tl.full((BLOCK,), LOWEST, tl.int64)
    for rank in tl.static_range(SIZE):
        at = pair_ptr + (rank * num_rows + row) * 2
        value = tl.load(at, mask=inside, other=0).to(tl.float32, bitcast=True)
        best = tl.maximum(best, key_of(value, tl.load(at + 1, mask=inside, other=0)))
    tl.store(ids_ptr + row, bits_and_index(best)[1].to(tl.int64), mask=inside)
