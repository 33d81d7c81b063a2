"""Gated DeltaNet of prompt rows around the chunked delta rule: inputs before it, norm after it.

    proj -> prompt_inputs (conv, SiLU, norms, gates) -> q, k, v, g, beta -> (the rule, elsewhere)
    out, z -> gated_rms_norm -> y        proj -> keep_window: the W-1 rows before the next chunk

They equal Ops.gdn_prefill's parts. Rows past a slot's count get g = beta = 0, which leaves the
state as it is.
Shapes: B slots | T rows | k, h key and value heads | C = 2k Dk + h Dv | W conv kernel
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.gdn import _softplus
from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.operands import GdnLayer

TILE = 32
"""Rows of one program."""
NORM_LINES = 32
"""Heads of rows that one program of the gated norm takes."""
KEEP_PIECE = 512
"""Channels of one program that keeps the window."""


def prompt_inputs(
    proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """proj [B, T, C + h Dv + 2h] = [q k v | z | b | a]; slots, counts [B] int64.

    -> q, k [B, T, k, Dk] at length 1 and v [B, T, h, Dv] in proj's dtype, g, beta [B, T, h]
    float32. Reads the conv window of the slots and leaves it as it is.
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
    _prompt_kernel[grid](
        proj, layer.conv, layer.conv_weight, layer.rate, layer.dt_bias, slots, counts,
        q, k, v, g, beta, *proj.stride()[:2], *layer.conv.stride()[:2], rows,
        TAPS=layer.conv_weight.shape[0], K_HEADS=layer.num_k_heads, HEADS=heads, DK=dk, DV=dv,
        ROWS=TILE, num_warps=4, **overlapped(proj),
    )  # fmt: skip
    return q, k, v, g, beta


def keep_window(proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> None:
    """Leave in the slots' conv windows the W-1 rows that end with their last real row."""
    channels, taps = layer.widths[0], layer.conv_weight.shape[0]
    _keep_kernel[(triton.cdiv(channels, KEEP_PIECE), proj.shape[0])](
        proj, layer.conv, slots, counts, *proj.stride()[:2], *layer.conv.stride()[:2], channels,
        BEFORE=taps - 1, ROWS=triton.next_power_of_2(taps - 1), PIECE=KEEP_PIECE,
        num_warps=4, **overlapped(proj),
    )  # fmt: skip


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
    """As Ops.gated_rms_norm: x [B, T, h, d] contiguous, z the same shape, a view of wider rows."""
    _, rows, heads, d = x.shape
    y = torch.empty(x.shape, dtype=z.dtype, device=x.device)
    assert x.is_contiguous()
    assert z.stride()[2:] == (d, 1)
    lines = x.shape[0] * rows * heads
    if lines:
        _gated_norm_kernel[(triton.cdiv(lines, NORM_LINES),)](
            x, z, weight, y, lines, rows, *z.stride()[:2], eps,
            HEADS=heads, D=d, BLOCK=triton.next_power_of_2(d), LINES=NORM_LINES,
            SILU=gate == "silu", num_warps=4, **overlapped(x),
        )  # fmt: skip
    return y


@triton.jit
def _prompt_kernel(
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
        decay = _softplus(a_row) * tl.load(rate + head).to(tl.float32)
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
    """Conv and SiLU of rows t, WIDTH channels from `channel`; rounded as stored, float32."""
    c = channel + tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = c < channel + WIDTH
    y = tl.zeros((t.shape[0], c.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = (t + tap - (TAPS - 1))[:, None]  # row of this chunk; below 0: of the history
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
    at = tl.load(counts + b) + i - BEFORE  # row of this chunk; below 0: of the history
    here = (i < BEFORE) & (c < channels)
    cache += tl.load(slots + b) * cache_s
    u = tl.load(proj + b * proj_b + at * proj_r + c, mask=here & (at >= 0), other=0.0)
    before = tl.load(cache + (at + BEFORE) * cache_x + c, mask=here & (at < 0), other=0.0)
    tl.debug_barrier()
    tl.store(cache + i * cache_x + c, tl.where(at < 0, before, u), mask=here)


@triton.jit
def _gated_norm_kernel(
    x, z, weight, y, lines, rows, z_b, z_r, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program LINES heads of rows."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + at, mask=at < D, other=0.0)
    after_previous(PDL)
    token, head = line // HEADS, line % HEADS
    inside = (line < lines) & (at < D)
    z_at = z + (token // rows).to(tl.int64) * z_b + token % rows * z_r + head * D + at
    line = line.to(tl.int64)
    gate = tl.load(z_at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + line * D + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None] * scale
    act = tl.sigmoid(gate)
    if SILU:
        act *= gate
    tl.store(y + line * D + at, (value * act).to(y.dtype.element_ty), mask=inside)
