"""The memory of the slots: gathered for a batch when an iteration begins, advanced when it ends.

    slots, memory -> gather_slots -> GatheredSlots, by index in the batch
    drafts, targets -> accept_commit -> kept, and the memory advanced by as many rows
    targets, kept -> count_tokens -> how often the answers hold each id

Each equals the operation of its name in parallel/ops.py, in one launch.
Letters: B slots of a batch | K drafts | R = K+1 rows | H hidden
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
from outrider.parallel.sampling import COUNT_SHIFT

PAGE_PIECE = 128
"""Page numbers that one step of gather_slots copies."""
ONE_MORE = tl.constexpr(1 << COUNT_SHIFT)
"""What SlotSampling.history grows by with a token."""
COPY_PIECE = 1024
"""Elements of a row's hidden that one step copies."""


def gather_slots(slots: Tensor, memory: SlotMemory, table: Tensor, width: int) -> GatheredSlots:
    """As Ops.gather_slots."""
    batch, pages = len(slots), table.shape[1]
    numbers = torch.empty(5, batch, dtype=torch.int64, device=slots.device)
    fresh = torch.empty(batch, width, dtype=torch.int64, device=slots.device)
    own_table = torch.empty(batch, pages, dtype=torch.int64, device=slots.device)
    wide = memory.hidden.shape[-1]
    hidden = torch.empty(batch, width, wide, dtype=memory.hidden.dtype, device=slots.device)
    if batch:
        _gather_kernel[(width, batch)](
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


def count_tokens(
    history: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor, first_id: int
) -> None:
    """As Ops.count_tokens."""
    num_slots, num_rows = tokens.shape
    if num_slots:
        _count_kernel[(num_slots,)](
            history, slots, tokens, counts, first_id, history.shape[1], tokens.stride(0), num_rows,
            BLOCK=triton.next_power_of_2(num_rows), num_warps=1, **overlapped(history),
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "num_pages"])
def _gather_kernel(
    slots, length, last, kept, fold, fresh, stored, table, numbers, fresh_out, hidden, table_out,
    batch, fresh_s, stored_s, stored_x, table_s, num_pages,
    H: tl.constexpr, PIECE: tl.constexpr, PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row of a slot copies its hidden and token; that of row 0 also copies the slot's
    numbers and pages."""
    row, b = tl.program_id(0), tl.program_id(1)
    after_previous(PDL)
    slot = tl.load(slots + b)
    out_row = b * tl.num_programs(0) + row
    source, to = stored + slot * stored_s + row * stored_x, hidden + out_row.to(tl.int64) * H
    for first in tl.static_range(0, H, PIECE):
        at = first + tl.arange(0, PIECE)
        tl.store(to + at, tl.load(source + at, mask=at < H), mask=at < H)
    tl.store(fresh_out + out_row, tl.load(fresh + slot * fresh_s + row))
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
    """One program a row of a slot copies its hidden; that of row 0 also decides what is kept."""
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
        # the index of the first draft that was not offered or differs from the target's token
        wrong = tl.where(offered & (draft == target), BLOCK, t)
        agreed = tl.minimum(tl.min(wrong, 0), DRAFTS).to(tl.int64)
        tl.store(fresh + slot * fresh_s + t, target, mask=t < ROWS)
        tl.store(kept + b, agreed + 1)
        tl.store(kept_of + slot, agreed + 1)
        tl.store(fold + slot, agreed + 1)
        tl.store(last + slot, tl.sum(tl.where(t == agreed, target, 0), 0))
        longer = tl.load(length + slot) + agreed + 1
        tl.store(length + slot, tl.where(slot == padding, 0, longer))


@triton.jit(do_not_specialize=["first_id", "num_rows"])
def _count_kernel(
    history, slots, tokens, counts, first_id, width, stride, num_rows,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a slot."""
    after_previous(PDL)
    b, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    counted = at < tl.minimum(tl.load(counts + b), num_rows)
    local = tl.load(tokens + b * stride + at, mask=counted, other=0) - first_id
    counted = counted & (local >= 0) & (local < width)
    tl.atomic_add(history + tl.load(slots + b) * width + local, ONE_MORE, mask=counted)
