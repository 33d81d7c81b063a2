"""Matrix-vector products, of at most 8 vectors, that load the weight before the vectors are there.

    load some of the weight of 16 columns -> wait for the kernel before ->
    multiply a step, load a step of the weight further on, ... -> sum -> y

A program has several steps of its weight in flight throughout. Asking the L2 cache for more before
the wait made products up to twice as slow (docs/log.md). The warps share K, so no sum goes through
memory. A thread loads 16 bytes at a time, in an order that makes them its operands of the
instruction m16n8k16 (_operand).
Letters: N rows | K inner width | O, i columns of a result
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.formats import Fp8Matrix
from outrider.parallel.group import OneShotBuffers
from outrider.parallel.kernels.launch import let_next_start, overlapped, wait_for_previous
from outrider.parallel.kernels.one_shot import send_words, word_of

MAX_ROWS = 8
PROCESSORS = 132
"""Of an H200."""
DEPTH, FP8_DEPTH = 256, 384
"""How much of K a warp has in flight."""


class Plan(NamedTuple):
    """How the warps of a program share K: in steps of `groups` groups a warp."""

    warps: int
    registers: int
    """Of a thread. They limit how many programs fit on a processor."""
    group: int
    """Columns of K that 4 lanes load at once."""
    groups: int
    held: int
    """How many steps of the weight are in flight."""
    chain: int = 1
    """Neighbouring groups that a warp takes in turn. They have one scale."""


def fits(x: Tensor, num_rows: int) -> bool:
    """Whether gemv takes rows like x [.., K]: few, bfloat16, and a multiple of 16 bytes long."""
    return num_rows <= MAX_ROWS and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def gemv(
    x: Tensor,
    w: Tensor | Fp8Matrix,
    y: Tensor,
    *,
    gated: bool,
    buffers: OneShotBuffers | None = None,
) -> None:
    """x [N, K] @ w [O, K]^T -> y [N, O], summed in float32; gated: as few_rows_swiglu, y [N, i].

    x is bfloat16, w too or an Fp8Matrix that satisfies fp8.readable. The last dims of x and y have
    stride 1, w is contiguous. A code of FP8 is multiplied as it is, and the sum over a block of
    columns by the block's scale, so no weight is rounded. A row's result depends on no other row.
    With buffers, y is this rank's part of a sum and is also sent to the other ranks; then O is
    even, and the next call that uses the buffers is the one_shot.sum_add_rms_norm of y, with
    sent=True.
    """
    num_rows, inner = x.shape
    width = w.shape[0] // 2 if gated else w.shape[0]
    fp8 = isinstance(w, Fp8Matrix)
    values, scales, block = (w.values, w.scales, w.block) if fp8 else (w, w, (0, 0))
    assert y.shape == (num_rows, width)
    assert values.is_contiguous()
    assert scales.is_contiguous()
    tiles = triton.cdiv(width, 8 if gated else 16)
    plan = _plan(inner, tiles, block[1])
    steps = triton.cdiv(inner, plan.warps * plan.groups * plan.group * plan.chain) * plan.chain
    _gemv_kernel[(tiles,)](
        x, values, scales, y, num_rows, x.stride(0), y.stride(0), width,
        *((buffers.addresses, buffers.sequence) if buffers else (y, y)),
        K=inner, G=plan.warps * plan.groups, GROUP=plan.group, CHAIN=plan.chain,
        STEPS=steps, HELD=min(plan.held, steps),
        FP8=fp8, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1],
        GATED=gated, FACTOR=tl.bfloat16 if x.is_cuda else tl.float32,
        PLACES=buffers.rows if buffers else 0, WORDS=buffers.words if buffers else 0,
        RANK=buffers.rank if buffers else 0, SIZE=buffers.size if buffers else 1,
        num_warps=plan.warps, **({"maxnreg": plan.registers} if x.is_cuda else {}),
        **overlapped(x),
    )  # fmt: skip


def _plan(inner: int, tiles: int, block_columns: int) -> Plan:
    """The plan for so many programs with a weight of `inner` columns, in blocks of so many or, with
    0, bfloat16.

    Three programs of 4 warps share a processor, or four, if all run at once then. Where a processor
    has no more than one, it has 8 warps, unless K is short.
    """
    four = 3 * PROCESSORS < tiles <= 4 * PROCESSORS
    registers = 128 if four else 168
    if block_columns:
        group = 64 if block_columns % 64 == 0 else 32
        chain = 2 if block_columns % (2 * group) == 0 else 1
        depth = FP8_DEPTH - 128 * four
        return Plan(4, registers, group, groups=1, held=depth // group, chain=chain)
    if tiles <= PROCESSORS and inner > 2048:
        return Plan(8, registers, group=32, groups=4, held=4)
    return Plan(4, registers, group=32, groups=4, held=DEPTH // 128)


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x, w, scales, y, num_rows, x_row, y_row, width, addresses, sequence,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, CHAIN: tl.constexpr,
    STEPS: tl.constexpr, HELD: tl.constexpr, FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    GATED: tl.constexpr, FACTOR: tl.constexpr, PLACES: tl.constexpr, WORDS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: 8 pairs of columns, which are neighbours or, with GATED, gate and up of one
    column of the result."""
    let_next_start(PDL)
    first, second = _pairs(w, width, K, GATED)
    held = ()
    for step in tl.static_range(HELD):
        held = held + (  # noqa: RUF005 (Triton)
            _step(
                first, second, scales, step, width,
                K, G, GROUP, CHAIN, FP8, BLOCK_ROWS, BLOCK_COLUMNS, GATED,
            ),
        )  # fmt: skip
    wait_for_previous(PDL)
    total = tl.zeros((G, 16, 8), tl.float32)
    for step in tl.static_range(STEPS):
        one, two, scale = held[0]
        held = held[1:]
        pair = tl.permute(tl.join(one, two), (3, 0, 1, 2))
        left = _operand(tl.reshape(pair, (16, G, GROUP)), 16, G, GROUP, FP8)
        right = _operand(_rows(x, num_rows, x_row, step, K, G, GROUP, CHAIN), 8, G, GROUP, FP8)
        right = tl.permute(right.to(FACTOR), (0, 2, 1))
        if FP8:
            # By way of float16 and float32: the one instruction from float16 is four times slower.
            left = left.to(tl.float16).to(tl.float32).to(FACTOR)
            if step % CHAIN == 0:
                part, factor = tl.dot(left, right), scale
            else:
                part = tl.dot(left, right, part)
            if step % CHAIN == CHAIN - 1:
                total += part * factor
        else:
            total = tl.dot(left.to(FACTOR), right, total)
        if step + HELD < STEPS:
            held = held + (  # noqa: RUF005
                _step(
                    first, second, scales, step + HELD, width,
                    K, G, GROUP, CHAIN, FP8, BLOCK_ROWS, BLOCK_COLUMNS, GATED,
                ),
            )  # fmt: skip
    pair = tl.sum(total, 0).to(y.dtype.element_ty)
    pair = tl.permute(tl.reshape(pair, (2, 8, 8)), (1, 2, 0))
    if SIZE > 1:
        _send_pairs(pair, addresses, sequence, num_rows, width, PLACES, WORDS, RANK, SIZE)
    _write(pair, y, num_rows, y_row, width, GATED)


