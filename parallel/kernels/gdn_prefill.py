"""Gated delta net of prompt rows: what comes before the chunked delta rule, which is a library's.

    proj -> chunk_inputs (conv, SiLU, norms, gates) -> q, k, v, g, beta
    proj -> keep_window -> the slots' conv windows hold the W-1 rows before the next chunk

Both equal parts of Ops.gdn_prefill. Rows past a slot's count get g = beta = 0, which leaves the
state as it is.
Shapes: B slots | R rows | k, h key and value heads | C = 2k Dk + h Dv | W conv kernel
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.gdn_verify import softplus
from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.operands import GdnLayer

TILE = 32
"""Rows that one program of chunk_inputs takes."""
KEEP_PIECE = 512
"""Channels that one program of keep_window takes."""


def chunk_inputs(
    proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """proj [B, R, C + h Dv + 2h] = [q k v | z | b | a]; slots, counts [B] int64.

    -> q, k [B, R, k, Dk], each vector at length 1, and v [B, R, h, Dv] in proj's dtype; g, beta
    [B, R, h] float32. Reads the conv window of the slots and leaves it as it is.
    """
    batch, rows = proj.shape[:2]
    heads, dk, dv = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    assert proj.stride(-1) == layer.conv.stride(-1) == 1
    q = proj.new_empty(batch, rows, layer.num_k_heads, dk)
    k = torch.empty_like(q)
    v = proj.new_empty(batch, rows, heads, dv)
    g = proj.new_empty(batch, rows, heads, dtype=torch.float32)
    beta = torch.empty_like(g)
    grid = (triton.cdiv(rows, TILE), 2 * layer.num_k_heads + heads, batch)
    _chunk_inputs_kernel[grid](
        proj, layer.conv, layer.conv_weight, layer.rate, layer.dt_bias, slots, counts,
        q, k, v, g, beta, *proj.stride()[:2], *layer.conv.stride()[:2], rows,
        TAPS=layer.conv_weight.shape[0], K_HEADS=layer.num_k_heads, HEADS=heads, DK=dk, DV=dv,
        ROWS=TILE, num_warps=4, **overlapped(proj),
    )  # fmt: skip
    return q, k, v, g, beta


def keep_window(proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> None:
    """Store the W-1 rows that end with each slot's last real row in the slot's conv window."""
    channels, taps = layer.widths[0], layer.conv_weight.shape[0]
    _keep_kernel[(triton.cdiv(channels, KEEP_PIECE), proj.shape[0])](
        proj, layer.conv, slots, counts, *proj.stride()[:2], *layer.conv.stride()[:2], channels,
        BEFORE=taps - 1, ROWS=triton.next_power_of_2(taps - 1), PIECE=KEEP_PIECE,
        num_warps=4, **overlapped(proj),
    )  # fmt: skip


@triton.jit
def _chunk_inputs_kernel(
    proj, cache, weight, rate, dt_bias, slots, counts, q, k, v, g, beta,
    proj_b, proj_r, cache_s, cache_x, num_rows,
    TAPS: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows of one head's q, k or v, in one slot."""
    QK: tl.constexpr = 2 * K_HEADS * DK
    CHANNELS: tl.constexpr = QK + HEADS * DV
    part, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    after_previous(PDL)
    row = b * num_rows + t
    alive = t < num_rows
    proj += b * proj_b
    cache += tl.load(slots + b) * cache_s
    if part < 2 * K_HEADS:
        y = _conv_tile(
            proj, cache, weight, part * DK, t, alive, proj_r, cache_x, TAPS, CHANNELS, DK
        )
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        i = tl.arange(0, triton.next_power_of_2(DK))
        head = part % K_HEADS
        to = (q if part < K_HEADS else k) + (row * K_HEADS + head)[:, None] * DK + i[None, :]
        tl.store(to, y.to(q.dtype.element_ty), mask=alive[:, None] & (i < DK)[None, :])
    else:
        head = part - 2 * K_HEADS
        real = t < tl.load(counts + b)
        gates = proj + t * proj_r + CHANNELS + HEADS * DV + head  # [b | a]
        b_row = tl.load(gates, mask=alive, other=0.0).to(tl.float32)
        a_row = tl.load(gates + HEADS, mask=alive, other=0.0).to(tl.float32)
        a_row += tl.load(dt_bias + head).to(tl.float32)
        decay = softplus(a_row) * tl.load(rate + head).to(tl.float32)
        value = _conv_tile(
            proj, cache, weight, QK + head * DV, t, alive, proj_r, cache_x, TAPS, CHANNELS, DV
        )
        j = tl.arange(0, triton.next_power_of_2(DV))
        v_at = v + (row * HEADS + head)[:, None] * DV + j[None, :]
        tl.store(v_at, value.to(v.dtype.element_ty), mask=alive[:, None] & (j < DV)[None, :])
        tl.store(g + row * HEADS + head, tl.where(real, decay, 0.0), mask=alive)
        tl.store(beta + row * HEADS + head, tl.where(real, tl.sigmoid(b_row), 0.0), mask=alive)


@triton.jit
def _conv_tile(
    proj, cache, weight, channel, t, alive, proj_r, cache_x,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Conv and SiLU of rows t, for WIDTH channels from `channel` on: float32, rounded to the
    projection's dtype."""
    c = channel + tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = c < channel + WIDTH
    y = tl.zeros((t.shape[0], c.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = (t + tap - (TAPS - 1))[:, None]  # a row of this chunk or, below 0, of the window
        here = alive[:, None] & inside
        u = tl.load(proj + at * proj_r + c, mask=here & (at >= 0), other=0.0)
        before = tl.load(cache + (at + TAPS - 1) * cache_x + c, mask=here & (at < 0), other=0.0)
        w = tl.load(weight + tap * CHANNELS + c, mask=inside, other=0.0)
        y += tl.where(at < 0, before, u).to(tl.float32) * w.to(tl.float32)
    return (y * tl.sigmoid(y)).to(u.dtype).to(tl.float32)


@triton.jit
def _keep_kernel(
    proj, cache, slots, counts, proj_b, proj_r, cache_s, cache_x, channels,
    BEFORE: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some channels of one slot's window, all read before any is written."""
    b = tl.program_id(1).to(tl.int64)
    after_previous(PDL)
    c = tl.program_id(0) * PIECE + tl.arange(0, PIECE)[None, :]
    i = tl.arange(0, ROWS)[:, None]
    at = tl.load(counts + b) + i - BEFORE  # a row of this chunk or, below 0, of the window
    here = (i < BEFORE) & (c < channels)
    cache += tl.load(slots + b) * cache_s
    u = tl.load(proj + b * proj_b + at * proj_r + c, mask=here & (at >= 0), other=0.0)
    before = tl.load(cache + (at + BEFORE) * cache_x + c, mask=here & (at < 0), other=0.0)
    tl.debug_barrier()
    tl.store(cache + i * cache_x + c, tl.where(at < 0, before, u), mask=here)
