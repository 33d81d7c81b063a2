"""Rows that the draft has not seen yet, because iterations at depth 0 do not run it.

    an iteration without drafts: kept rows -> push
    drafts again, or the backlog is full: rows -> MtpDrafter.catch_up -> clear
The draft attends to every row of a request, so it needs the key and value of each. Making them for
many rows at once costs about as much as for one, so the rows wait here until they are needed.
Shapes: S slots + 1 | X rows a pass leaves at most | B slots of a batch | H hidden
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.parallel.operands import GatheredSlots

ROWS = 128
"""Rows of a slot that can wait, of H numbers each. Most answers end before so many do."""


class Backlog:
    """By slot: hiddens, and the tokens that followed them, of the rows just before those that
    SlotTensors holds. Index ROWS of a slot takes what is not to be kept."""

    def __init__(self, num_slots: int, hidden: Tensor) -> None:
        """hidden [S, X, H]: of SlotTensors; this has its width, dtype and device."""
        self.count = torch.zeros(num_slots, dtype=torch.int64, device=hidden.device)
        self.fresh = torch.zeros(num_slots, ROWS + 1, dtype=torch.int64, device=hidden.device)
        self.hidden = hidden.new_zeros(num_slots, ROWS + 1, hidden.shape[-1])
        self._ahead = torch.arange(hidden.shape[1], device=hidden.device)

    @staticmethod
    def slot_bytes(hidden_size: int, itemsize: int) -> int:
        """Bytes of one slot's rows; itemsize: bytes of a number of a hidden."""
        return (ROWS + 1) * (hidden_size * itemsize + torch.int64.itemsize)

    def tensors(self) -> list[Tensor]:
        return [self.fresh, self.hidden]

    def push(self, slots: Tensor, gathered: GatheredSlots) -> None:
        """Add the rows that the last pass of `slots` [B] kept. The host sees to it that there is
        room for them (Runner._catch_up), except for requests that never take a draft: theirs are
        dropped where there is none."""
        count, kept = self.count[slots], gathered.kept
        ahead = self._ahead[: gathered.fresh.shape[1]]
        index = torch.where(
            ahead < kept.unsqueeze(1), (count.unsqueeze(1) + ahead).clamp(max=ROWS), ROWS
        )
        self.fresh[slots.unsqueeze(1), index] = gathered.fresh
        self.hidden[slots.unsqueeze(1), index] = gathered.hidden
        self.count[slots] = (count + kept).clamp(max=ROWS)

    def clear(self, slots: Tensor) -> None:
        """Forget the rows of slots [B]: the draft has seen them."""
        self.count.index_fill_(0, slots, 0)