@triton.jit
def _pairs(w, width, K: tl.constexpr, GATED: tl.constexpr):
    """Where the weight of each of a program's pairs of columns begins, twice [8]."""
    c = tl.arange(0, 8)
    if GATED:
        first = tl.minimum(tl.program_id(0) * 8 + c, width - 1)
        second = first + width
    else:
        first = tl.minimum(tl.program_id(0) * 16 + 2 * c, width - 1)
        second = tl.minimum(first + 1, width - 1)
    return w + first.to(tl.int64) * K, w + second.to(tl.int64) * K


@triton.jit
def _inner(step, G: tl.constexpr, GROUP: tl.constexpr, CHAIN: tl.constexpr):
    """The indices along K of a step's operands [1, G, GROUP]."""
    group = (step // CHAIN * G + tl.arange(0, G)) * CHAIN + step % CHAIN
    return group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def _step(
    first, second, scales, step, width,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, CHAIN: tl.constexpr, FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A step's piece of the weight, as _columns, and of FP8 the scale of the groups whose first
    step this is."""
    one, two = _columns(first, second, step, K, G, GROUP, CHAIN)
    scale = 1.0
    if FP8 and step % CHAIN == 0:
        scale = _scales(
            scales, step // CHAIN, width, K, G, GROUP * CHAIN, BLOCK_ROWS, BLOCK_COLUMNS, GATED
        )
    return one, two, scale


@triton.jit
def _columns(
    first, second, step,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A step's piece of the weight of each pair of columns, twice [8, G, GROUP]. It is read once,
    so it need not push the rows of x out of the L1 cache."""
    k = _inner(step, G, GROUP, CHAIN)
    one, two = first[:, None, None] + k, second[:, None, None] + k
    if K % (G * GROUP * CHAIN) == 0:
        left = tl.load(one, eviction_policy="evict_first")
        return left, tl.load(two, eviction_policy="evict_first")
    inside = k < K
    left = tl.load(one, mask=inside, other=0.0, eviction_policy="evict_first")
    return left, tl.load(two, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _rows(
    x, num_rows, x_row, step,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A step's piece of the rows of x [8, G, GROUP]."""
    k, n = _inner(step, G, GROUP, CHAIN), tl.arange(0, 8)
    alive = (n < num_rows)[:, None, None]
    if K % (G * GROUP * CHAIN) != 0:
        alive = alive & (k < K)
    return tl.load(x + n[:, None, None] * x_row + k, mask=alive, other=0.0)


@triton.jit
def _operand(t, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr):
    """[N, G, GROUP] as loaded, 8 or 16 neighbours a lane -> [G, N, GROUP] as the lanes multiply
    them.

    Triton gives a lane 4 neighbours of two m16n8k16 or, of what was FP8, 8 neighbours of two. Which
    k they stand for does not matter to the sum, as long as weight and rows agree, so no value
    changes lanes.
    """
    WIDTH: tl.constexpr = 8 if FP8 else 4
    t = tl.reshape(tl.permute(t, (1, 0, 2)), (G, N, 4, GROUP // (4 * WIDTH), WIDTH))
    return tl.reshape(tl.permute(t, (0, 1, 3, 2, 4)), (G, N, GROUP))


@triton.jit
def _scales(
    scales, step, width, K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The scales of a step's groups of columns of K, [G, 1, 1] or with GATED [G, 16, 1].

    Blocks have a multiple of 16 rows, so those of a program lie in one of them, or gate and up in
    one each.
    """
    ACROSS: tl.constexpr = K // BLOCK_COLUMNS
    block = (step * G + tl.arange(0, G)) * GROUP // BLOCK_COLUMNS
    row = tl.program_id(0) * (8 if GATED else 16)
    at, inside = scales + row // BLOCK_ROWS * ACROSS + block, block < ACROSS
    scale = tl.load(at, mask=inside, other=0.0)[:, None, None]
    if GATED:
        at = scales + (row + width) // BLOCK_ROWS * ACROSS + block
        other = tl.load(at, mask=inside, other=0.0)[:, None, None]
        scale = tl.where(tl.arange(0, 16)[None, :, None] < 8, scale, other)
    return scale


@triton.jit
def _send_pairs(
    pair, addresses, sequence, num_rows, width,
    PLACES: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Send what _write stores, one word for each pair of columns of a row."""
    n, c = tl.arange(0, 8)[None, :], tl.program_id(0) * 8 + tl.arange(0, 8)[:, None]
    mask = (n < num_rows) & (2 * c < width)
    one, two = tl.split(pair.to(tl.float32))
    number = tl.load(sequence + n, mask=n < num_rows, other=0) + 1
    words = word_of(one, two)
    send_words(words, c, mask, number, addresses, n, PLACES, WORDS, RANK, SIZE)


@triton.jit
def _write(pair, y, num_rows, y_row, width, GATED: tl.constexpr):
    """Store pairs of columns [8, 8 rows, 2], rounded. With GATED, swiglu of them, rounded where
    swiglu rounds."""
    dtype = y.dtype.element_ty
    c, n = tl.arange(0, 8), tl.arange(0, 8)
    if GATED:
        gate, up = tl.split(pair.to(tl.float32))
        factor = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        o = (tl.program_id(0) * 8 + c)[:, None]
        mask = (o < width) & (n < num_rows)[None, :]
        tl.store(y + n[None, :] * y_row + o, (up * factor).to(dtype), mask=mask)
    else:
        both = tl.arange(0, 2)[None, None, :]
        o = tl.program_id(0) * 16 + 2 * c[:, None, None] + both
        mask = (o < width) & (n < num_rows)[None, :, None]
        tl.store(y + n[None, :, None] * y_row + o, pair, mask=mask)
