"""One rank's device work: prefill a chunk, or run an iteration over the decoding slots.

    draft pass 0 (kept rows, true hiddens) -> passes 1..K-1 -> verify K+1 rows -> accept -> commit

Nothing here reads a tensor back or waits for the device: counts, positions and tokens stay there.
Shapes: B slots of a batch | K drafts | R = K+1 rows | T prompt tokens of a chunk | H hidden | V
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.model.batch import DecodeBatch, PromptChunk
from outrider.model.cache import GdnStates, KvPages
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.mtp import MtpDraft
from outrider.model.plan import storages
from outrider.model.qwen3_5 import Qwen35
from outrider.model.slots import SlotTensors
from outrider.model.weights import head_share
from outrider.parallel.device import Device
from outrider.parallel.operands import GatheredSlots
from outrider.parallel.vocab import Fp8Head, LMHead

PICK_ROWS = 64
"""Rows whose logits are held at once: each takes a dozen times V numbers while it is picked."""

RunPiece = Callable[[int | str, Callable[[], Any]], Any]
"""(name, work) -> what the work returns. A number names a draft pass, "drafts" and "verify" the
rest of an iteration."""


def at_once(name: int | str, work: Callable[[], Any]) -> Any:
    return work()


class Drafter(Protocol):
    """What proposes tokens. Verification keeps the output exact whatever it says."""

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        """See prompt rows with the target's hiddens [B, T, H]."""
        ...

    def propose(self, batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        """at: where the batch's slots stand -> drafts [B, K] int64, the same on every rank."""
        ...

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        """See the rows of iterations without drafts, `width` a slot at most, before `batch`."""
        ...


class MtpDrafter:
    """Drafts with the checkpoint's MTP layer."""

    def __init__(self, draft: MtpDraft, head: LMHead | Fp8Head, slots: SlotTensors) -> None:
        self.draft, self.head, self.slots = draft, head, slots

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        table = self.slots.table_of(chunk.slots, chunk.num_pages)
        rows = self.slots.rows(chunk.slots, chunk.first, chunk.draft_counts, hidden.shape[1], table)
        self.draft.write_kv(hidden, chunk.following, rows)
        self.slots.backlog.clear(chunk.slots)

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        state, slots = self.slots, batch.slots
        owed = state.backlog
        count, table = owed.count[slots], state.table_of(slots, batch.num_pages)
        first = state.length[slots] - state.kept[slots] - count
        rows = state.rows(slots, first, count, width, table)
        self.draft.write_kv(owed.hidden[slots, :width], owed.fresh[slots, :width], rows)
        owed.clear(slots)

    def propose(self, batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        if batch.num_drafts == 0:
            run(0, lambda: self.slots.backlog.push(batch.slots, at))
            return batch.slots.new_empty(len(batch.slots), 0)
        m, draft = run(0, lambda: self._first_pass(batch, at))
        drafts = [draft]
        for i in range(1, batch.num_drafts):
            m, draft = run(i, partial(self._next_pass, i, batch, at, m, drafts[-1]))
            drafts.append(draft)
        return run("drafts", lambda: torch.stack(drafts, 1))

    def _first_pass(self, batch: DecodeBatch, at: GatheredSlots) -> tuple[Tensor, Tensor]:
        """The rows kept by the last pass -> hidden [B, 1, H] and draft [B]."""
        host_lengths = batch.host_lengths_of(0)
        rows = self.slots.rows(
            batch.slots, at.start, at.kept, batch.max_kept, at.table, host_lengths=host_lengths
        )
        m = self.draft(at.hidden, at.fresh, rows)
        last = (at.kept - 1)[:, None, None].expand(-1, 1, m.shape[-1])
        m = m.gather(1, last)
        return m, self.head.greedy(m.squeeze(1))

    def _next_pass(
        self, i: int, batch: DecodeBatch, at: GatheredSlots, m: Tensor, draft: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pass i: hidden and draft of the pass before -> the next [B, 1, H] and [B]."""
        slots, one = batch.slots, self.slots.ones[: len(batch.slots)]
        host_lengths = batch.host_lengths_of(i)
        rows = self.slots.rows(
            slots, at.length, one, 1, at.table, shift=i - 1, host_lengths=host_lengths
        )
        m = self.draft(m, draft.unsqueeze(1), rows)
        return m, self.head.greedy(m.squeeze(1))


class Executor:
    """Target, draft, caches and slot tensors of one rank."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, params: dict[str, Tensor], device: Device
    ) -> None:
        size, rank = device.tp.size, device.tp.rank
        self.device, self.run = device, run
        self.check: Callable[[Tensor, Tensor], Tensor] | None = None
        """(drafts, targets) -> drafts, before they are compared; an ablation's."""
        self.slots = SlotTensors(model, run, device)
        self.states = GdnStates(model, run, device)
        self.memory = self.slots.memory(fold=self.states.fold)
        heads = model.attention
        self.pages = KvPages(
            len(model.full_layers), heads.kv_heads_of(size), heads.head_dim, run, device
        )
        self.target = Qwen35(model, params, self.pages, self.states, device)
        table = params["embed_tokens.weight"]
        share = head_share(table, rank, size) if model.tie_word_embeddings else None
        self.head = LMHead(params["lm_head.weight"] if share is None else share, device)
        self.draft_pages: KvPages | None = None
        self.drafter: Drafter | None = None
        if run.draft_tokens:
            own = device if run.draft_body == "sharded" else device.local()
            self.draft_pages = KvPages(
                1, heads.kv_heads_of(own.tp.size), heads.head_dim, run, device
            )
            self.drafter = self._mtp_drafter(model, params, self.draft_pages, own)

    def _mtp_drafter(
        self, model: ModelConfig, params: dict[str, Tensor], pages: KvPages, own: Device
    ) -> MtpDrafter:
        """The draft body over `own` ranks; its head always over the target's group."""
        tensors = {n[len("mtp.") :]: t for n, t in params.items() if n.startswith("mtp.")}
        table, head = params["embed_tokens.weight"], self.head
        if model.mtp_dedicated_embeddings:
            table, group = tensors["embed_tokens.weight"], self.device.tp
            tied = model.tie_word_embeddings
            weight = (
                head_share(table, group.rank, group.size) if tied else tensors["lm_head.weight"]
            )
            head = LMHead(weight, self.device)
        scorer = Fp8Head(head) if self.run.draft_head == "fp8" else head
        return MtpDrafter(MtpDraft(model, tensors, table, pages, own), scorer, self.slots)

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of weights, states and KV; storage that is shared counts once."""
        other = storages([self.slots, self.states, self.pages, self.draft_pages])
        pages = [self.pages, *([self.draft_pages] if self.draft_pages else [])]
        slots = [self.states, self.slots.backlog]
        return {
            "weights": sum(n for where, n in storages(self).items() if where not in other),
            "states": sum(t.nbytes for held in slots for t in held.tensors()),
            "kv": sum(t.nbytes for held in pages for t in held.tensors()),
        }

    def prefill(self, chunk: PromptChunk) -> tuple[Tensor, Tensor] | None:
        """Run prompt tokens; of the prompts that end here, if any, -> the greedy first token [E]
        and the hidden that made it [E, H]."""
        state = self.slots
        rows = state.rows(
            chunk.slots,
            chunk.first,
            chunk.counts,
            chunk.tokens.shape[1],
            state.table_of(chunk.slots, chunk.num_pages),
            prefill=True,
            host_lengths=chunk.host_lengths,
        )
        hidden = self.target(chunk.tokens, rows)
        if self.drafter:
            self.drafter.prefill(chunk, hidden)
        self.states.fold.index_fill_(0, chunk.slots, 0)
        state.length[chunk.slots] = chunk.first + chunk.counts
        if chunk.ends is None:
            return None
        slots, at = chunk.slots[chunk.ends], chunk.counts[chunk.ends] - 1
        last = hidden[chunk.ends, at]  # [E, H]
        tokens = self.head.greedy(last)
        state.last[slots] = tokens
        state.kept.index_fill_(0, slots, 1)
        state.fresh[slots, 0], state.hidden[slots, 0] = tokens, last
        return tokens, last

    def pick_firsts(self, chunk: PromptChunk, tokens: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """What prefill returned -> tokens [E], picked anew for the slots that need whole logits.

        Where log probabilities are asked for, ids and values [E, 1, 1 + n] follow (`log_probs`).
        """
        if chunk.with_logits is None or chunk.ends is None:
            return (tokens,)
        state, slots = self.slots, chunk.slots[chunk.ends][chunk.with_logits]
        picked, *log_probs = self._pick_rows(
            last[chunk.with_logits], slots, state.length[slots], chunk
        )
        state.last[slots] = picked
        state.fresh[slots, 0] = picked
        return (
            tokens.index_copy(0, chunk.with_logits, picked),
            *(_spread(part.unsqueeze(1), chunk.with_logits, len(tokens)) for part in log_probs),
        )

    def iterate(self, batch: DecodeBatch, run: RunPiece = at_once) -> tuple[Tensor, ...]:
        """-> targets [B, K+1] int64 and kept [B]: slot b gains targets[b, :kept[b]].

        Where log probabilities are asked for, ids and values [B, K+1, 1 + n] follow (`log_probs`).
        """
        at = run("gather_slots", lambda: self._gather_slots(batch))
        if self.drafter:
            drafts = self.drafter.propose(batch, at, run)
        else:
            drafts = batch.slots.new_empty(len(batch.slots), 0)
        return run("verify", lambda: self._verify(batch, at, drafts))

    def _gather_slots(self, batch: DecodeBatch) -> GatheredSlots:
        table = self.slots.block_table[:, : batch.num_pages]
        return self.device.ops.gather_slots(batch.slots, self.memory, table, batch.max_kept)

    def _verify(self, batch: DecodeBatch, at: GatheredSlots, drafts: Tensor) -> tuple[Tensor, ...]:
        slots, ops, k = batch.slots, self.device.ops, batch.num_drafts
        rows = self.slots.rows(
            slots,
            at.length,
            batch.limits,
            k + 1,
            at.table,
            more=1,
            fold=at.fold,
            max_fold=batch.max_fold,
            host_lengths=batch.host_lengths_of(-1),
        )
        tokens = torch.cat((at.last.unsqueeze(1), drafts), 1)
        hidden = self.target(tokens, rows)
        targets, *log_probs = self._pick(hidden, batch, at.length, tokens)
        if self.check is not None:
            drafts = self.check(drafts, targets)
        kept = ops.accept_commit(slots, drafts, targets, batch.limits, hidden, self.memory)
        return (targets, kept, *log_probs)

    def _pick(
        self, hidden: Tensor, batch: DecodeBatch, length: Tensor, tokens: Tensor
    ) -> tuple[Tensor, ...]:
        """The target's token of every row [B, R]: its argmax, or its draw where a slot samples.

        tokens [B, R]: the rows' own. Then log probabilities, where asked for, as in `iterate`.
        """
        num_slots, num_rows = hidden.shape[:2]
        places, targets = batch.with_logits, length.new_empty(num_slots, num_rows)
        if batch.any_greedy:
            targets = self.head.greedy(hidden.flatten(0, 1)).view(num_slots, num_rows)
        if places is None:
            return (targets,)
        slots, first = batch.slots[places], length[places]
        if batch.features.edited:
            self.slots.edits.note(slots, first, tokens[places])
        ahead = torch.arange(1, num_rows + 1, device=length.device)
        picked, *log_probs = self._pick_rows(
            hidden[places].flatten(0, 1),
            slots.repeat_interleave(num_rows),
            (first.unsqueeze(1) + ahead).flatten(),
            batch,
        )
        uses = self.slots.needs_logits[slots].unsqueeze(1)
        picked = torch.where(uses, picked.view(-1, num_rows), targets[places])
        shaped = [part.view(len(places), num_rows, -1) for part in log_probs]
        return (
            targets.index_copy(0, places, picked),
            *(_spread(part, places, num_slots) for part in shaped),
        )

    def _pick_rows(
        self, hidden: Tensor, slots: Tensor, positions: Tensor, of: DecodeBatch | PromptChunk
    ) -> tuple[Tensor, ...]:
        """hidden [N, H] of rows of `slots` [N] that make the tokens at `positions` [N] -> [N].

        Then log probabilities [N, 1 + n], where asked for. Few rows at a time: a batch of logits
        may be larger than what is free beside the model.
        """
        num_positions = of.num_pages * self.run.page_tokens
        parts = [
            self.slots.pick(self.head.logits(part), owners, places, of.features, num_positions)
            for part, owners, places in zip(
                hidden.split(PICK_ROWS), slots.split(PICK_ROWS), positions.split(PICK_ROWS)
            )
        ]
        return tuple(torch.cat(part) for part in zip(*parts))


def _spread(part: Tensor, places: Tensor, size: int) -> Tensor:
    """Rows [n, ...] at `places` [n] of a tensor [size, ...]; the others are zero."""
    return part.new_zeros(size, *part.shape[1:]).index_copy(0, places, part)
