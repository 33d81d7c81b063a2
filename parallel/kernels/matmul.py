"""Matrix products of few rows, whose time is that of reading the weight once; and SwiGLU.

    x [.., K] -> few_rows -> [.., O]             x, [gate; up] -> few_rows_swiglu -> [.., i]
    hidden [N, K] -> head_top_pair, head_top_pair_fp8 -> the best logit's pair, storing no logit
    hidden [N, K] -> head_keys of sampled rows, or head_logits -> kernels/sampling.py

Products of up to 8 rows are in kernels/gemv.py. For more rows K is split over programs. Those of up
to 32 rows load their piece of the weight before the rows are there. The last program of a tile to
arrive adds up the pieces in a fixed order, so that a row's result depends on no other row and on no
timing. FP8 weights: as in kernels/gemv.py.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.formats import Fp8Matrix, StackedMatrix
from outrider.parallel.group import OneShotBuffers
from outrider.parallel.kernels import gemv
from outrider.parallel.kernels.argmax import LOWEST, key_of, pair_of
from outrider.parallel.kernels.launch import (
    after_previous,
    let_next_start,
    overlapped,
    wait_for_previous,
)
from outrider.parallel.kernels.noise import EXACT_SUMS, noise, position_of, row_keys, slot_of
from outrider.parallel.kernels.one_shot import has_place
from outrider.parallel.operands import PickRows, SlotSampling

MAX_ROWS = 64
FP8_ROWS = 96
"""The most rows where the weight is FP8. A program takes up to MAX_ROWS of them, so each weight is
converted once or twice. With more rows, a plain copy for the library costs no more."""
PROGRAMS = 160
"""K is split in two as often as the launch then has at most this many programs, ..."""
LEAST_DEPTH = 256
"""... each of which has at least this much of K."""
HELD_DEPTH = 512
"""How much of K a program loads into shared memory before the rows are there, in 4 steps of 128."""
HELD_ROWS = 32
"""The most rows of a product whose programs do that."""
BLOCK_DEPTH = 128
"""The most columns of an FP8 weight that a program reads in one step."""
SWIGLU_PIECE = 1024
"""Elements of a row that one program of swiglu takes."""
Weight = Tensor | Fp8Matrix


class Tiling(NamedTuple):
    """How a product is divided into programs."""

    columns: int
    """Columns of the result, which are rows of the weight, of one program."""
    depth: int
    """Bytes of a row of x that a program reads in one step."""
    split: int
    """Parts that K is divided into."""
    warps: int
    stages: int
    weight_first: bool = False
    """Whether the weight is the left factor. Hopper's matrix instruction wants 64 rows there."""
    held: bool = False
    """Whether a program loads its whole piece of the weight before it waits for the rows."""


