"""Which experts the rows of a mixture have, and which rows an expert has.

    x [N, H] -> scores [N, E] -> ids and weights [N, top_k] -> members of each expert -> blocks

One launch. Programs score a few experts for a group of rows; the last of a group to end picks its
rows' experts and enters them as members, and the last of all divides the members into blocks. The
products (kernels/experts.py) take a block a time. How many blocks there are stays on the device:
`most_blocks` bounds it. Letters: N rows | H hidden | E experts, e of them on this rank
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

from outrider.parallel.kernels.argmax import LOWEST, bits_and_index, key_of
from outrider.parallel.kernels.launch import let_next_start, overlapped, wait_for_previous
from outrider.parallel.operands import ExpertLayer

WARPS = 8
"""Where few rows are scored, each of them multiplies its own 32 of the elements of a step."""
HELD = 8
"""The most steps of the router that a program loads before the rows are there."""
DEPTH = 256
"""Bytes of a row that a program reads in one step where many are scored."""
WIDE_ROUTER = 256
"""With more experts than this, the scores of 32 rows do not fit into the registers of a program."""


class Routing(NamedTuple):
    """What the products read. A pair is a row and one of its experts: row * top_k + place."""

    ids: Tensor
    """[N, top_k] int32: a row's experts, best first; of equal scores the smaller id goes first."""
    weights: Tensor
    """[N, top_k] float32"""
    gate: Tensor
    """[N] float32: the sigmoid that the shared expert's result is multiplied by."""
    members: Tensor
    """[e, N] int32: the pairs of each of this rank's experts, as many as it has, in any order."""
    blocks: Tensor
    """[1 + 3 * most_blocks] int32: the number of blocks; then for each the expert, counted on this
    rank, the first of its members that are in the block, and their number."""


class Tiling(NamedTuple):
    """How the scores are divided into programs."""

    rows: int
    experts: int
    held: bool
    """Whether a program loads its part of the router before it waits for the rows."""


