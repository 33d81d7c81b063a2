"""A gated delta net between its two projections, for the rows of a verify pass; two launches.

    proj -> conv window, conv, norms, gates -> fold, delta rule, gated norm -> y

gdn_verify equals the operation of its name in parallel/ops.py, and updates the memory of the layer
in place. What the memory of a slot holds, NaN included, influences no other slot.
Shapes: B slots | R rows, X most | k, h key and value heads | C = 2k Dk + h Dv | W conv kernel
        S slots in memory | a row of factors is [k Dk | h Dv | h]: k, delta and g
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import (
    after_previous,
    let_next_start,
    overlapped,
    wait_for_previous,
)
from outrider.parallel.operands import GdnLayer

NARROW, WIDE = (8, 1), (16, 1)
"""Columns of a state, and warps, of one program. NARROW spreads few states over more processors."""
FEW_COLUMNS = 8448
"""NARROW is used up to this many columns of all slots and heads, 64 for each of 132 processors."""


def gdn_verify(
    proj: Tensor, layer: GdnLayer, slots: Tensor, fold: Tensor, max_fold: int, arrivals: Tensor
) -> Tensor:
    """As Ops.gdn_verify. The last dim of proj and of the layer's memory has stride 1.

    A slot's factor rows from fold[b] on have no influence. Slots are distinct, except padding,
    which nobody reads. arrivals: a counter, int32, for each slot and key head, zero before and
    after; one launch at a time may use them.
    """
    batch, num_rows = proj.shape[:2]
    k_heads, heads, dk, dv = (
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    )  # fmt: skip
    inputs = _conv_inputs(proj, layer, slots, fold)
    z = proj.split_with_sizes(layer.widths, -1)[1].unflatten(-1, (heads, dv))
    state, factors = layer.state, layer.factors
    assert state.stride()[2:] == (dv, 1)
    assert factors.stride(-1) == 1
    assert arrivals.numel() >= batch * k_heads
    y = z.new_empty(batch, num_rows, heads * dv)
    block, warps = NARROW if batch * heads * dv <= FEW_COLUMNS else WIDE
    _verify_kernel[(heads * triton.cdiv(dv, block), batch)](
        *inputs, z, state, factors, slots, fold, layer.norm_weight, arrivals, y,
        *z.stride()[:3], *state.stride()[:2], *factors.stride()[:2], layer.eps,
        num_rows, max_fold, k_heads, heads, dk, dv, block, layer.gate == "silu",
        num_warps=warps, **overlapped(z),
    )  # fmt: skip
    return y


def _conv_inputs(
    proj: Tensor, layer: GdnLayer, slots: Tensor, fold: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Conv, SiLU, norms and gates of R rows; the conv window of the slots advances in place.

    -> qk [B, R, 2, k, Dk] at length 1, v [B, R, h, Dv], g [B, R, h], beta [B, R, h], float32.
    The W-1 rows before row 0 are fold[b] .. fold[b]+W-2 of the slot's window, which afterwards
    starts with [those | the R new ones].
    """
    batch, num_rows = proj.shape[:2]
    k_heads, heads, dk, dv = (
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    )  # fmt: skip
    assert proj.stride(-1) == layer.conv.stride(-1) == 1
    assert layer.conv_weight.is_contiguous()
    qk = proj.new_empty(batch, num_rows, 2, k_heads, dk, dtype=torch.float32)
    v = proj.new_empty(batch, num_rows, heads, dv, dtype=torch.float32)
    g = proj.new_empty(batch, num_rows, heads, dtype=torch.float32)
    beta = torch.empty_like(g)
    _inputs_kernel[(2 * k_heads + heads, batch)](
        proj, layer.conv, layer.conv_weight, layer.rate, layer.dt_bias, slots, fold,
        qk, v, g, beta, *proj.stride()[:2], *layer.conv.stride()[:2],
        num_rows, layer.conv_weight.shape[0], k_heads, heads, dk, dv,
        num_warps=4, **overlapped(proj),
    )  # fmt: skip
    return qk, v, g, beta


