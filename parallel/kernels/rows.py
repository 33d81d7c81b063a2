"""Triton kernels of one pass over rows: norms, gates, rotary, page writes, the best logit.

    x [.., d] -> rms_norm / add_rms_norm / swiglu, one program a row or a piece
    projection -> qk_norm_rope_write -> q, and k and v in their pages
    logits [N, v] -> pieces, each one sortable int64 -> top_pair -> choose_pair

Each rounds where backends/cpu.py rounds. Views of a wider row cost no copy; no call waits for the
device. Letters: T tokens (B slots x R rows) | n, m query and kv heads | d width | v vocabulary
"""

# Pyright sees a kernel as the plain function under @triton.jit, without its launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.operands import Rows

ROW_PIECE = 1024
"""Elements of a row that one program of an elementwise kernel takes."""
TOP_PIECE = 2048
"""Logits that one program of the first stage looks through."""
LOWEST = tl.constexpr(-(1 << 63))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [.., d] / rms * scale, in x's dtype; scale [d] or [n, d], float32."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, scale, y, None, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [.., d] -> (rms_norm(x + residual), x + residual)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y)
    _launch_norm(x, residual, scale, y, total, eps)
    return y, total


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [.., 2i] = [gate | up] -> silu(gate) * up [.., i]."""
    width = gate_up.shape[-1] // 2
    x = gate_up.flatten(0, -2) if gate_up.dim() > 1 else gate_up.unsqueeze(0)
    y = torch.empty(*gate_up.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (x.shape[0], triton.cdiv(width, ROW_PIECE))
        _gate_kernel[grid](
            x[:, width:], x, y, x.stride(0), x.stride(0),
            D=width, BLOCK=ROW_PIECE, num_warps=2, **overlapped(x),
        )  # fmt: skip
    return y


def qk_norm_rope_write(
    qk: Tensor,
    v: Tensor,
    scale: Tensor,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
) -> Tensor:
    """As Ops.qk_norm_rope_write; pages must be contiguous. -> q [B, R, n, d]."""
    kv, turn = v.shape[2], rows.cos.shape[-1]
    x, v = _headed(qk), _headed(v)
    tokens, heads, d = x.shape
    q = torch.empty(*qk.shape[:2], heads - kv, d, dtype=qk.dtype, device=qk.device)
    if not tokens:
        return q
    _check_pages(k_pages, v_pages)
    cos, sin = rows.cos.reshape(-1, turn), rows.sin.reshape(-1, turn)
    _qk_kernel[(tokens, heads + kv)](
        x, v, scale, cos, sin, rows.kv_index.reshape(-1), q, k_pages, v_pages,
        x.stride(0), x.stride(1), v.stride(0), v.stride(1),
        scale.stride(0), cos.stride(0), sin.stride(0),
        k_pages.stride(1), k_pages.stride(2), eps,
        HEADS=heads, KV=kv, D=d, TURN=turn, BLOCK=triton.next_power_of_2(d), num_warps=_warps(d),
        **overlapped(x),
    )  # fmt: skip
    return q


def top_pair(logits: Tensor, first_id: int) -> Tensor:
    """logits [N, v] of ids from `first_id` -> [N, 2] int32: the value's float32 bits, its id."""
    return pair_of(top_keys(logits), first_id)


def top_keys(logits: Tensor) -> Tensor:
    """logits [N, v] -> the best of each piece of a row [N, pieces] int64, sortable."""
    num_rows, width = logits.shape
    pieces = triton.cdiv(width, TOP_PIECE)
    best = torch.empty(num_rows, pieces, dtype=torch.int64, device=logits.device)
    if num_rows:
        _top_kernel[(pieces, num_rows)](
            logits, best, logits.stride(0), width, BLOCK=TOP_PIECE, **overlapped(logits)
        )
    return best


def pair_of(best: Tensor, first_id: int) -> Tensor:
    """Sortable keys [N, pieces] -> the pair of each row's largest [N, 2] int32."""
    num_rows, pieces = best.shape
    pair = torch.empty(num_rows, 2, dtype=torch.int32, device=best.device)
    if not num_rows:
        return pair
    _top_last_kernel[(num_rows,)](
        best,
        pair,
        first_id,
        pieces,
        BLOCK=triton.next_power_of_2(pieces),
        num_warps=1,
        **overlapped(best),
    )
    return pair


def choose_pair(gathered: Tensor) -> Tensor:
    """top_pair of every rank [size, N, 2] -> the id [N] int64 of the largest; ties: smallest."""
    size, num_rows, _ = gathered.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=gathered.device)
    if num_rows:
        block = min(128, triton.next_power_of_2(num_rows))
        _choose_kernel[(triton.cdiv(num_rows, block),)](
            gathered.contiguous(),
            ids,
            num_rows,
            SIZE=size,
            BLOCK=block,
            num_warps=1,
            **overlapped(ids),
        )
    return ids