def rows_tiling(num_rows: int, columns: int, inner: int, bytes_each: int) -> Tiling:
    """The tiling of few_rows, where an element of x has `bytes_each`."""
    if num_rows <= HELD_ROWS and inner % HELD_DEPTH == 0 and bytes_each == 2:
        return Tiling(64, 256, inner // HELD_DEPTH, 4, 1, weight_first=True, held=True)
    tiles = triton.cdiv(columns, 64)
    split = 1
    while 2 * split * tiles <= PROGRAMS and inner // (2 * split) >= LEAST_DEPTH:
        split *= 2
    if num_rows <= 16:
        return Tiling(64, 256, split, 4, 4, weight_first=True)
    return Tiling(64, 128, split, 4, 5)


def blocks_tiling(
    num_rows: int, columns: int, inner: int, block_columns: int, bytes_each: int
) -> Tiling:
    """As rows_tiling, for an FP8 weight in blocks of so many columns. A step lies in one block."""
    depth = min(BLOCK_DEPTH, block_columns & -block_columns) * bytes_each
    few = num_rows <= HELD_ROWS
    # Split into programs that all run at once.
    width, programs = (64, 3 * gemv.PROCESSORS) if few else (128, 2 * gemv.PROCESSORS)
    tiles = triton.cdiv(columns, width) * triton.cdiv(num_rows, MAX_ROWS)
    split = min(max(4 if few else 6, programs // tiles), inner // LEAST_DEPTH)
    warps, stages = (4, 4) if few else (8, 3)
    return Tiling(width, depth, max(1, split), warps, stages, weight_first=True)


def head_tiling(num_rows: int, bytes_each: int) -> Tiling:
    """The tiling of head_keys, where an element of the weight has `bytes_each`."""
    if num_rows <= 16:
        return Tiling(64, 256, 1, 4, 4) if bytes_each > 1 else Tiling(64, 512, 1, 4, 3)
    return Tiling(128, 128, 1, 4, 4) if bytes_each > 1 else Tiling(128, 256, 1, 4, 3)


def most_rows(w: Weight | StackedMatrix) -> int:
    """The most rows of x that few_rows and few_rows_swiglu take."""
    return MAX_ROWS if isinstance(w, Tensor) else FP8_ROWS


def few_rows(x: Tensor, w: Weight | StackedMatrix, arrivals: Tensor) -> Tensor:
    """x [.., K] @ w [O, K]^T -> [.., O] in x's dtype, summed in float32.

    At most most_rows(w) rows; the last dim of x has stride 1, w or its parts are contiguous and
    satisfy fp8.readable; FP8 is read as in gemv. arrivals: a counter, int32, for each tile of
    columns and MAX_ROWS rows, zero before and after; one launch at a time may use them.
    """
    flat, y = _flat(x, w), _result(x, w.shape[0])
    parts = w.parts if isinstance(w, StackedMatrix) else (w,)
    columns = y.view(flat.shape[0], w.shape[0]).split([part.shape[0] for part in parts], 1)
    for part, own in zip(parts, columns, strict=True):
        _launch_rows(flat, part, own, arrivals, gated=False)
    return y


def few_rows_swiglu(x: Tensor, w_gate_up: Weight, arrivals: Tensor) -> Tensor:
    """few_rows with w [2i, K] = [gate; up], then swiglu -> [.., i]. Rounds where those two do."""
    flat, width = _flat(x, w_gate_up), w_gate_up.shape[0] // 2
    y = _result(x, width)
    _launch_rows(flat, w_gate_up, y.view(flat.shape[0], width), arrivals, gated=True)
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    """As Ops.swiglu; the last dim of gate_up has stride 1."""
    assert gate_up.stride(-1) == 1
    width = gate_up.shape[-1] // 2
    x = gate_up.flatten(0, -2) if gate_up.dim() > 1 else gate_up.unsqueeze(0)
    y = torch.empty(*gate_up.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (x.shape[0], triton.cdiv(width, SWIGLU_PIECE))
        _swiglu_kernel[grid](
            x[:, width:], x, y, x.stride(0), x.stride(0),
            D=width, BLOCK=SWIGLU_PIECE, num_warps=2, **overlapped(x),
        )  # fmt: skip
    return y


def can_send(x: Tensor, w: Weight, buffers: OneShotBuffers) -> bool:
    """Whether few_rows_sent takes x and w."""
    num_rows = x.numel() // x.shape[-1]
    return num_rows > 0 and gemv.fits(x, num_rows) and has_place(num_rows, w.shape[0], buffers)


def few_rows_sent(x: Tensor, w: Weight, buffers: OneShotBuffers) -> Tensor:
    """few_rows whose result is also sent to the other ranks (gemv.gemv)."""
    flat, y = _flat(x, w), _result(x, w.shape[0])
    gemv.gemv(flat, w, y.view(flat.shape[0], w.shape[0]), gated=False, buffers=buffers)
    return y


def head_top_pair(x: Tensor, w: Tensor, first_id: int) -> Tensor:
    """As Ops.head_pair: x [N, K], w [v, K] of the ids from first_id on -> pairs [N, 2] int32.

    The logits are rounded to x's dtype before they are compared.
    """
    return pair_of(head_keys(x, w), first_id)


class Sampled(NamedTuple):
    """How rows are drawn from all ids: `per_slot` rows of each slot of `rows`."""

    first_id: int
    per_slot: int
    rows: PickRows
    by_slot: SlotSampling


def head_keys(
    x: Tensor, w: Tensor, scales: Tensor | None = None, sampled: Sampled | None = None
) -> Tensor:
    """As argmax.top_keys of the logits of head_top_pair or, with scales, of head_top_pair_fp8;
    sampled: as scan.noised_keys of them."""
    return _launch_head(x, w, scales, None, sampled)


def head_logits(x: Tensor, w: Tensor, scales: Tensor | None = None) -> Tensor:
    """The logits [N, v] that head_keys compares, in x's dtype."""
    logits = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    _launch_head(x, w, scales, logits, None)
    return logits


def head_top_pair_fp8(x: Tensor, w8: Tensor, scales: Tensor, first_id: int) -> Tensor:
    """As Ops.head_pair_fp8: w8 [v, K] float8_e4m3fn, scales [v] float32, |x| < 65504.

    Needs capability 8.9.
    """
    return pair_of(head_keys(x, w8, scales), first_id)


def _flat(x: Tensor, w: Weight | StackedMatrix) -> Tensor:
    """x as [N, K]. A single row gets the stride that one of many has: no kernel uses it, but Triton
    would compile another one for another stride."""
    inner = x.shape[-1]
    flat = x.as_strided((1, inner), (inner, 1)) if x.numel() == inner else x.reshape(-1, inner)
    if flat.shape[0] > most_rows(w) or flat.shape[1] != w.shape[1]:
        shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}"
        raise ValueError(f"{shapes}: [N <= {most_rows(w)}, K] and [O, K]")
    assert x.stride(-1) == flat.stride(1) == 1
    return flat


def _result(x: Tensor, width: int) -> Tensor:
    return torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)


def _launch_rows(x: Tensor, w: Weight, y: Tensor, arrivals: Tensor, gated: bool) -> None:
    """x [N, K] -> y, [N, O] or [N, i], whose last dim has stride 1."""
    num_rows, inner = x.shape
    width = y.shape[1]
    if not y.numel():
        return
    if gemv.fits(x, num_rows):
        gemv.gemv(x, w, y, gated=gated)
        return
    fp8 = isinstance(w, Fp8Matrix)
    values, scales, block = (w.values, w.scales, w.block) if fp8 else (w, w, (0, 0))
    assert values.is_contiguous()
    assert scales.is_contiguous()
    shape = num_rows, w.shape[0], inner
    if fp8:
        tiling = blocks_tiling(*shape, block[1], x.element_size())
    else:
        tiling = rows_tiling(*shape, x.element_size())
    tiles = triton.cdiv(width, tiling.columns // 2 if gated else tiling.columns)
    row_blocks = triton.cdiv(num_rows, MAX_ROWS)
    partial = y
    if tiling.split > 1:
        assert arrivals.numel() >= tiles * row_blocks
        shape = (tiles, tiling.split, num_rows, tiling.columns)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    _rows_kernel[(row_blocks, tiling.split, tiles)](
        x, values, scales, y, partial, arrivals, num_rows, x.stride(0), y.stride(0), width,
        K=inner, SPLIT=tiling.split, ROWS=_padded(min(num_rows, MAX_ROWS)), COLUMNS=tiling.columns,
        DEPTH=tiling.depth // x.element_size(), GATED=gated, SWAP=tiling.weight_first,
        FACTOR=tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32,
        HELD=tiling.held, FP8=fp8, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1],
        num_warps=tiling.warps, num_stages=tiling.stages, **overlapped(x),
    )  # fmt: skip


def _launch_head(
    x: Tensor, w: Tensor, scales: Tensor | None, logits: Tensor | None, sampled: Sampled | None
) -> Tensor:
    flat = _flat(x, w)
    assert w.is_contiguous()
    num_rows, inner = flat.shape
    tiling = head_tiling(num_rows, w.element_size())
    tiles = triton.cdiv(w.shape[0], tiling.columns)
    best = torch.empty(num_rows, tiles, dtype=torch.int64, device=x.device)
    if sampled is None:
        draws, per_slot, shift, first_id = (best,) * 5, 1, 0, 0
    else:
        first_id, per_slot, rows, by_slot = sampled
        draws = (rows.slots, rows.last, by_slot.seed, by_slot.drawn, by_slot.scale)
        shift = rows.shift
    if num_rows:
        _head_kernel[(tiles,)](
            flat, w, w if scales is None else scales, best, best if logits is None else logits,
            *draws, num_rows, flat.stride(0), w.shape[0], per_slot, first_id, shift,
            K=inner, ROWS=_padded(num_rows), COLUMNS=tiling.columns,
            DEPTH=tiling.depth // x.element_size(), FP8=scales is not None,
            STORE=logits is not None, DRAWN=sampled is not None,
            SWAP=tiling.weight_first, FACTOR=_factor(x, w),
            num_warps=tiling.warps, num_stages=tiling.stages,
            **(EXACT_SUMS if sampled else {}), **overlapped(x),
        )  # fmt: skip
    return best


def _factor(x: Tensor, w: Tensor) -> tl.dtype:
    """The dtype that is multiplied. Triton's interpreter has no product of bfloat16."""
    if w.dtype == torch.float8_e4m3fn:  # one instruction converts two to float16, three to bfloat16
        return tl.float16
    return tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32


def _padded(num_rows: int) -> int:
    """Rows of a tile that the tensor cores can multiply."""
    return max(16, int(triton.next_power_of_2(num_rows)))


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x, w, scales, y, partial, arrivals, num_rows, x_row, y_row, width,
    K: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, FACTOR: tl.constexpr,
    HELD: tl.constexpr, FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, and one part of K for one tile of columns. With GATED, the gate and
    the up column of each column of the result are neighbours in the tile."""
    let_next_start(PDL)
    split, tile = tl.program_id(1), tl.program_id(2)
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if GATED:
        o = tl.minimum(tile * (COLUMNS // 2) + c // 2, width - 1) + c % 2 * width
    else:
        o = tl.minimum(tile * COLUMNS + c, width - 1)
    STEPS: tl.constexpr = triton.cdiv(triton.cdiv(K, DEPTH), SPLIT)
    EVEN: tl.constexpr = K % (SPLIT * STEPS * DEPTH) == 0
    first = split * STEPS * DEPTH
    if HELD:
        total = _held_product(
            x, w, num_rows, x_row, n, o, first, K, STEPS, ROWS, COLUMNS, DEPTH, FACTOR, PDL
        )
    else:
        wait_for_previous(PDL)
        if FP8:
            total = _blocks_product(
                x, w, scales, num_rows, x_row, n, o, first,
                K, STEPS, EVEN, ROWS, COLUMNS, DEPTH, FACTOR, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip
        else:
            total = _product(
                x, w, num_rows, x_row, n, o, first,
                K, STEPS, EVEN, ROWS, COLUMNS, DEPTH, SWAP, FACTOR,
            )  # fmt: skip
    if SPLIT == 1:
        _write(total, y, num_rows, y_row, n, tile, width, ROWS, COLUMNS, GATED)
    else:
        part = num_rows * COLUMNS
        at = partial + tile * SPLIT * part + n[:, None] * COLUMNS + c[None, :]
        inside = (n < num_rows)[:, None] & (c < COLUMNS)[None, :]
        tl.store(at + split * part, total, mask=inside)
        tl.debug_barrier()
        arrived = arrivals + tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrived, 0)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for s in tl.static_range(SPLIT):
                # .cg: other processors wrote it, so this one's L1 cache may be out of date
                total += tl.load(at + s * part, mask=inside, other=0.0, cache_modifier=".cg")
            _write(total, y, num_rows, y_row, n, tile, width, ROWS, COLUMNS, GATED)


@triton.jit
def _held_product(
    x, w, num_rows, x_row, n, o, first,
    K: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As _product, for a K that the steps divide; loads its piece of the weight before it waits."""
    k = first + tl.arange(0, DEPTH)
    w_at = w + o.to(tl.int64)[:, None] * K + k[None, :]
    held = ()
    for step in tl.static_range(STEPS):
        held = held + (tl.load(w_at + step * DEPTH),)  # noqa: RUF005 (Triton)
    wait_for_previous(PDL)
    x_at = x + n[None, :] * x_row + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        rows = tl.load(x_at + step * DEPTH, mask=(n < num_rows)[None, :], other=0.0)
        total = tl.dot(held[step].to(FACTOR), rows.to(FACTOR), total)
    return total.T


@triton.jit
def _product(
    x, w, num_rows, x_row, n, o, first,
    K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Rows n of x times rows o of w, over STEPS * DEPTH of K from `first` on, in float32."""
    k = first + tl.arange(0, DEPTH)
    x_at = x + n[:, None] * x_row + k[None, :]
    w_at = w + o.to(tl.int64)[None, :] * K + k[:, None]
    alive = (n < num_rows)[:, None]
    total = tl.zeros((COLUMNS, ROWS) if SWAP else (ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        if EVEN:
            left = tl.load(x_at, mask=alive, other=0.0)
            right = tl.load(w_at)
        else:
            inside = k < K - step * DEPTH
            left = tl.load(x_at, mask=alive & inside[None, :], other=0.0)
            right = tl.load(w_at, mask=inside[:, None], other=0.0)
        left, right = left.to(FACTOR), right.to(FACTOR)
        if SWAP:
            total = tl.dot(right.T, left.T, total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    return total.T if SWAP else total


@triton.jit
def _blocks_product(
    x, w, scales, num_rows, x_row, n, o, first,
    K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """As _product, of FP8: each step, which lies in one block of columns, times its scale."""
    k = first + tl.arange(0, DEPTH)
    w_at = w + o.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + n[None, :] * x_row + k[:, None]
    alive = (n < num_rows)[None, :]
    scale_at = scales + o // BLOCK_ROWS * (K // BLOCK_COLUMNS)
    scale = tl.load(scale_at + tl.minimum(first, K - 1) // BLOCK_COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(STEPS):
        if EVEN:
            codes = tl.load(w_at)
            rows = tl.load(x_at, mask=alive, other=0.0)
        else:
            inside = k < K - step * DEPTH
            codes = tl.load(w_at, mask=inside[None, :], other=0.0)
            rows = tl.load(x_at, mask=alive & inside[:, None], other=0.0)
        after = tl.minimum(first + (step + 1) * DEPTH, K - 1)
        next_scale = tl.load(scale_at + after // BLOCK_COLUMNS)
        codes = codes.to(tl.float16).to(tl.float32).to(FACTOR)  # as in gemv
        total += tl.dot(codes, rows.to(FACTOR), input_precision="ieee") * scale[:, None]
        scale = next_scale
        x_at += DEPTH
        w_at += DEPTH
    return total.T


@triton.jit
def _write(
    total, y, num_rows, y_row, n, tile, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a finished tile, rounded. With GATED, swiglu of it, rounded where swiglu rounds."""
    dtype = y.dtype.element_ty
    rounded = total.to(dtype)
    if GATED:
        gate, up = tl.split(tl.reshape(rounded.to(tl.float32), (ROWS, COLUMNS // 2, 2)))
        factor = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        o = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        to = y + n[:, None] * y_row + o[None, :]
        tl.store(to, (up * factor).to(dtype), mask=(n < num_rows)[:, None] & (o < width)[None, :])
    else:
        o = tile * COLUMNS + tl.arange(0, COLUMNS)
        to = y + n[:, None] * y_row + o[None, :]
        tl.store(to, rounded, mask=(n < num_rows)[:, None] & (o < width)[None, :])


@triton.jit
def _swiglu_kernel(
    x_ptr, gate_ptr, y_ptr, x_row, gate_row,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row: x * silu(gate), where silu(gate) is rounded first."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    dtype = y_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    factor = gate * tl.sigmoid(gate)
    y = x * factor.to(dtype).to(tl.float32)
    tl.store(y_ptr + row * D + at, y.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "R", "first_id", "shift"])
def _head_kernel(
    x, w, scales, best, stored, slots, last, seed, drawn, scale,
    num_rows, x_row, width, R, first_id, shift,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    FP8: tl.constexpr, STORE: tl.constexpr, DRAWN: tl.constexpr,
    SWAP: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the key of each row's best logit in one tile of the vocabulary; with STORE the
    logits instead; with DRAWN the logits are scaled and have their row's noise."""
    tile = tl.program_id(0)
    n, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    o = tile * COLUMNS + c
    STEPS: tl.constexpr = triton.cdiv(K, DEPTH)
    after_previous(PDL)
    total = _product(
        x, w, num_rows, x_row, n, tl.minimum(o, width - 1), 0,
        K, STEPS, K % DEPTH == 0, ROWS, COLUMNS, DEPTH, SWAP, FACTOR,
    )  # fmt: skip
    if FP8:
        total *= tl.load(scales + o, mask=o < width, other=0.0)[None, :]
    logits = total.to(x.dtype.element_ty).to(tl.float32)
    if STORE:
        to = stored + n.to(tl.int64)[:, None] * width + o[None, :]
        inside = (n < num_rows)[:, None] & (o < width)[None, :]
        tl.store(to, logits.to(x.dtype.element_ty), mask=inside)
        return
    if DRAWN:
        slot = slot_of(slots, n, R, n < num_rows)
        position = position_of(last, n, shift, R, n < num_rows)
        first, second = row_keys(tl.load(seed + slot), position)
        logits *= tl.load(scale + slot)[:, None]
        noised = logits + noise(first[:, None], second[:, None], (o + first_id)[None, :])
        logits = tl.where(tl.load(drawn + slot)[:, None], noised, logits)
    key = tl.where((o < width)[None, :], key_of(logits, o[None, :]), LOWEST)
    at = best + n * tl.num_programs(0) + tile
    tl.store(at, tl.max(key, 1), mask=n < num_rows)