@triton.jit
def _inputs_kernel(
    proj, cache, weight, rate, dt_bias, slots, fold, qk, v, g, beta, proj_b, proj_r, cache_s,
    cache_x,
    ROWS: tl.constexpr, TAPS: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the q, k or v of one head, for all rows of one slot."""
    after_previous(PDL)
    QK: tl.constexpr = 2 * K_HEADS * DK
    CHANNELS: tl.constexpr = QK + HEADS * DV
    part, b = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, triton.next_power_of_2(ROWS))
    row = b * ROWS + t
    proj += b * proj_b
    cache += tl.load(slots + b) * cache_s
    old = cache + tl.load(fold + b) * cache_x
    if part < 2 * K_HEADS:
        c = part * DK
        y = _conv(
            proj + c, old + c, cache + c, weight + c, proj_r, cache_x, ROWS, TAPS, CHANNELS, DK
        )
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        i = tl.arange(0, triton.next_power_of_2(DK))
        to = qk + (row * 2 * K_HEADS + part)[:, None] * DK + i[None, :]
        tl.store(to, y, mask=(t < ROWS)[:, None] & (i < DK)[None, :])
    else:  # no name of the other branch, whose tiles may have another width
        head = part - 2 * K_HEADS
        c = QK + head * DV
        gates = proj + t * proj_r + CHANNELS + HEADS * DV + head  # [b | a]
        b_row = tl.load(gates, mask=t < ROWS, other=0.0).to(tl.float32)
        a_row = tl.load(gates + HEADS, mask=t < ROWS, other=0.0).to(tl.float32)
        a_row += tl.load(dt_bias + head).to(tl.float32)
        scale = tl.load(rate + head).to(tl.float32)
        value = _conv(
            proj + c, old + c, cache + c, weight + c, proj_r, cache_x, ROWS, TAPS, CHANNELS, DV
        )
        j = tl.arange(0, triton.next_power_of_2(DV))
        v_at = v + (row * HEADS + head)[:, None] * DV + j[None, :]
        tl.store(v_at, value, mask=(t < ROWS)[:, None] & (j < DV)[None, :])
        tl.store(g + row * HEADS + head, softplus(a_row) * scale, mask=t < ROWS)
        tl.store(beta + row * HEADS + head, tl.sigmoid(b_row), mask=t < ROWS)


@triton.jit
def _conv(
    new, old, window, weight, new_r, window_x,
    ROWS: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Conv and SiLU of WIDTH channels: float32, rounded to the dtype of `new`. Stores the TAPS - 1
    rows before and the new rows in `window`.

    new points to row 0 of the new rows, old to the first of the TAPS - 1 rows before them, window
    to the slot's memory, which holds those, and weight to tap 0. All rows before are read before
    any of them is overwritten.
    """
    t = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    i = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
    c = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    before_mask = (i < TAPS - 1) & (c < WIDTH)
    rows_before = tl.load(old + i * window_x + c, mask=before_mask)
    here = (t < ROWS) & (c < WIDTH)
    read = ()
    for tap in tl.static_range(TAPS):  # all loads are issued before the first result is used
        at = t + tap - (TAPS - 1)  # a new row or, below 0, one before them
        before = tl.load(old + (t + tap) * window_x + c, mask=here & (at < 0), other=0.0)
        u = tl.load(new + at * new_r + c, mask=here & (at >= 0), other=0.0)
        w = tl.load(weight + tap * CHANNELS + c, mask=c < WIDTH, other=0.0)
        read = read + ((before, u, w),)  # noqa: RUF005 (Triton unpacks nothing in a tuple)
    y = tl.zeros((t.shape[0], c.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS):
        before, u, w = read[tap]
        u = tl.where(t + tap < TAPS - 1, before, u)
        y += u.to(tl.float32) * w.to(tl.float32)
    tl.debug_barrier()
    tl.store(window + i * window_x + c, rows_before, mask=before_mask)
    tl.store(window + (t + TAPS - 1) * window_x + c, u, mask=here)
    return (y * tl.sigmoid(y)).to(u.dtype).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x). With e = e^-|x|, log(1 + e) is computed as log(1 + e) * e / ((1 + e) - 1): the
    quotient corrects the rounding of 1 + e."""
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    rounded = total - 1.0
    log1p = tl.where(rounded > 0.0, tl.log(total) * e / tl.where(rounded > 0.0, rounded, 1.0), e)
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _verify_kernel(
    qk, v, g, beta, z, state, factors, slots, fold, norm_weight, arrivals, y, z_b, z_r, z_h,
    state_s, state_h, factors_s, factors_x, eps,
    ROWS: tl.constexpr, MAX_FOLD: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of the state [Dk, Dv] of one value head of one slot, for all rows.

    State and factors are read before the wait. What wrote them was an earlier iteration or prompt,
    and between that and this kernel lies a copy to the host or the end of a graph, which no kernel
    launched early can overtake. Programs of a key head share its k and g among the factors, and
    those of a value head share the norm of its rows. The last program of a key head to arrive does
    this shared work: then all have read the old factors and written their columns, and no program
    has to wait for another.
    """
    let_next_start(PDL)
    BLOCKS: tl.constexpr = triton.cdiv(DV, BLOCK)
    REPEAT: tl.constexpr = HEADS // K_HEADS
    part, b = tl.program_id(0), tl.program_id(1)
    head = part // BLOCKS
    key_head = head // REPEAT
    i = tl.arange(0, triton.next_power_of_2(DK))
    j = part % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b)
    factors += slot * factors_s
    deltas, decays = factors + K_HEADS * DK + head * DV + j, factors + K_HEADS * DK + HEADS * DV
    state += slot * state_s + head * state_h
    tile, mask = i[:, None] * DV + j[None, :], (i < DK)[:, None] & (j < DV)[None, :]
    s = tl.load(state + tile, mask=mask, other=0.0)
    keys = factors + key_head * DK + i
    pending = _factors(keys, deltas, decays + head, factors_x, i, j, MAX_FOLD, DK, DV)
    wait_for_previous(PDL)
    row = b * ROWS
    q_at = qk + (row * 2 * K_HEADS + key_head) * DK + i
    v_at = v + (row * HEADS + head) * DV + j
    g_at, beta_at = g + row * HEADS + head, beta + row * HEADS + head
    q_t, k_t, v_t, g_t, beta_t = _row(q_at, v_at, g_at, beta_at, i, j, K_HEADS, DK, DV)
    if MAX_FOLD > 0:
        s = _fold(s, pending, tl.load(fold + b), MAX_FOLD)
        tl.debug_barrier()  # all threads have read the old state and deltas, which are overwritten
        tl.store(state + tile, s, mask=mask)
    y_at = y + (row * HEADS + head) * DV + j
    for t in tl.static_range(ROWS):
        q, k, grown, value, rate = q_t, k_t, tl.exp(g_t), v_t, beta_t
        if t + 1 < ROWS:  # before this row's stores, since no load is moved ahead of a store
            q_at, v_at = q_at + 2 * K_HEADS * DK, v_at + HEADS * DV
            g_at, beta_at = g_at + HEADS, beta_at + HEADS
            q_t, k_t, v_t, g_t, beta_t = _row(q_at, v_at, g_at, beta_at, i, j, K_HEADS, DK, DV)
        read_k = tl.sum(s * k[:, None], 0)
        read_q = tl.sum(s * q[:, None], 0)
        delta = rate * (value - grown * read_k)
        out = (grown * read_q + tl.sum(q * k, 0) * delta) * DK**-0.5
        s = s * grown + k[:, None] * delta[None, :]
        tl.store(y_at + t * HEADS * DV, out.to(y.dtype.element_ty), mask=j < DV)
        tl.store(deltas + t * factors_x, delta, mask=j < DV)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + b * K_HEADS + key_head, 1, sem="acq_rel")
    if arrived == REPEAT * BLOCKS - 1:
        tl.store(arrivals + b * K_HEADS + key_head, 0)
        z += b * z_b
        _finish(
            qk, g, z, y, factors, decays, norm_weight, row, key_head, z_r, z_h, factors_x, eps,
            ROWS, K_HEADS, HEADS, DK, DV, SILU,
        )  # fmt: skip


