"""Products of at most 8 rows whose weights wait in registers before the rows are there.

    load all of 16 columns -> after the kernel before: rows from L2, tensor cores -> one sum -> y

Reading a weight from L2 takes nearly as long as from memory, so prefetching it there saves little;
here a program has its columns' weight in registers when the rows come. A warp holds 16 columns of
512 of K, 128 registers a thread; warps lie along K, so no sum goes through memory. A thread loads
16 contiguous bytes that are its own operands of m16n8k16: their order is free (_operand).
Letters: N rows | K inner width | O, i columns of a result | G groups of 32 of K in a step
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

from outrider.parallel.group import Mail
from outrider.parallel.kernels.launch import let_next_start, overlapped, prefetch, wait_for_previous
from outrider.parallel.kernels.peer import _send, _word

MAX_ROWS = 8
MAX_WARPS = 16
DEPTH = 512
"""Of K that a warp holds, in HELD steps; what 16 warps cannot hold is read after the wait."""
HELD = 4


def fits(x: Tensor, num_rows: int) -> bool:
    """Whether resident takes such rows [.., K]: bfloat16, 16 bytes at a time."""
    return num_rows <= MAX_ROWS and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def resident(x: Tensor, w: Tensor, y: Tensor, *, gated: bool, mail: Mail | None = None) -> None:
    """x [N, K] @ w [O, K]^T -> y [N, O], summed in float32; gated: as few_rows_swiglu, y [N, i].

    All bfloat16; x's last dim has stride 1, w and y are contiguous. A row's result depends on no
    other row.
    With mail, y is this rank's part of a sum, and on its way to the others: the call of
    peer.sum_add_rms_norm that takes it comes next, with sent=True. O is even.
    """
    num_rows, inner = x.shape
    width = w.shape[0] // 2 if gated else w.shape[0]
    warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(inner, DEPTH)))
    step = DEPTH // HELD * warps
    _resident_kernel[(triton.cdiv(width, 8 if gated else 16),)](
        x, w, y, num_rows, x.stride(0), width, *((mail.peers, mail.turns) if mail else (y, y)),
        K=inner, G=step // 32, STEPS=triton.cdiv(inner, step), HELD=HELD,
        GATED=gated, FACTOR=tl.bfloat16 if x.is_cuda else tl.float32,
        MAIL_ROWS=mail.rows if mail else 0, WORDS=mail.words if mail else 0,
        RANK=mail.rank if mail else 0, SIZE=mail.size if mail else 1,
        num_warps=warps, **_registers(x, warps), **overlapped(x),
    )  # fmt: skip


def _registers(x: Tensor, warps: int) -> dict[str, Any]:
    """So many a thread that three programs of four warps share a processor, or one of 16 fits."""
    return {"maxnreg": 128 if warps == MAX_WARPS else 168} if x.is_cuda else {}


@triton.jit(do_not_specialize=["num_rows"])
def _resident_kernel(
    x, w, y, num_rows, x_row, width, peers, turns,
    K: tl.constexpr, G: tl.constexpr, STEPS: tl.constexpr, HELD: tl.constexpr,
    GATED: tl.constexpr, FACTOR: tl.constexpr, MAIL_ROWS: tl.constexpr, WORDS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: 16 columns of the weight, as pairs: neighbours, or gate and up of a column."""
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
        _send_pairs(pair, peers, turns, num_rows, width, MAIL_ROWS, WORDS, RANK, SIZE)
    _write(pair, y, num_rows, width, GATED)


@triton.jit
def _pairs(w, width, K: tl.constexpr, GATED: tl.constexpr):
    """Where the weights of a program's 8 pairs of columns begin, twice [8]."""
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
    """Which k a step's operands hold [1, G, 32]."""
    group = step * G + tl.arange(0, G)
    return group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def _columns(first, second, step, K: tl.constexpr, G: tl.constexpr):
    """A step's weights of each pair of columns, twice [8, G, 32]."""
    k = _inner(step, G)
    if K % (G * 32) == 0:
        return tl.load(first[:, None, None] + k), tl.load(second[:, None, None] + k)
    inside = k < K
    one = tl.load(first[:, None, None] + k, mask=inside, other=0.0)
    return one, tl.load(second[:, None, None] + k, mask=inside, other=0.0)


@triton.jit
def _rows(x, num_rows, x_row, step, K: tl.constexpr, G: tl.constexpr):
    """A step's piece of the rows [8, G, 32]."""
    k, n = _inner(step, G), tl.arange(0, 8)
    alive = (n < num_rows)[:, None, None]
    if K % (G * 32) != 0:
        alive = alive & (k < K)
    return tl.load(x + n[:, None, None] * x_row + k, mask=alive, other=0.0)


@triton.jit
def _operand(t, N: tl.constexpr, G: tl.constexpr):
    """[N, G, 32] as loaded, 8 contiguous of 32 a lane -> [G, N, 32] as the lanes multiply them.

    A lane's operands of two m16n8k16 are 4 of the first 16 and 4 of the second.
    """
    t = tl.reshape(tl.permute(t, (1, 0, 2)), (G, N, 4, 2, 4))
    return tl.reshape(tl.permute(t, (0, 1, 3, 2, 4)), (G, N, 32))


@triton.jit
def _send_pairs(
    pair, peers, turns, num_rows, width,
    MAIL_ROWS: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What _write writes, a pair a word."""
    n, c = tl.arange(0, 8)[None, :], tl.program_id(0) * 8 + tl.arange(0, 8)[:, None]
    mask = (n < num_rows) & (2 * c < width)
    one, two = tl.split(pair.to(tl.float32))
    turn = tl.load(turns + n, mask=n < num_rows, other=0) + 1
    _send(_word(one, two), c, mask, turn, peers, n, MAIL_ROWS, WORDS, RANK, SIZE)


@triton.jit
def _write(pair, y, num_rows, width, GATED: tl.constexpr):
    """[8, 8 rows, 2] pairs of columns, rounded; with GATED as rows.swiglu rounds."""
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
