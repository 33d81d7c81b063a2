"""Where the rows of a pass lie in the KV pages, and their keys and values written there.

    first, counts, block table -> locate_rows -> positions, index, cos, sin, lengths
    projection -> qk_norm_rope_write -> q, and k and v in their pages

Each equals the operation of its name in parallel/ops.py. Lengths and pages are read on the device.
Letters: B slots | R rows | T all rows of the batch | N pages in a block table | d head width
         n, m query and key-value heads
"""

# Pyright sees a kernel as the plain function under @triton.jit, without its launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.kernels.norms import by_head, row_warps
from outrider.parallel.operands import Rows


def locate_rows(
    first: Tensor,
    counts: Tensor,
    block_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_rows: int,
    page_tokens: int,
    shift: int = 0,
    more: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As Ops.locate_rows; cos and sin are contiguous, the block table may be a view of a wider."""
    batch, width = first.shape[0], cos.shape[1]
    positions = torch.empty(batch, num_rows, dtype=torch.int64, device=first.device)
    index = torch.empty_like(positions)
    row_cos = torch.empty(batch, num_rows, 1, width, dtype=cos.dtype, device=first.device)
    row_sin = torch.empty_like(row_cos)
    lengths = torch.empty_like(first)
    _locate_kernel[(num_rows, batch)](
        first, counts, block_table, cos, sin, positions, index, row_cos, row_sin, lengths,
        block_table.stride(0), block_table.shape[1], cos.shape[0], num_rows, shift, more,
        PAGE=page_tokens, D=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
        **overlapped(first),
    )  # fmt: skip
    return positions, index, row_cos, row_sin, lengths


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
    kv, rotary = v.shape[2], rows.cos.shape[-1]
    x, v = by_head(qk), by_head(v)
    tokens, heads, d = x.shape
    q = torch.empty(*qk.shape[:2], heads - kv, d, dtype=qk.dtype, device=qk.device)
    if not tokens:
        return q
    _check_pages(k_pages, v_pages)
    cos, sin = rows.cos.reshape(-1, rotary), rows.sin.reshape(-1, rotary)
    _qk_kernel[(tokens, heads + kv)](
        x, v, scale, cos, sin, rows.kv_index.reshape(-1), q, k_pages, v_pages,
        x.stride(0), x.stride(1), v.stride(0), v.stride(1),
        scale.stride(0), cos.stride(0), sin.stride(0),
        k_pages.stride(1), k_pages.stride(2), eps,
        HEADS=heads, KV=kv, D=d, ROTARY=rotary, BLOCK=triton.next_power_of_2(d),
        num_warps=row_warps(d), **overlapped(x),
    )  # fmt: skip
    return q


def _check_pages(*pages: Tensor) -> None:
    for t in pages:
        if not t.is_contiguous():
            raise ValueError(f"pages {tuple(t.shape)} have strides {t.stride()}: contiguous needed")


@triton.jit(do_not_specialize=["shift", "more"])
def _locate_kernel(
    first_ptr, counts_ptr, table_ptr, cos_ptr, sin_ptr, positions_ptr, index_ptr, out_cos, out_sin,
    lengths_ptr, table_row, num_pages, num_positions, num_rows, shift, more,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row of a slot; that of row 0 also writes the slot's length."""
    after_previous(PDL)
    row, slot = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(first_ptr + slot) + shift, tl.load(counts_ptr + slot) + more
    if row == 0:
        tl.store(lengths_ptr + slot, start + count)
    position = start + row
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    entry = tl.minimum(position // PAGE, num_pages - 1)
    page = tl.load(table_ptr + slot * table_row + entry)
    index = tl.where(row < count, page * PAGE + position % PAGE, 0)
    out = slot * num_rows + row
    tl.store(positions_ptr + out, position)
    tl.store(index_ptr + out, index)
    at = tl.arange(0, BLOCK)
    inside = at < D
    cos = tl.load(cos_ptr + position * D + at, mask=inside)
    sin = tl.load(sin_ptr + position * D + at, mask=inside)
    tl.store(out_cos + out * D + at, cos, mask=inside)
    tl.store(out_sin + out * D + at, sin, mask=inside)


@triton.jit
def _qk_kernel(
    x_ptr, v_ptr, scale_ptr, cos_ptr, sin_ptr, index_ptr, out_ptr, k_ptr, v_pages_ptr,
    x_token, x_head, v_token, v_head, scale_head, cos_token, sin_token, page_token, page_head, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a head of a row: q and k are normed and rotated, v is copied as it is."""
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
        # z is the other element of each rotated pair. Another thread holds it, so it is read again.
        rotated = at < ROTARY
        left = at < ROTARY // 2
        other = tl.where(left, at + ROTARY // 2, at - ROTARY // 2)
        z = tl.load(x_row + other, mask=rotated, other=0.0).to(tl.float32)
        z = z * rate * tl.load(scale_row + other, mask=rotated, other=0.0)
        z = z.to(dtype).to(tl.float32)
        cos = tl.load(cos_ptr + token * cos_token + at, mask=rotated, other=1.0)
        sin = tl.load(sin_ptr + token * sin_token + at, mask=rotated, other=0.0)
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