@triton.jit
def _row(
    q, v, g, beta, i, j, K_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """q, k, v, g and beta of one row."""
    q_t = tl.load(q, mask=i < DK, other=0.0)
    k_t = tl.load(q + K_HEADS * DK, mask=i < DK, other=0.0)
    return q_t, k_t, tl.load(v, mask=j < DV, other=0.0), tl.load(g), tl.load(beta)


@triton.jit
def _factors(
    keys, deltas, decays, factors_x, i, j,
    MAX_FOLD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """k, delta and g of all rows that may have to be folded; all loads are issued at once."""
    rows = ()
    for at in tl.static_range(MAX_FOLD):
        k = tl.load(keys + at * factors_x, mask=i < DK, other=0.0)
        delta = tl.load(deltas + at * factors_x, mask=j < DV, other=0.0)
        rows = rows + ((k, delta, tl.load(decays + at * factors_x)),)  # noqa: RUF005 (Triton)
    return rows


@triton.jit
def _fold(s, rows, count, MAX_FOLD: tl.constexpr):
    """As Ops.gdn_fold, of the first `count` rows, in turn and as the pass that made them does it:
    a state has the same bits in whatever groups its rows are folded."""
    for at in tl.static_range(MAX_FOLD):
        k, delta, g = rows[at]
        alive = at < count
        grown = tl.exp(tl.where(alive, g, 0.0))
        k, delta = tl.where(alive, k, 0.0), tl.where(alive, delta, 0.0)
        s = s * grown + k[:, None] * delta[None, :]
    return s


@triton.jit
def _finish(
    qk, g, z, y, factors, decays, norm_weight, row, key_head, z_r, z_h, factors_x, eps,
    ROWS: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Store k and g of one key head's rows as factors; norm and gate its value heads' rows."""
    REPEAT: tl.constexpr = HEADS // K_HEADS
    i = tl.arange(0, triton.next_power_of_2(DK))
    j = tl.arange(0, triton.next_power_of_2(DV))
    weight = tl.load(norm_weight + j, mask=j < DV, other=0.0)[None, :]
    for first in tl.static_range(0, ROWS, 8):
        t = first + tl.arange(0, 8)
        alive, in_v = t < ROWS, (t < ROWS)[:, None] & (j < DV)[None, :]
        k_at = qk + (((row + t) * 2 + 1) * K_HEADS + key_head)[:, None] * DK + i[None, :]
        in_k = alive[:, None] & (i < DK)[None, :]
        k = tl.load(k_at, mask=in_k, other=0.0)
        for sharer in tl.static_range(REPEAT):
            head = key_head * REPEAT + sharer
            decay = tl.load(g + (row + t) * HEADS + head, mask=alive, other=0.0)
            y_at = y + ((row + t) * HEADS + head)[:, None] * DV + j[None, :]
            z_at = z + (t * z_r + head * z_h)[:, None] + j[None, :]
            gate = tl.load(z_at, mask=in_v, other=0.0).to(tl.float32)
            # .cg: other processors wrote it, so this one's L1 cache may be out of date
            o = tl.load(y_at, mask=in_v, other=0.0, cache_modifier=".cg").to(tl.float32)
            o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * weight
            act = tl.sigmoid(gate)
            if SILU:
                act *= gate
            tl.debug_barrier()  # all threads have read o, which is overwritten
            tl.store(y_at, (o * act).to(y.dtype.element_ty), mask=in_v)
            tl.store(decays + t * factors_x + head, decay, mask=alive)
        keys = factors + key_head * DK + t[:, None] * factors_x + i[None, :]
        tl.store(keys, k, mask=in_k)
