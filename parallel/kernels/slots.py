"""What begins and ends a pass, one launch each: embedding rows with their norm, and the commit.

    tokens -> table rows -> embed_rms_norm (target)      tokens, hidden -> mtp_input (draft)
    slots' memory -> recall -> its rows by place in the batch
    drafts, targets -> accept_commit -> kept, and the slots' memory advanced

They equal Ops' operations of these names. Token ids must lie in the table.
Letters: B slots of a batch | K drafts | R = K+1 rows | H hidden | V table rows
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.parallel.kernels.launch import after_previous, overlapped
from outrider.parallel.operands import GatheredSlots, SlotMemory

PAGE_PIECE = 128
"""Page numbers that one step of a recall copies."""
COPY_PIECE = 1024
"""Elements of a hidden row that one step of the commit copies."""


def embed_rms_norm(
    tokens: Tensor, table: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """tokens [B, R] int64, table [V, H], scale [H] float32 -> (norm of their rows, the rows)."""
    width = table.shape[1]
    y = torch.empty(*tokens.shape, width, dtype=table.dtype, device=table.device)
    x = torch.empty_like(y)
    _launch(tokens, table, x, scale, scale, y, x, eps, pair=False)
    return y, x


def mtp_input(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    token_scale: Tensor,
    hidden_scale: Tensor,
    eps: float,
) -> Tensor:
    """tokens [B, R], hidden [B, R, H] -> [B, R, 2H]: norm of the tokens' rows | norm of hidden."""
    width = table.shape[1]
    y = torch.empty(*tokens.shape, 2 * width, dtype=table.dtype, device=table.device)
    hidden = hidden.contiguous()
    _launch(tokens, table, hidden, token_scale, hidden_scale, y, y, eps, pair=True)
    return y


def gather_slots(slots: Tensor, memory: SlotMemory, table: Tensor, width: int) -> GatheredSlots:
    """As Ops.gather_slots; tensors of one dtype are views of one block."""
    batch, pages = len(slots), table.shape[1]
    numbers = torch.empty(5, batch, dtype=torch.int64, device=slots.device)
    fresh = torch.empty(batch, width, dtype=torch.int64, device=slots.device)
    own_table = torch.empty(batch, pages, dtype=torch.int64, device=slots.device)
    wide = memory.hidden.shape[-1]
    hidden = torch.empty(batch, width, wide, dtype=memory.hidden.dtype, device=slots.device)
    if batch:
        _recall_kernel[(width, batch)](
            slots, memory.length, memory.last, memory.kept, memory.fold, memory.fresh,
            memory.hidden, table, numbers, fresh, hidden, own_table, batch,
            memory.fresh.stride(0), *memory.hidden.stride()[:2], table.stride(0), pages,
            H=wide, PIECE=COPY_PIECE, PAGES=PAGE_PIECE, num_warps=4, **overlapped(hidden),
        )  # fmt: skip
    length, last, kept, fold, start = numbers
    return GatheredSlots(
        length=length, last=last, kept=kept, fold=fold, start=start, fresh=fresh, hidden=hidden,
        table=own_table,
    )  # fmt: skip


def accept_commit(
    slots: Tensor,
    drafts: Tensor,
    targets: Tensor,
    limits: Tensor,
    hidden: Tensor,
    memory: SlotMemory,
) -> Tensor:
    """As Ops.accept_commit; drafts and targets may be views of wider rows. -> kept [B] int64."""
    batch, rows = targets.shape
    kept = torch.empty(batch, dtype=torch.int64, device=targets.device)
    hidden = hidden.contiguous()
    _commit_kernel[(rows, batch)](
        slots, drafts, targets, limits, hidden, kept, memory.length, memory.last, memory.kept,
        memory.fold, memory.fresh, memory.hidden, *drafts.stride(), *targets.stride(),
        memory.fresh.stride(0), *memory.hidden.stride()[:2], len(memory.length) - 1,
        DRAFTS=drafts.shape[1], ROWS=rows, BLOCK=triton.next_power_of_2(rows),
        H=hidden.shape[-1], PIECE=COPY_PIECE, num_warps=4, **overlapped(targets),
    )  # fmt: skip
    return kept


