"""The slots' numbers on the device: where each request stands and how it samples.

    length P: rows the caches hold     last: token P, not yet a row     kept: rows of the last pass
    hidden, fresh [X]: the kept rows' hiddens h_t and the tokens x_{t+1} that followed them

On the device, so that an iteration can be enqueued before the last one was read. The last index is
the padding slot. Letters: S slots + 1 | X = K+1 rows a pass leaves | N pages a slot may use
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model.backlog import Backlog
from outrider.model.blocks import RotaryTable
from outrider.model.cache import NULL_PAGE
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.edits import LogitEdits, SamplingFeatures, log_probs
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.sample import draw, uniform
from outrider.model.step import Join
from outrider.parallel.device import Device
from outrider.parallel.operands import Rows, SlotMemory


class SlotTensors:
    """Tensors by slot, and the `Rows` of a pass made from them."""

    def __init__(self, model: ModelConfig, run: RunConfig, device: Device) -> None:
        self.run, self.device = run, device
        slots, rows = run.max_slots + 1, run.draft_tokens + 1
        where = device.torch_device
        positions = run.max_model_len + overshoot_rows(run.draft_tokens)
        self.max_pages = pages_for(positions, run.page_tokens)
        self.rotary = RotaryTable(model.attention, positions, device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=where)

        self.length, self.last, self.kept = integers(slots), integers(slots), integers(slots) + 1
        self.ones = integers(max(slots, *run.batch_buckets, 1)) + 1
        self.block_table = integers(slots, self.max_pages)
        self.fresh = integers(slots, rows)
        dtype = getattr(torch, run.dtype)
        self.hidden = torch.zeros(slots, rows, model.hidden_size, dtype=dtype, device=where)
        self.needs_logits = torch.zeros(slots, dtype=torch.bool, device=where)
        self.seed, self.top_k = integers(slots), integers(slots)
        self.temperature, self.top_p, self.min_p = torch.zeros(3, slots, device=where)
        self.edits = LogitEdits(slots, positions, device, num_eos=len(model.eos_ids))
        self.backlog = Backlog(slots if run.draft_tokens else 0, self.hidden)

    def tensors(self) -> list[Tensor]:
        return [self.length, self.last, self.kept, self.block_table, self.fresh, self.hidden]

    def memory(self, fold: Tensor) -> SlotMemory:
        """What an iteration's end writes; fold: of the GDN states."""
        return SlotMemory(
            length=self.length,
            last=self.last,
            kept=self.kept,
            fold=fold,
            fresh=self.fresh,
            hidden=self.hidden,
        )

    def reset(self, join: Join) -> None:
        """Hand a slot to a new request."""
        slot, how = join.slot, join.sampling
        self.length[slot], self.kept[slot] = 0, 1
        pages = torch.tensor(join.pages, dtype=torch.int64)
        self.block_table[slot].fill_(NULL_PAGE)
        self.block_table[slot, : len(join.pages)] = self.device.send(pages)
        self.seed[slot], self.top_k[slot] = how.seed or 0, how.top_k
        self.temperature[slot] = how.temperature
        self.needs_logits[slot] = how.needs_logits
        self.top_p[slot], self.min_p[slot] = how.top_p, how.min_p
        self.edits.reset(join)
        self.hidden[slot].zero_()
        self.fresh[slot].zero_()

    def table_of(self, slots: Tensor, num_pages: int) -> Tensor:
        """The first num_pages of the slots' block tables [B, N]."""
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
        """Rows from position first + shift of each slot; counts + more of them real, else padding.

        slots, first, counts [B] int64; table [B, N]: the slots' pages (`table_of`). A verify pass
        says how many rows of the last one to fold [B], and how many there may be (max_fold).
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

    def pick(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        features: SamplingFeatures,
        num_positions: int,
    ) -> tuple[Tensor, ...]:
        """logits [N, V] of rows of `slots` [N] that make the tokens at `positions` [N] -> [N].

        Where log probabilities are asked for, those follow as in `log_probs`. All positions are
        below num_positions.
        """
        edited = logits
        if features.edited:
            edited = self.edits.apply(logits, slots, positions, num_positions)
        tokens = edited.argmax(-1)
        if features.drawn:
            warm = self.temperature[slots]
            drawn = draw(
                edited,
                torch.where(warm > 0, warm, 1.0),
                self.top_k[slots],
                self.top_p[slots],
                self.min_p[slots],
                uniform(self.seed[slots], positions),
            )
            tokens = torch.where(warm > 0, drawn, tokens)
        if features.logprobs is None:
            return (tokens,)
        return (tokens, *log_probs(logits, tokens, features.logprobs))