def most_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """No more blocks of block_rows pairs come of so many pairs over so many experts."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block_rows


def tiling(num_rows: int, num_experts: int) -> Tiling:
    if num_rows <= 8:
        return Tiling(8, 16, held=True)
    if num_rows <= 64:
        return Tiling(16, 16, held=True)
    return Tiling(32 if num_experts <= WIDE_ROUTER else 16, 64, held=False)


def route(x: Tensor, layer: ExpertLayer, block_rows: int, arrivals: Tensor) -> Routing:
    """x [N, H], N > 0, its last dim with stride 1. The scores are float32, as experts.route says.

    block_rows: the most pairs of a block. arrivals: counters, int32, at least E + N / 8 + 2, zero
    before and after; one launch at a time may use them.
    """
    num_rows, hidden = x.shape
    experts, local = layer.router.shape[0], layer.gate_up.shape[0]
    assert x.stride(1) == 1
    assert layer.router.is_contiguous()
    assert layer.shared_gate.is_contiguous()
    tile = tiling(num_rows, experts)
    groups = triton.cdiv(num_rows, tile.rows)
    assert arrivals.numel() >= experts + groups + 1

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    made_weights = made(num_rows, layer.top_k, dtype=torch.float32)
    listed = 1 + 3 * most_blocks(num_rows * layer.top_k, local, block_rows)
    routing = Routing(
        ids=made(num_rows, layer.top_k), weights=made_weights,
        gate=made(num_rows, dtype=torch.float32),
        members=made(local, num_rows), blocks=made(listed),
    )  # fmt: skip
    _route_kernel[(triton.cdiv(experts + 1, tile.experts), groups)](
        x, layer.router, layer.shared_gate, made(num_rows, experts, dtype=torch.float32),
        *routing, arrivals, num_rows, x.stride(0), layer.first_expert,
        H=hidden, E=experts, LOCAL=local, TOP_K=layer.top_k,
        PLACES=triton.next_power_of_2(layer.top_k),
        EXPERTS=max(triton.next_power_of_2(experts), 32 * WARPS),
        NORMALISED=layer.normalised, BLOCK=block_rows, ONE=groups == 1,
        ROWS=tile.rows, TILE=tile.experts, DEPTH=DEPTH // x.element_size(), G=WARPS,
        HELD=HELD if tile.held else 0,
        FACTOR=tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32,
        num_warps=WARPS, **overlapped(x),
    )  # fmt: skip
    return routing


@triton.jit(do_not_specialize=["num_rows", "first_expert"])
def _route_kernel(
    x, router, shared_gate, scores, ids, weights, gate, members, blocks, arrivals,
    num_rows, x_row, first_expert,
    H: tl.constexpr, E: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, EXPERTS: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr,
    ONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    G: tl.constexpr, HELD: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the scores of one tile of experts for one group of rows.

    arrivals: members of each expert so far [E]; for each group, its programs that have ended; the
    groups that have ended. ONE: there is one group.
    """
    let_next_start(PDL)
    tile, group = tl.program_id(0), tl.program_id(1)
    others, last = tl.num_programs(0) - 1, tl.num_programs(1) - 1
    n = group * ROWS + tl.arange(0, ROWS)
    c = tile * TILE + tl.arange(0, TILE)
    # The shared expert's gate is scored as one expert more.
    router_at = tl.where(c < E, router + c * H, shared_gate)
    if HELD:
        score = _held_score(
            router_at, x, c <= E, n, num_rows, x_row, H, ROWS, TILE, G, HELD, FACTOR, PDL
        )
    else:
        wait_for_previous(PDL)
        score = _score(router_at, x, c <= E, n, num_rows, x_row, H, ROWS, TILE, DEPTH, FACTOR)
    alive = (n < num_rows)[None, :]
    tl.store(scores + n[None, :] * E + c[:, None], score, mask=alive & (c < E)[:, None])
    gate_score = tl.sum(tl.where((c == E)[:, None], score, 0.0), 0)
    if tile == others:
        tl.store(gate + n, tl.sigmoid(gate_score), mask=n < num_rows)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + E + group, 1, sem="acq_rel") == others:
        tl.store(arrivals + E + group, 0)
        place = _choose(scores, ids, weights, n, num_rows, E, TOP_K, PLACES, EXPERTS, NORMALISED)
        local = tl.arange(0, EXPERTS) - first_expert
        held = (local >= 0) & (local < LOCAL)
        took = (held[None, :] & (place < TOP_K)).to(tl.int32)
        count = tl.sum(took, 0)
        index = tl.cumsum(took, 0) - took
        if not ONE:
            index += tl.atomic_add(arrivals + local, count, mask=count > 0)[None, :]
        pair = n[:, None] * TOP_K + place
        tl.store(members + local[None, :] * num_rows + index, pair, mask=took > 0)
        if ONE:
            _list_blocks(local, count, blocks, BLOCK)
        else:
            tl.debug_barrier()
            if tl.atomic_add(arrivals + E + last + 1, 1, sem="acq_rel") == last:
                tl.store(arrivals + E + last + 1, 0)
                # .cg: other processors added to it, so this one's L1 cache may be out of date
                count = tl.load(arrivals + local, mask=held, other=0, cache_modifier=".cg")
                tl.store(arrivals + local, 0, mask=held)
                _list_blocks(local, count, blocks, BLOCK)


