"""Weights in FP8 blocks: which of them the products read as they are, and plain copies of them.

    weight -> readable -> products of few rows: kernels/gemv.py, kernels/matmul.py
    weight -> plain -> [O, K], for products of many rows by the library

A readable block has a multiple of 16 rows and of 32 columns. So the 16 rows of the weight that a
program of gemv takes lie in one block, and 4 lanes load no more columns at once than one block has.
Letters: O rows of the weight, which are columns of a product | K inner width
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.formats import Fp8Matrix, Matrix, StackedMatrix
from outrider.parallel.kernels.launch import let_next_start, overlapped, wait_for_previous

BLOCK_ROWS, BLOCK_COLUMNS = 16, 32
"""What rows and columns of a readable block are multiples of."""
PIECE = 256
"""Columns of one program of `plain`, which takes BLOCK_ROWS rows."""


def readable(w: Matrix) -> bool:
    """Whether the kernels read w as it is stored: plain numbers, FP8 in blocks of a multiple of 16
    rows and of 32 columns, or a stack of such."""
    if isinstance(w, StackedMatrix):
        return all(map(readable, w.parts))
    if isinstance(w, Fp8Matrix):
        return w.block[0] % BLOCK_ROWS == w.block[1] % BLOCK_COLUMNS == 0
    return isinstance(w, Tensor)


def plain(w: Fp8Matrix | StackedMatrix, dtype: torch.dtype) -> Tensor:
    """As formats.dequantised: [O, K], of a readable w whose parts are contiguous."""
    parts = w.parts if isinstance(w, StackedMatrix) else (w,)
    first = parts[0]
    device = first.device if isinstance(first, Tensor) else first.values.device
    out = torch.empty(w.shape, dtype=dtype, device=device)
    for part, rows in zip(parts, out.split([part.shape[0] for part in parts]), strict=True):
        if isinstance(part, Tensor):
            rows.copy_(part)
        else:
            _launch_plain(part, rows)
    return out


def _launch_plain(w: Fp8Matrix, out: Tensor) -> None:
    num_rows, inner = w.shape
    _plain_kernel[(num_rows // BLOCK_ROWS, triton.cdiv(inner, PIECE))](
        w.values, w.scales, out, K=inner, BLOCK_ROWS=w.block[0], BLOCK_COLUMNS=w.block[1],
        ROWS=BLOCK_ROWS, PIECE=PIECE, num_warps=4, **overlapped(out),
    )  # fmt: skip


@triton.jit
def _plain_kernel(
    values, scales, out, K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, which lie in one row of blocks, and PIECE columns."""
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS
    o, k = row + tl.arange(0, ROWS), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    at = o.to(tl.int64)[:, None] * K + k[None, :]
    inside = (k < K)[None, :]
    codes = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    block = row // BLOCK_ROWS * (K // BLOCK_COLUMNS) + k // BLOCK_COLUMNS
    scale = tl.load(scales + block, mask=k < K, other=0.0)
    wait_for_previous(PDL)
    tl.store(out + at, (codes * scale[None, :]).to(out.dtype.element_ty), mask=inside)
