"""Rows that the draft has not seen yet, left by iterations that drafted nothing.

    no drafts: kept rows -> push             drafts again, or full: rows -> MtpDrafter.catch_up

The draft attends to all rows of a request, so it needs each one's key and value; but many at a time
cost about as much as one. So depth 0 costs no pass of the draft.
Shapes: S slots + 1 | W = ROWS a slot may owe, and one place for padding | B | H
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.parallel.operands import GatheredSlots

ROWS = 128
"""A slot's take this many times H numbers; most answers end before so many wait."""


class Backlog:
    """By slot: the hiddens and the following tokens of rows just before those in SlotTensors."""

    def __init__(self, num_slots: int, hidden: Tensor) -> None:
        """hidden [S, X, H]: the slots' own, whose kind these are."""
        self.count = torch.zeros(num_slots, dtype=torch.int64, device=hidden.device)
        self.fresh = torch.zeros(num_slots, ROWS + 1, dtype=torch.int64, device=hidden.device)
        self.hidden = hidden.new_zeros(num_slots, ROWS + 1, hidden.shape[-1])
        self._ahead = torch.arange(hidden.shape[1], device=hidden.device)

    @staticmethod
    def slot_bytes(hidden_size: int, item: int) -> int:
        """Bytes of one slot's rows; item: of a hidden's element."""
        return (ROWS + 1) * (hidden_size * item + torch.int64.itemsize)

    def tensors(self) -> list[Tensor]:
        return [self.fresh, self.hidden]

    def push(self, slots: Tensor, at: GatheredSlots) -> None:
        """Add the rows kept by the last pass. The host sees to it that no slot owes too many."""
        before, ahead = self.count[slots], self._ahead[: at.fresh.shape[1]]
        place = torch.where(
            ahead < at.kept.unsqueeze(1), (before.unsqueeze(1) + ahead).clamp(max=ROWS), ROWS
        )
        owners = slots.unsqueeze(1)
        self.fresh[owners, place] = at.fresh
        self.hidden[owners, place] = at.hidden
        self.count[slots] = (before + at.kept).clamp(max=ROWS)

    def clear(self, slots: Tensor) -> None:
        self.count.index_fill_(0, slots, 0)