def _warps(width: int) -> int:
    return min(8, max(1, width // 512))


def _headed(x: Tensor) -> Tensor:
    """[.., n, d] -> [T, n, d], a view where the strides allow it."""
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.flatten(0, -3)


def _check_pages(*pages: Tensor) -> None:
    for t in pages:
        if not t.is_contiguous():
            raise ValueError(f"pages {tuple(t.shape)} have strides {t.stride()}: contiguous needed")


def _launch_norm(
    x: Tensor, residual: Tensor | None, scale: Tensor, y: Tensor, total: Tensor | None, eps: float
) -> None:
    if not x.numel():
        return
    x3 = _headed(x)
    r3 = x3 if residual is None else _headed(residual)
    tokens, heads, d = x3.shape
    _norm_kernel[(tokens * heads,)](
        x3, r3, scale, y, y if total is None else total, heads,
        x3.stride(0), x3.stride(1), r3.stride(0), r3.stride(1),
        scale.stride(0) if scale.dim() == 2 else 0, eps,
        D=d, BLOCK=triton.next_power_of_2(d), ADD=residual is not None, num_warps=_warps(d),
        **overlapped(x),
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, scale_ptr, y_ptr, total_ptr, heads,
    x_token, x_head, residual_token, residual_head, scale_head, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a vector of d."""
    after_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    token, head = line // heads, line % heads
    at = tl.arange(0, BLOCK)
    inside = at < D
    dtype = y_ptr.dtype.element_ty
    row = line * D
    scale = tl.load(scale_ptr + head * scale_head + at, mask=inside, other=0.0)
    x = tl.load(x_ptr + token * x_token + head * x_head + at, mask=inside, other=0.0)
    if ADD:
        place = residual_ptr + token * residual_token + head * residual_head + at
        residual = tl.load(place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row + at, x, mask=inside)
    x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * scale
    tl.store(y_ptr + row + at, y.to(dtype), mask=inside)


@triton.jit
def _gate_kernel(
    x_ptr, gate_ptr, y_ptr, x_row, gate_row,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x * silu(gate); the gate rounds before it multiplies."""
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


@triton.jit
def _qk_kernel(
    x_ptr, v_ptr, scale_ptr, cos_ptr, sin_ptr, index_ptr, out_ptr, k_ptr, v_pages_ptr,
    x_token, x_head, v_token, v_head, scale_head, cos_token, sin_token, page_token, page_head, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a head of a token: q and k normed and rotated, v only moved."""
    after_previous(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < D
    if head < HEADS:
        dtype = out_ptr.dtype.element_ty
        x_row, scale_row = x_ptr + token * x_token + head * x_head, scale_ptr + head * scale_head
        x = tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        y = x * rate * tl.load(scale_row + at, mask=inside, other=0.0)
        y = y.to(dtype).to(tl.float32)
        # The other half of each rotated pair is read again: it is in L1, not in this thread.
        turned = at < TURN
        left = at < TURN // 2
        mate = tl.where(left, at + TURN // 2, at - TURN // 2)
        z = tl.load(x_row + mate, mask=turned, other=0.0).to(tl.float32)
        z = z * rate * tl.load(scale_row + mate, mask=turned, other=0.0)
        z = z.to(dtype).to(tl.float32)
        cos = tl.load(cos_ptr + token * cos_token + at, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + token * sin_token + at, mask=turned, other=0.0)
        y = (y * cos + tl.where(left, -z, z) * sin).to(dtype)
        if head < HEADS - KV:
            tl.store(out_ptr + (token * (HEADS - KV) + head) * D + at, y, mask=inside)
        else:
            place = tl.load(index_ptr + token).to(tl.int64) * page_token
            tl.store(k_ptr + place + (head - HEADS + KV) * page_head + at, y, mask=inside)
    else:
        kv = head - HEADS
        place = tl.load(index_ptr + token).to(tl.int64) * page_token + kv * page_head
        v = tl.load(v_ptr + token * v_token + kv * v_head + at, mask=inside)
        tl.store(v_pages_ptr + place + at, v, mask=inside)


@triton.jit
def _sortable(value, index):
    """float32 value, int32 index >= 0 -> int64: a larger value first, then a smaller index.

    The bits of a float32 sort as an int32 once those of negative numbers are flipped; zeros are
    made one, and NaNs one above all.
    """
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(value == value, bits, 0x7FC00000)
    return (bits.to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _unsorted(key):
    """int64 -> (bits of the float32 value, index), both int32."""
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits, (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _top_kernel(x_ptr, best_ptr, x_row, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a piece of a row."""
    after_previous(PDL)
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + at, mask=at < width, other=float("-inf"))
    key = _sortable(x.to(tl.float32), at)  # past the row: -inf at the highest indices, never first
    tl.store(best_ptr + row * tl.num_programs(0) + piece, tl.max(key, 0))


@triton.jit
def _top_last_kernel(
    best_ptr, pair_ptr, first_id, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The best of a row's pieces, as a pair."""
    after_previous(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    keys = tl.load(best_ptr + row.to(tl.int64) * pieces + at, mask=at < pieces, other=LOWEST)
    bits, index = _unsorted(tl.max(keys, 0))
    tl.store(pair_ptr + row * 2, bits)
    tl.store(pair_ptr + row * 2 + 1, index + first_id)


@triton.jit
def _choose_kernel(
    pair_ptr, ids_ptr, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a block of rows; every rank's pair of each."""
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    best = tl.full((BLOCK,), LOWEST, tl.int64)
    for rank in tl.static_range(SIZE):
        place = pair_ptr + (rank * num_rows + row) * 2
        value = tl.load(place, mask=inside, other=0).to(tl.float32, bitcast=True)
        best = tl.maximum(best, _sortable(value, tl.load(place + 1, mask=inside, other=0)))
    tl.store(ids_ptr + row, _unsorted(best)[1].to(tl.int64), mask=inside)
