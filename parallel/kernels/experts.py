"""A mixture of experts: the products of each expert with its rows, and what they add up to.

    x [N, H] -> route -> blocks of pairs -> gate_up, swiglu [pairs, i] -> down [pairs, H]
    -> weighted and summed in the order of places, with the shared expert -> [N, H]

A program takes one block, which is a few rows of one expert, and one tile of columns, so that few
rows read each expert once and the blocks of a prompt share it in the L2 cache. The grid is as large
as there may be blocks; programs without one return. A shared expert that is stored as the others
are runs in the same launches. Letters: as ExpertLayer (parallel/operands.py), and N rows
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.experts import Mlp
from outrider.parallel.formats import (
    INT4_ZERO,
    Fp8Matrix,
    Int4Matrix,
    Matrix,
    StackedMatrix,
    UniformMatrix,
    dequantised,
)
from outrider.parallel.kernels.expert_routing import Routing, most_blocks, route
from outrider.parallel.kernels.launch import (
    after_previous,
    let_next_start,
    overlapped,
    wait_for_previous,
)
from outrider.parallel.operands import ExpertLayer

LEAST_DEPTH = 16
"""The least inner width that the matrix instruction takes. Smaller blocks are made plain first."""
SUM_PIECE = 512
"""Elements of a row that one program of the sum takes."""


MAX_BLOCK = 128
"""The most rows of a block."""
ZERO = tl.constexpr(INT4_ZERO)


class Tiling(NamedTuple):
    """How a product is divided into programs."""

    columns: int
    """Rows of the weight of one program."""
    depth: int
    """Bytes of a row of x that a program reads in one step, at most."""
    warps: int
    stages: int


class Stored(NamedTuple):
    """A matrix [.., O, K] as the products read it."""

    values: Tensor
    """[.., O, K], or [.., O, K / 2] uint8: the codes of an Int4Matrix."""
    scales: Tensor
    """One for each block; of plain numbers, the values again."""
    block: tuple[int, int]
    """Rows and columns of a block; 0 where there are no scales."""

    @property
    def packed(self) -> int:
        """Columns of an element of `values`."""
        return 2 if self.values.dtype == torch.uint8 else 1


def block_rows(num_rows: int, top_k: int, num_experts: int) -> int:
    """The most rows of a block: twice as many as an expert has on average, so that few experts are
    read twice."""
    if num_rows <= 8:
        return 8
    mean = triton.cdiv(num_rows * top_k, num_experts)
    return min(MAX_BLOCK, max(16, triton.next_power_of_2(2 * mean)))


def tiling(rows: int) -> Tiling:
    """The tiling of products with blocks of so many rows."""
    if rows <= 32:
        return Tiling(64, 256, 4, 4)
    return Tiling(128, 128, 4 if rows <= 64 else 8, 4)


def experts(x: Tensor, layer: ExpertLayer, arrivals: Tensor, mlp: Mlp) -> Tensor:
    """As Ops.experts of rows x [N, H], whose last dim has stride 1. Never looks at the host.

    Results are rounded where the definition rounds them. arrivals: as in expert_routing.route; mlp
    makes the results of a shared expert that is stored in another way than the others.
    """
    num_rows, hidden = x.shape
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    rows = block_rows(num_rows, layer.top_k, layer.router.shape[0])
    gate_up, down = _stored(layer.gate_up, x.dtype), _stored(layer.down, x.dtype)
    alike = _alike(layer.gate_up, layer.shared_gate_up) and _alike(layer.down, layer.shared_down)
    shared_gate_up = _stored(layer.shared_gate_up, x.dtype) if alike else None
    shared_down = _stored(layer.shared_down, x.dtype) if alike else None
    routing = route(x, layer, rows, arrivals)
    pairs = num_rows * layer.top_k
    made = pairs + num_rows if alike else pairs
    width = down.values.shape[-1] * down.packed
    h = torch.empty(made, width, dtype=x.dtype, device=x.device)
    y = torch.empty(made, hidden, dtype=x.dtype, device=x.device)
    how = {"routing": routing, "num_rows": num_rows, "top_k": layer.top_k, "rows": rows}
    _launch_product(x, gate_up, shared_gate_up, h, gated=True, **how)
    _launch_product(h, down, shared_down, y, gated=False, **how)
    if alike:
        shared_y = y[pairs:]
    else:
        shared_y = mlp(x, layer.shared_gate_up, layer.shared_down).contiguous()
    _sum_kernel[(num_rows, triton.cdiv(hidden, SUM_PIECE))](
        y, shared_y, routing.gate, routing.ids, routing.weights, out, layer.first_expert, hidden,
        LOCAL=layer.gate_up.shape[0], TOP_K=layer.top_k, PIECE=SUM_PIECE,
        num_warps=2, **overlapped(x),
    )  # fmt: skip
    return out


def _stored(matrix: Matrix, dtype: torch.dtype) -> Stored:
    """Codes as they are, if their blocks are wide enough; anything else as plain numbers."""
    if isinstance(matrix, Fp8Matrix):
        stored = Stored(matrix.values, matrix.scales, matrix.block)
    elif isinstance(matrix, Int4Matrix):
        stored = Stored(
            matrix.codes, matrix.scales, (1, matrix.shape[-1] // matrix.scales.shape[-1])
        )
    else:
        plain = dequantised(matrix, dtype)
        stored = Stored(plain, plain, (0, 0))
    if stored.block[1] and _power_of_two_in(stored.block[1]) < LEAST_DEPTH:
        return _stored(dequantised(matrix, dtype), dtype)
    assert stored.values.is_contiguous()
    assert stored.scales.is_contiguous()
    return stored


def _alike(routed: UniformMatrix, shared: Matrix) -> bool:
    """Whether one launch takes both: they have one shape, in one format with the same blocks."""
    if routed.shape[1:] != shared.shape:
        return False
    if isinstance(routed, Tensor) or isinstance(shared, Tensor | StackedMatrix):
        return isinstance(routed, Tensor) and isinstance(shared, Tensor)
    return type(routed) is type(shared) and routed.scales.shape[1:] == shared.scales.shape


def _power_of_two_in(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def _launch_product(
    x: Tensor, w: Stored, shared: Stored | None, y: Tensor,
    *, gated: bool, routing: Routing, num_rows: int, top_k: int, rows: int,
) -> None:  # fmt: skip
    """y of each pair, then of each row's shared expert if there is one: x of the pair times w [e,
    O, K] of its expert. With `gated`, as in the first product, x are rows and y is swiglu of the
    result."""
    local, columns, inner = w.values.shape
    inner *= w.packed
    tile = tiling(rows)
    depth = min(tile.depth // x.element_size(), triton.next_power_of_2(inner))
    if w.block[1]:
        depth = min(depth, _power_of_two_in(w.block[1]))
    depth = max(depth, LEAST_DEPTH)
    stages = min(tile.stages, triton.cdiv(inner, depth) + 1)
    tiles = triton.cdiv(columns, tile.columns)
    blocks = most_blocks(num_rows * top_k, local, rows)
    if shared is not None:
        blocks += triton.cdiv(num_rows, rows)
    other = w if shared is None else shared
    _product_kernel[(tiles, blocks)](
        x, w.values, w.scales, other.values, other.scales, y,
        routing.members, routing.blocks, num_rows, x.stride(0), y.shape[1],
        TOP_K=top_k, O=columns, K=inner, PACKED=w.packed, BLOCK_O=w.block[0],
        BLOCK_K=w.block[1],
        ROWS=rows, COLUMNS=tile.columns, DEPTH=depth,
        GATED=gated, SHARED=shared is not None,
        FACTOR=tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32,
        num_warps=tile.warps, num_stages=stages, **overlapped(x),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x, w, scales, shared_w, shared_scales, y, members, blocks, num_rows, x_row, width,
    TOP_K: tl.constexpr, O: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GATED: tl.constexpr, SHARED: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one tile of columns for one block; the blocks of the shared expert come first.
    With GATED, the gate and the up column of each column of the result are neighbours in the tile.
    """
    let_next_start(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    n, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if GATED:
        o = tl.minimum(tile * (COLUMNS // 2) + c // 2, O // 2 - 1) + c % 2 * (O // 2)
    else:
        o = tl.minimum(tile * COLUMNS + c, O - 1)
    shared_blocks = tl.cdiv(num_rows, ROWS) if SHARED else 0
    wait_for_previous(PDL)
    # An entry that was not written is loaded too, so that no load waits for the number of them.
    entry = blocks + 1 + 3 * tl.maximum(block - shared_blocks, 0)
    expert, first, count = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    if block >= shared_blocks + tl.load(blocks):
        return
    if block < shared_blocks:
        row = block * ROWS + n
        alive = row < num_rows
        to = num_rows * TOP_K + row
        w_at, scale_at = shared_w, shared_scales
    else:
        alive = n < count
        to = tl.load(members + expert * num_rows + first + n, mask=alive, other=0)
        row = to // TOP_K
        w_at, scale_at = w + expert * (O * (K // PACKED)), scales
        if BLOCK_K:
            scale_at += expert * ((O // BLOCK_O) * (K // BLOCK_K))
    x_at = x + (row if GATED else to).to(tl.int64) * x_row
    total = _product(
        x_at,
        w_at,
        scale_at,
        o,
        alive,
        K,
        PACKED,
        BLOCK_O,
        BLOCK_K,
        ROWS,
        COLUMNS,
        DEPTH,
        FACTOR,
    )
    _write(total, y + to.to(tl.int64) * width, alive, tile, width, ROWS, COLUMNS, GATED)


@triton.jit
def _product(
    x_at, w_at, scale_at, o, alive,
    K: tl.constexpr, PACKED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Rows o of the weight times the rows that begin at x_at, in float32 [COLUMNS, ROWS]."""
    k = tl.arange(0, DEPTH)
    w_at += o[:, None] * (K // PACKED) + tl.arange(0, DEPTH // PACKED)[None, :]
    x_at = x_at[None, :] + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if BLOCK_K:
        NUMBER: tl.constexpr = K // BLOCK_K
        b = tl.arange(0, triton.next_power_of_2(NUMBER))
        held = scale_at + (o // BLOCK_O)[:, None] * NUMBER + b[None, :]
        held = tl.load(held, mask=(b < NUMBER)[None, :], other=0.0)
    for step in range(tl.cdiv(K, DEPTH)):
        if K % DEPTH == 0:
            left = tl.load(w_at)
            right = tl.load(x_at, mask=alive[None, :], other=0.0)
        else:
            inside = k < K - step * DEPTH
            left = tl.load(w_at, mask=inside[None, :], other=0.0)
            right = tl.load(x_at, mask=alive[None, :] & inside[:, None], other=0.0)
        if PACKED == 2:
            left = tl.reshape(tl.join(left & 15, left >> 4), (COLUMNS, DEPTH)).to(tl.int8) - ZERO
        elif BLOCK_K:  # as in gemv: one instruction from float16 to bfloat16 is four times slower
            left = left.to(tl.float16).to(tl.float32)
        left, right = left.to(FACTOR), right.to(FACTOR)
        if BLOCK_K:
            scale = tl.sum(tl.where((b == step * DEPTH // BLOCK_K)[None, :], held, 0.0), 1)
            total += tl.dot(left, right, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        w_at += DEPTH // PACKED
        x_at += DEPTH
    return total


@triton.jit
def _write(
    total, y_at, alive, tile, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a finished tile [COLUMNS, ROWS], rounded. With GATED, swiglu of it, rounded where
    swiglu rounds."""
    dtype = y_at.dtype.element_ty
    rounded = total.to(dtype)
    if GATED:
        pair = tl.reshape(rounded.to(tl.float32), (COLUMNS // 2, 2, ROWS))
        gate, up = tl.split(tl.permute(pair, (0, 2, 1)))
        factor = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        o = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        rounded = (up * factor).to(dtype)
    else:
        o = tile * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(y_at[None, :] + o[:, None], rounded, mask=alive[None, :] & (o < width)[:, None])


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    y, shared, gate, ids, weights, out, first_expert, width,
    LOCAL: tl.constexpr, TOP_K: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a piece of a row, from the results of those experts that this rank holds and of
    the shared one."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    held, weight, value = (), (), ()  # each loop's loads are under way together
    for place in tl.static_range(TOP_K):
        expert = tl.load(ids + row * TOP_K + place) - first_expert
        held = held + ((expert >= 0) & (expert < LOCAL),)  # noqa: RUF005 (Triton)
        weight = weight + (tl.load(weights + row * TOP_K + place),)  # noqa: RUF005
    for place in tl.static_range(TOP_K):
        y_at = y + (row * TOP_K + place) * width + at
        piece = tl.load(y_at, mask=held[place] & (at < width), other=0.0)
        value = value + (piece.to(tl.float32),)  # noqa: RUF005
    shared_value = tl.load(shared + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    shared_weight = tl.load(gate + row)
    total = tl.zeros((PIECE,), tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.where(held[place], weight[place], 0.0) * value[place]
    total += shared_weight * shared_value
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)
