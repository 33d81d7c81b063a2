"""Where the rows of a pass lie, in one launch: positions, page index, rotary cos and sin.

    first, counts, block table -> locate_rows -> positions, index, cos, sin, lengths

A program a row of a slot; everything is read on the device.
Letters: B slots | R rows | N pages in the table | D rotary width
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped


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
    """As Ops.locate_rows. cos, sin [positions, D] contiguous; block_table's rows may be strided."""
    batch, width = first.shape[0], cos.shape[1]
    positions = torch.empty(batch, num_rows, dtype=torch.int64, device=first.device)
    index = torch.empty_like(positions)
    row_cos = torch.empty(batch, num_rows, 1, width, dtype=cos.dtype, device=first.device)
    row_sin = torch.empty_like(row_cos)
    lengths = torch.empty_like(first)
    _place_kernel[(num_rows, batch)](
        first, counts, block_table, cos, sin, positions, index, row_cos, row_sin, lengths,
        block_table.stride(0), block_table.shape[1], cos.shape[0], num_rows, shift, more,
        PAGE=page_tokens, D=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
        **overlapped(first),
    )  # fmt: skip
    return positions, index, row_cos, row_sin, lengths


@triton.jit(do_not_specialize=["shift", "more"])
def _place_kernel(
    first_ptr, counts_ptr, table_ptr, cos_ptr, sin_ptr, positions_ptr, index_ptr, out_cos, out_sin,
    lengths_ptr, table_row, num_pages, num_positions, num_rows, shift, more,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row, slot = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(first_ptr + slot) + shift, tl.load(counts_ptr + slot) + more
    if row == 0:
        tl.store(lengths_ptr + slot, start + count)
    position = start + row
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    place = tl.minimum(position // PAGE, num_pages - 1)
    page = tl.load(table_ptr + slot * table_row + place)
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
