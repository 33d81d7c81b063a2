"""RMS norms, alone and fused with the addition, the embedding or the gate beside them.

    x -> rms_norm        x, residual -> add_rms_norm        tokens -> table -> embed_rms_norm
    tokens, hidden -> table, norms -> mtp_input             out, z -> gated_rms_norm

Each equals the operation of its name in parallel/ops.py and rounds to the tensors' dtype where that
one does. Views of wider rows are read where they lie. Token ids must be rows of the table.
Letters: B slots | R rows | T all rows of the batch | H hidden | n, h heads | d width of a norm
"""

# Pyright sees a kernel as the plain function under @triton.jit, without its launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped

GATED_VECTORS = 32
"""Vectors of d that one program of gated_rms_norm takes."""


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """As Ops.rms_norm. x [.., d], or [.., n, d] with a scale for each head."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, scale, y, None, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As Ops.add_rms_norm: x, residual [.., d] -> (rms_norm(x + residual), x + residual)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y)
    _launch_norm(x, residual, scale, y, total, eps)
    return y, total


def embed_rms_norm(
    tokens: Tensor, table: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As Ops.embed_rms_norm; the table [V, H] is contiguous."""
    width = table.shape[1]
    y = torch.empty(*tokens.shape, width, dtype=table.dtype, device=table.device)
    x = torch.empty_like(y)
    _launch_embed(tokens, table, x, scale, scale, y, x, eps, pair=False)
    return y, x


def mtp_input(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    token_scale: Tensor,
    hidden_scale: Tensor,
    eps: float,
) -> Tensor:
    """As Ops.mtp_input; the table [V, H] is contiguous."""
    width = table.shape[1]
    y = torch.empty(*tokens.shape, 2 * width, dtype=table.dtype, device=table.device)
    hidden = hidden.contiguous()
    _launch_embed(tokens, table, hidden, token_scale, hidden_scale, y, y, eps, pair=True)
    return y


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
    """As Ops.gated_rms_norm: x [B, R, h, d] contiguous, z [B, R, h, d] a view of wider rows."""
    _, rows, heads, d = x.shape
    y = torch.empty(x.shape, dtype=z.dtype, device=x.device)
    assert x.is_contiguous()
    assert z.stride()[2:] == (d, 1)
    vectors = x.shape[0] * rows * heads
    if vectors:
        _gated_norm_kernel[(triton.cdiv(vectors, GATED_VECTORS),)](
            x, z, weight, y, vectors, rows, *z.stride()[:2], eps,
            HEADS=heads, D=d, BLOCK=triton.next_power_of_2(d), VECTORS=GATED_VECTORS,
            SILU=gate == "silu", num_warps=4, **overlapped(x),
        )  # fmt: skip
    return y


def by_head(x: Tensor) -> Tensor:
    """[.., n, d] -> [T, n, d], a view where the strides allow it."""
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.flatten(0, -3)


def row_warps(width: int) -> int:
    """Warps of a program that holds one vector of this width."""
    return min(8, max(1, width // 512))


def _launch_norm(
    x: Tensor, residual: Tensor | None, scale: Tensor, y: Tensor, total: Tensor | None, eps: float
) -> None:
    if not x.numel():
        return
    x3 = by_head(x)
    r3 = x3 if residual is None else by_head(residual)
    tokens, heads, d = x3.shape
    _norm_kernel[(tokens * heads,)](
        x3, r3, scale, y, y if total is None else total, heads,
        x3.stride(0), x3.stride(1), r3.stride(0), r3.stride(1),
        scale.stride(0) if scale.dim() == 2 else 0, eps,
        D=d, BLOCK=triton.next_power_of_2(d), ADD=residual is not None, num_warps=row_warps(d),
        **overlapped(x),
    )  # fmt: skip


def _launch_embed(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    scale: Tensor,
    hidden_scale: Tensor,
    y: Tensor,
    x: Tensor,
    eps: float,
    pair: bool,
) -> None:
    width = table.shape[1]
    assert table.is_contiguous()
    if not tokens.numel():
        return
    tokens = tokens.reshape(-1)
    _embed_kernel[(tokens.numel(), 2 if pair else 1)](
        tokens, table, hidden, scale, hidden_scale, y, x, eps,
        H=width, BLOCK=triton.next_power_of_2(width), PAIR=pair,
        num_warps=row_warps(width), **overlapped(table),
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, scale_ptr, y_ptr, total_ptr, heads,
    x_token, x_head, residual_token, residual_head, scale_head, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a vector of d."""
    after_previous(PDL)
    vector = tl.program_id(0).to(tl.int64)
    token, head = vector // heads, vector % heads
    at = tl.arange(0, BLOCK)
    inside = at < D
    dtype = y_ptr.dtype.element_ty
    row = vector * D
    scale = tl.load(scale_ptr + head * scale_head + at, mask=inside, other=0.0)
    x = tl.load(x_ptr + token * x_token + head * x_head + at, mask=inside, other=0.0)
    if ADD:
        residual_at = residual_ptr + token * residual_token + head * residual_head + at
        residual = tl.load(residual_at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row + at, x, mask=inside)
    x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * scale
    tl.store(y_ptr + row + at, y.to(dtype), mask=inside)


@triton.jit
def _embed_kernel(
    tokens, table, hidden, scale, hidden_scale, y, x, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row of the table; with PAIR one more for its hidden, written to the right."""
    row, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < H
    weight = tl.load((hidden_scale if second else scale) + at, mask=inside, other=0.0)
    after_previous(PDL)
    if second:
        value = tl.load(hidden + row * H + at, mask=inside, other=0.0)
    else:
        value = tl.load(table + tl.load(tokens + row) * H + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps) * weight).to(y.dtype.element_ty)
    if PAIR:
        tl.store(y + (row * 2 + second) * H + at, normed, mask=inside)
    else:
        tl.store(y + row * H + at, normed, mask=inside)
        tl.store(x + row * H + at, value, mask=inside)


@triton.jit
def _gated_norm_kernel(
    x, z, weight, y, vectors, rows, z_b, z_r, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program VECTORS vectors of d."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + at, mask=at < D, other=0.0)
    after_previous(PDL)
    token, head = vector // HEADS, vector % HEADS
    inside = (vector < vectors) & (at < D)
    z_at = z + (token // rows).to(tl.int64) * z_b + token % rows * z_r + head * D + at
    vector = vector.to(tl.int64)
    gate = tl.load(z_at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + vector * D + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None] * scale
    act = tl.sigmoid(gate)
    if SILU:
        act *= gate
    tl.store(y + vector * D + at, (value * act).to(y.dtype.element_ty), mask=inside)