def _launch(
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
        num_warps=min(8, max(1, width // 512)), **overlapped(table),
    )  # fmt: skip


@triton.jit
def _embed_kernel(
    tokens, table, hidden, scale, hidden_scale, y, x, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; with PAIR a second one for its hidden, to the right of the first."""
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


@triton.jit(do_not_specialize=["batch", "num_pages"])
def _recall_kernel(
    slots, length, last, kept, fold, fresh, stored, table, numbers, fresh_out, hidden, table_out,
    batch, fresh_s, stored_s, stored_x, table_s, num_pages,
    H: tl.constexpr, PIECE: tl.constexpr, PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row of a slot copies its hidden; the row 0 program also the slot's numbers."""
    row, b = tl.program_id(0), tl.program_id(1)
    after_previous(PDL)
    slot = tl.load(slots + b)
    line = b * tl.num_programs(0) + row
    source, to = stored + slot * stored_s + row * stored_x, hidden + line.to(tl.int64) * H
    for first in tl.static_range(0, H, PIECE):
        at = first + tl.arange(0, PIECE)
        tl.store(to + at, tl.load(source + at, mask=at < H), mask=at < H)
    tl.store(fresh_out + line, tl.load(fresh + slot * fresh_s + row))
    if row == 0:
        rows_held, rows_kept = tl.load(length + slot), tl.load(kept + slot)
        tl.store(numbers + b, rows_held)
        tl.store(numbers + batch + b, tl.load(last + slot))
        tl.store(numbers + 2 * batch + b, rows_kept)
        tl.store(numbers + 3 * batch + b, tl.load(fold + slot))
        tl.store(numbers + 4 * batch + b, rows_held - rows_kept)
        for start in tl.range(0, num_pages, PAGES):
            page = start + tl.arange(0, PAGES)
            inside = page < num_pages
            number = tl.load(table + slot * table_s + page, mask=inside)
            tl.store(table_out + b * num_pages + page, number, mask=inside)


@triton.jit
def _commit_kernel(
    slots, drafts, targets, limits, hidden, kept, length, last, kept_of, fold, fresh, stored,
    draft_b, draft_k, target_b, target_r, fresh_s, stored_s, stored_x, padding,
    DRAFTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row of a slot copies its hidden; the row 0 program also accepts."""
    row, b = tl.program_id(0), tl.program_id(1)
    after_previous(PDL)
    slot = tl.load(slots + b)
    source = hidden + (b * ROWS + row).to(tl.int64) * H
    to = stored + slot * stored_s + row * stored_x
    for first in tl.static_range(0, H, PIECE):
        at = first + tl.arange(0, PIECE)
        tl.store(to + at, tl.load(source + at, mask=at < H), mask=at < H)
    if row == 0:
        t = tl.arange(0, BLOCK)
        target = tl.load(targets + b * target_b + t * target_r, mask=t < ROWS, other=0)
        offered = (t < DRAFTS) & (t < tl.load(limits + b))
        draft = tl.load(drafts + b * draft_b + t * draft_k, mask=offered, other=0)
        # rows before the first that was not offered or does not agree
        wrong = tl.where(offered & (draft == target), BLOCK, t)
        agreed = tl.minimum(tl.min(wrong, 0), DRAFTS).to(tl.int64)
        tl.store(fresh + slot * fresh_s + t, target, mask=t < ROWS)
        tl.store(kept + b, agreed + 1)
        tl.store(kept_of + slot, agreed + 1)
        tl.store(fold + slot, agreed + 1)
        tl.store(last + slot, tl.sum(tl.where(t == agreed, target, 0), 0))
        longer = tl.load(length + slot) + agreed + 1
        tl.store(length + slot, tl.where(slot == padding, 0, longer))
