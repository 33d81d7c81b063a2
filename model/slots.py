"""What the device knows of each slot: where its request stands, and how it picks tokens.

    Join -> SlotTensors.reset     Grow -> SlotTensors.grow     positions -> rows -> Rows of a pass

It is on the device so that an iteration can be enqueued before the results of the last one are read
(parallel/operands.py: SlotMemory says what each tensor means). The last slot is padding: it fills a
batch up, and its length stays 0.
Letters: S slots + 1 | B slots of a batch | X = K+1 rows a pass leaves at most | V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.model.backlog import Backlog
from outrider.model.blocks import RotaryTable
from outrider.model.cache import NULL_PAGE
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.lookup import TokenHistory
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.sampling import SamplingMemory
from outrider.model.step import Grow, Join
from outrider.parallel.device import Device
from outrider.parallel.operands import Rows, SlotMemory


class SlotTensors:
    """Tensors by slot [S, ...]; the caches' block table and the sampling settings among them."""

    def __init__(self, model: ModelConfig, run: RunConfig, device: Device) -> None:
        self.run, self.device = run, device
        slots, rows = run.max_slots + 1, run.draft_tokens + 1
        where = device.torch_device
        num_positions = run.max_model_len + overshoot_rows(run.draft_tokens)
        self.max_pages = pages_for(num_positions, run.page_tokens)
        self.rotary = RotaryTable(model.attention, num_positions, device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=where)

        self.length, self.last, self.kept = integers(slots), integers(slots), integers(slots) + 1
        self.ones = integers(max(slots, *run.batch_buckets, 1)) + 1
        self.block_table = integers(slots, self.max_pages)
        self.fresh = integers(slots, rows)
        dtype = getattr(torch, run.dtype)
        self.hidden = torch.zeros(slots, rows, model.hidden_size, dtype=dtype, device=where)
        self.sampling = SamplingMemory(slots, rows, model.vocab_size, device)
        self.backlog = Backlog(slots if run.uses_mtp else 0, self.hidden)
        columns = self.max_pages * run.page_tokens
        self.history = TokenHistory(slots if run.uses_lookup else 0, columns, where)

    def tensors(self) -> list[Tensor]:
        return [self.length, self.last, self.kept, self.block_table, self.fresh, self.hidden]

    def memory(self, fold: Tensor) -> SlotMemory:
        """What an iteration reads at its start and writes at its end; fold: GdnStates.fold."""
        return SlotMemory(
            length=self.length,
            last=self.last,
            kept=self.kept,
            fold=fold,
            fresh=self.fresh,
            hidden=self.hidden,
        )

    def reset(self, join: Join) -> None:
        """Set a slot up for a new request; nothing of the last one remains."""
        slot = join.slot
        self.length[slot], self.kept[slot] = 0, 1
        self.block_table[slot].fill_(NULL_PAGE)
        self.block_table[slot, : len(join.pages)] = self.ints(join.pages)
        self.sampling.reset(join)
        self.hidden[slot].zero_()
        self.fresh[slot].zero_()

    def grow(self, grow: Grow, had: int) -> None:
        """Add pages behind the first `had` of a slot's block table."""
        self.block_table[grow.slot, had : had + len(grow.pages)] = self.ints(grow.pages)

    def ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Numbers of the host as int64 on the device."""
        # Through numpy: torch.tensor takes four times as long over a list of a prompt's length.
        return self.device.send(torch.from_numpy(np.array(values, dtype=np.int64)))

    def table_of(self, slots: Tensor, num_pages: int) -> Tensor:
        """The first num_pages pages of each of the slots [B] -> [B, num_pages] int64."""
        return self.block_table[slots, :num_pages]

    def rows(
        self,
        slots: Tensor,
        first: Tensor,
        counts: Tensor,
        num_rows: int,
        table: Tensor,
        *,
        shift: int = 0,
        more: int = 0,
        fold: Tensor | None = None,
        max_fold: int = 0,
        prefill: bool = False,
        host_lengths: list[int] | None = None,
    ) -> Rows:
        """The rows of a pass: num_rows of each slot, from its position first + shift on.

        Of them counts + more are real, the others are padding. slots, first, counts [B] int64;
        table [B, N] int64: the slots' pages (`table_of`). fold, max_fold, prefill, host_lengths: as
        in Rows.
        """
        cos, sin, page_tokens = self.rotary.cos, self.rotary.sin, self.run.page_tokens
        positions, index, cos, sin, lengths = self.device.ops.locate_rows(
            first, counts, table, cos, sin, num_rows, page_tokens, shift, more
        )
        return Rows(
            slots=slots,
            positions=positions,
            lengths=lengths,
            block_table=table,
            kv_index=index,
            counts=counts,
            cos=cos,
            sin=sin,
            fold=fold,
            max_fold=max_fold,
            prefill=prefill,
            host_lengths=host_lengths,
        )