@triton.jit
def _held_score(
    router_at, x, scored, n, num_rows, x_row,
    H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr,
    HELD: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As _score, for few rows: loads HELD steps of the router before it waits, and
    then all of the rows at once. Each of G warps multiplies its own part of H."""
    STEPS: tl.constexpr = triton.cdiv(H, 32 * G)
    row_at, alive = x + n * x_row, n < num_rows
    held, rows = (), ()
    for step in tl.static_range(STEPS):
        if step < HELD:
            held = held + (_piece(router_at, scored, step, H, TILE, G),)  # noqa: RUF005 (Triton)
    wait_for_previous(PDL)
    for step in tl.static_range(STEPS):
        if step >= HELD:
            held = held + (_piece(router_at, scored, step, H, TILE, G),)  # noqa: RUF005 (Triton)
        rows = rows + (_piece(row_at, alive, step, H, ROWS, G),)  # noqa: RUF005 (Triton)
    total = tl.zeros((G, TILE, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        right = tl.permute(rows[step].to(FACTOR), (0, 2, 1))
        total = tl.dot(held[step].to(FACTOR), right, total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit
def _score(
    router_at, x, scored, n, num_rows, x_row,
    H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """The scores [TILE, ROWS] float32 of rows n for the experts whose weights [H] begin at
    router_at [TILE], as far as they are `scored`."""
    total = tl.zeros((TILE, ROWS), tl.float32)
    for start in range(0, H, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < H
        left = router_at[:, None] + k[None, :]
        left = tl.load(left, mask=scored[:, None] & inside[None, :], other=0.0)
        right = x + n[None, :] * x_row + k[:, None]
        right = tl.load(right, mask=(n < num_rows)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left.to(FACTOR), right.to(FACTOR), total, input_precision="ieee")
    return total


@triton.jit
def _piece(at, alive, step, H: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """A step's piece of N vectors that begin at `at`, as the warps multiply it [G, N, 32].

    Of 32 elements a lane loads 8 neighbours. They become its operands of two matrix instructions,
    4 for each. Which k these stand for does not matter to the sum, since both factors agree, so no
    value changes lanes.
    """
    k = 32 * (step * G + tl.arange(0, G))[:, None] + tl.arange(0, 32)[None, :]
    mask = alive[:, None, None]
    if H % (32 * G) != 0:
        mask = mask & (k < H)[None, :, :]
    t = tl.load(at[:, None, None] + k[None, :, :], mask=mask, other=0.0)
    t = tl.reshape(tl.permute(t, (1, 0, 2)), (G, N, 4, 2, 4))
    return tl.reshape(tl.permute(t, (0, 1, 3, 2, 4)), (G, N, 32))


@triton.jit
def _choose(
    scores, ids, weights, n, num_rows,
    E: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, EXPERTS: tl.constexpr,
    NORMALISED: tl.constexpr,
):  # fmt: skip
    """Write the ids and weights of the rows' experts -> the place of each expert among those of
    each row [ROWS, EXPERTS], TOP_K if it is none of them."""
    c, p = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    alive = (n < num_rows)[:, None]
    inside = alive & (c < E)[None, :]
    at = scores + n[:, None] * E + c[None, :]
    score = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    keys = tl.where((c < E)[None, :], key_of(score, c[None, :]), LOWEST)
    place = tl.full((n.shape[0], EXPERTS), TOP_K, tl.int32)
    chosen = tl.zeros((n.shape[0], PLACES), tl.int64)
    for i in range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        place = tl.where((keys == best) & alive, i, place)
        keys = tl.where(keys == best, LOWEST, keys)
        chosen = tl.where((p == i)[None, :], best, chosen)
    bits, index = bits_and_index(chosen)
    value = bits.to(tl.float32, bitcast=True)
    top = tl.sum(tl.where((p == 0)[None, :], value, 0.0), 1)[:, None]
    whole = tl.sum(tl.where((c < E)[None, :], tl.exp(score - top), 0.0), 1)[:, None]
    weight = tl.where((p < TOP_K)[None, :], tl.exp(value - top) / whole, 0.0)
    if NORMALISED:
        weight /= tl.sum(weight, 1)[:, None]
    to, mask = n[:, None] * TOP_K + p[None, :], alive & (p < TOP_K)[None, :]
    tl.store(ids + to, index, mask=mask)
    tl.store(weights + to, weight, mask=mask)
    return place


@triton.jit
def _list_blocks(expert, count, blocks, BLOCK: tl.constexpr):
    """Write Routing.blocks. count [EXPERTS]: how many members each expert has, 0 for those that
    this rank does not hold."""
    number = (count + BLOCK - 1) // BLOCK
    first = tl.cumsum(number, 0) - number
    tl.store(blocks, tl.sum(number, 0))
    for j in range(tl.max(number, 0)):
        to, mask = blocks + 1 + 3 * (first + j), j < number
        tl.store(to, expert, mask=mask)
        tl.store(to + 1, tl.zeros_like(expert) + j * BLOCK, mask=mask)
        tl.store(to + 2, tl.minimum(count - j * BLOCK, BLOCK), mask=mask)
