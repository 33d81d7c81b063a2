"""Matrix-vector products, of at most 8 vectors, that load the weight before the vectors are there.

    load the weight of 16 columns -> wait for the kernel before -> load x, multiply, sum -> y

A weight read from the L2 cache comes hardly faster than from memory, so prefetching it there saves
little. Here each program has the weight of its columns in registers when the rows of x come: a warp
holds 16 columns and 512 of K, in 128 registers a thread. The warps of a program share K, so no sum
goes through memory. A thread loads 16 bytes at a time, in an order that makes them its operands of
the instruction m16n8k16 (_operand). Letters: N rows | K inner width | O, i columns of a result
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.group import OneShotBuffers
from outrider.parallel.kernels.launch import let_next_start, overlapped, prefetch, wait_for_previous
from outrider.parallel.kernels.one_shot import send_words, word_of

MAX_ROWS = 8
MAX_WARPS = 16
DEPTH = 512
"""How much of K a warp holds, loaded in HELD steps. What MAX_WARPS warps cannot hold of K is read
after the wait."""
HELD = 4


def fits(x: Tensor, num_rows: int) -> bool:
    """Whether gemv takes rows like x [.., K]: few, bfloat16, and a multiple of 16 bytes long."""
    return num_rows <= MAX_ROWS and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def gemv(
    x: Tensor, w: Tensor, y: Tensor, *, gated: bool, buffers: OneShotBuffers | None = None
) -> None:
    """x [N, K] @ w [O, K]^T -> y [N, O], summed in float32; gated: as few_rows_swiglu, y [N, i].

    All are bfloat16; x's last dim has stride 1, w and y are contiguous. A row's result depends on
    no other row. With buffers, y is this rank's part of a sum and is also sent to the other ranks;
    then O is even, and the next call that uses the buffers is the one_shot.sum_add_rms_norm of y,
    with sent=True.
    """
    num_rows, inner = x.shape
    width = w.shape[0] // 2 if gated else w.shape[0]
    warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(inner, DEPTH)))
    step = DEPTH // HELD * warps
    _gemv_kernel[(triton.cdiv(width, 8 if gated else 16),)](
        x, w, y, num_rows, x.stride(0), width,
        *((buffers.addresses, buffers.sequence) if buffers else (y, y)),
        K=inner, G=step // 32, STEPS=triton.cdiv(inner, step), HELD=HELD,
        GATED=gated, FACTOR=tl.bfloat16 if x.is_cuda else tl.float32,
        PLACES=buffers.rows if buffers else 0, WORDS=buffers.words if buffers else 0,
        RANK=buffers.rank if buffers else 0, SIZE=buffers.size if buffers else 1,
        num_warps=warps, **_registers(x, warps), **overlapped(x),
    )  # fmt: skip


def _registers(x: Tensor, warps: int) -> dict[str, Any]:
    """Registers a thread, so that three programs of 4 warps, or one of 16, fit on a processor."""
    return {"maxnreg": 128 if warps == MAX_WARPS else 168} if x.is_cuda else {}


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x, w, y, num_rows, x_row, width, addresses, sequence,
    K: tl.constexpr, G: tl.constexpr, STEPS: tl.constexpr, HELD: tl.constexpr,
    GATED: tl.constexpr, FACTOR: tl.constexpr, PLACES: tl.constexpr, WORDS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: 8 pairs of columns, which are neighbours or, with GATED, gate and up of one
    column of the result."""
    let_next_start(PDL)
    first, second = _pairs(w, width, K, GATED)
    held = ()
    for step in tl.static_range(STEPS):
        if step < HELD:
            held = held + (_columns(first, second, step, K, G),)  # noqa: RUF005 (Triton)
    if STEPS > HELD:
        ahead: tl.constexpr = HELD * G * 32
        prefetch(first + ahead, (K - ahead) * 2, PDL)
        prefetch(second + ahead, (K - ahead) * 2, PDL)
    wait_for_previous(PDL)
    total = tl.zeros((G, 16, 8), tl.float32)
    for step in tl.static_range(STEPS):
        if step < HELD:
            one, two = held[step]
        else:
            one, two = _columns(first, second, step, K, G)
        pair = tl.permute(tl.join(one, two), (3, 0, 1, 2))
        left = _operand(tl.reshape(pair, (16, G, 32)), 16, G).to(FACTOR)
        right = _operand(_rows(x, num_rows, x_row, step, K, G), 8, G).to(FACTOR)
        total = tl.dot(left, tl.permute(right, (0, 2, 1)), total)
    pair = tl.sum(total, 0).to(y.dtype.element_ty)
    pair = tl.permute(tl.reshape(pair, (2, 8, 8)), (1, 2, 0))
    if SIZE > 1:
        _send_pairs(pair, addresses, sequence, num_rows, width, PLACES, WORDS, RANK, SIZE)
    _write(pair, y, num_rows, width, GATED)


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
def _inner(step, G: tl.constexpr):
    """The indices along K of a step's operands [1, G, 32], in G groups of 32."""
    group = step * G + tl.arange(0, G)
    return group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def _columns(first, second, step, K: tl.constexpr, G: tl.constexpr):
    """A step's piece of the weight of each pair of columns, twice [8, G, 32]."""
    k = _inner(step, G)
    if K % (G * 32) == 0:
        return tl.load(first[:, None, None] + k), tl.load(second[:, None, None] + k)
    inside = k < K
    one = tl.load(first[:, None, None] + k, mask=inside, other=0.0)
    return one, tl.load(second[:, None, None] + k, mask=inside, other=0.0)


@triton.jit
def _rows(x, num_rows, x_row, step, K: tl.constexpr, G: tl.constexpr):
    """A step's piece of the rows of x [8, G, 32]."""
    k, n = _inner(step, G), tl.arange(0, 8)
    alive = (n < num_rows)[:, None, None]
    if K % (G * 32) != 0:
        alive = alive & (k < K)
    return tl.load(x + n[:, None, None] * x_row + k, mask=alive, other=0.0)


@triton.jit
def _operand(t, N: tl.constexpr, G: tl.constexpr):
    """[N, G, 32] as loaded, 8 neighbours of 32 a lane -> [G, N, 32] as the lanes multiply them.

    A lane's operands of two m16n8k16 are 4 of the first 16 and 4 of the second. Which k they stand
    for does not matter to the sum, as long as weight and rows agree, so no value changes lanes.
    """
    t = tl.reshape(tl.permute(t, (1, 0, 2)), (G, N, 4, 2, 4))
    return tl.reshape(tl.permute(t, (0, 1, 3, 2, 4)), (G, N, 32))


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
def _write(pair, y, num_rows, width, GATED: tl.constexpr):
    """Store pairs of columns [8, 8 rows, 2], rounded. With GATED, swiglu of them, rounded where
    swiglu rounds."""
    dtype = y.dtype.element_ty
    c, n = tl.arange(0, 8), tl.arange(0, 8)
    if GATED:
        gate, up = tl.split(pair.to(tl.float32))
        factor = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        o = (tl.program_id(0) * 8 + c)[:, None]
        mask = (o < width) & (n < num_rows)[None, :]
        tl.store(y + n[None, :] * width + o, (up * factor).to(dtype), mask=mask)
    else:
        both = tl.arange(0, 2)[None, None, :]
        o = tl.program_id(0) * 16 + 2 * c[:, None, None] + both
        mask = (o < width) & (n < num_rows)[None, :, None]
        tl.store(y + n[None, :, None] * width + o, pair, mask=mask)
