"""One rank's device work: prefill a chunk, or run an iteration over the decoding slots.

    draft pass 0 (kept rows, true hiddens) -> passes 1..K-1 -> verify K+1 rows -> accept -> commit

Nothing here reads a tensor back or waits for the device: counts, positions and tokens stay there.
Shapes: B slots of a batch | K drafts | R = K+1 rows | T prompt tokens of a chunk | H hidden | V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.cache import GdnStates, KvPages
from model.config import ModelConfig, RunConfig
from model.edits import NO_WISHES, Wishes
from model.mtp import MtpDraft
from model.qwen3_5 import Qwen35
from model.slots import SlotTensors
from model.verify import accept
from model.weights import head_share
from parallel.device import Device
from parallel.vocab import Fp8Head, LMHead


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Who takes part in an iteration, decided by the host."""

    slots: Tensor
    """[B] int64, padding slots included"""
    limits: Tensor
    """[B] int64: drafts each slot takes, at most K"""
    num_drafts: int
    """K of this iteration"""
    width: int
    """Most rows any slot kept in its last pass: rows of draft pass 0"""
    waiting: int
    """Most rows whose factors wait to be folded; 0 when all slots come from prefill"""
    num_pages: int
    sampled: Tensor | None
    """Indices into `slots` of those that need all logits; None when (value, id) pairs will do"""
    wishes: Wishes = NO_WISHES
    """What they need them for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompt tokens of some slots, padded to one width."""

    slots: Tensor
    """[B] int64"""
    tokens: Tensor
    """[B, T] int64"""
    following: Tensor
    """[B, T] int64: tokens shifted left by one; 0 where the next token is not known yet"""
    first: Tensor
    """[B] int64: position of the first token"""
    counts: Tensor
    """[B] int64: real tokens"""
    known: Tensor
    """[B] int64: rows whose following token is known (counts, less one at a prompt's end)"""
    ends: Tensor | None
    """Indices into `slots` of prompts that end here; None when none does"""
    num_pages: int
    sampled: Tensor | None
    """Indices into `ends` of those that need all logits"""
    wishes: Wishes = NO_WISHES


class Drafter(Protocol):
    """What proposes tokens. Verification keeps the output exact whatever it says."""

    def observe(self, chunk: Chunk, hidden: Tensor) -> None:
        """See prompt rows with the target's hiddens [B, T, H]."""
        ...

    def propose(self, batch: Batch) -> Tensor:
        """-> drafts [B, K] int64, the same on every rank."""
        ...


class MtpDrafter:
    """Drafts with the checkpoint's MTP layer."""

    def __init__(self, draft: MtpDraft, head: LMHead | Fp8Head, slots: SlotTensors) -> None:
        self.draft, self.head, self.slots = draft, head, slots

    def observe(self, chunk: Chunk, hidden: Tensor) -> None:
        table = self.slots.table_of(chunk.slots, chunk.num_pages)
        rows = self.slots.rows(chunk.slots, chunk.first, chunk.known, hidden.shape[1], table)
        self.draft(hidden, chunk.following, rows)

    def propose(self, batch: Batch) -> Tensor:
        """Pass 0 always runs: it refreshes the draft's KV even when nothing is drafted."""
        state, slots = self.slots, batch.slots
        kept, length = state.kept[slots], state.length[slots]
        table = state.table_of(slots, batch.num_pages)
        rows = state.rows(slots, length - kept, kept, batch.width, table)
        m = self.draft(state.hidden[slots, : batch.width], state.fresh[slots, : batch.width], rows)
        if not batch.num_drafts:
            return slots.new_empty(len(slots), 0)
        last = (kept - 1)[:, None, None].expand(-1, 1, m.shape[-1])
        m = m.gather(1, last)  # [B, 1, H]
        drafts = [self.head.greedy(m.squeeze(1))]
        one = torch.ones_like(kept)
        for i in range(1, batch.num_drafts):
            rows = state.rows(slots, length + (i - 1), one, 1, table)
            m = self.draft(m, drafts[-1].unsqueeze(1), rows)
            drafts.append(self.head.greedy(m.squeeze(1)))
        return torch.stack(drafts, 1)


class Iteration:
    """Target, draft, caches and slot tensors of one rank."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, params: dict[str, Tensor], device: Device
    ) -> None:
        size, rank = device.tp.size, device.tp.rank
        self.device, self.run = device, run
        self.slots = SlotTensors(model, run, device)
        self.states = GdnStates(model, run, device)
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

    def prefill(self, chunk: Chunk) -> tuple[Tensor, ...] | None:
        """Run prompt tokens; -> the first token [E] of each prompt that ends here, or None.

        Where log probabilities are wished, those of the sampled prompts follow (`log_probs`).
        """
        state = self.slots
        rows = state.rows(
            chunk.slots,
            chunk.first,
            chunk.counts,
            chunk.tokens.shape[1],
            state.table_of(chunk.slots, chunk.num_pages),
            prefill=True,
        )
        hidden = self.target(chunk.tokens, rows)
        if self.drafter:
            self.drafter.observe(chunk, hidden)
        self.states.kept.index_fill_(0, chunk.slots, 0)
        state.length[chunk.slots] = chunk.first + chunk.counts
        if chunk.ends is None:
            return None
        slots, at = chunk.slots[chunk.ends], chunk.counts[chunk.ends] - 1
        last = hidden[chunk.ends, at]  # [E, H]
        tokens, known = self.head.greedy(last), ()
        if chunk.sampled is not None:
            who = slots[chunk.sampled]
            logits, reach = self.head.logits(last[chunk.sampled]), self._reach(chunk)
            picked, *known = state.pick(logits, who, state.length[who], chunk.wishes, reach)
            tokens = tokens.index_copy(0, chunk.sampled, picked)
        state.last[slots] = tokens
        state.kept.index_fill_(0, slots, 1)
        state.fresh[slots, 0], state.hidden[slots, 0] = tokens, last
        return (tokens, *known)

    def iterate(self, batch: Batch) -> tuple[Tensor, ...]:
        """-> targets [B, K+1] int64 and kept [B]: slot b gains targets[b, :kept[b]].

        Where log probabilities are wished, those of the sampled slots' rows follow (`log_probs`).
        """
        state, slots, k = self.slots, batch.slots, batch.num_drafts
        if self.drafter:
            drafts = self.drafter.propose(batch)
        else:
            drafts = slots.new_empty(len(slots), 0)
        length, table = state.length[slots], state.table_of(slots, batch.num_pages)
        rows = state.rows(slots, length, batch.limits + 1, k + 1, table, waiting=batch.waiting)
        tokens = torch.cat((state.last[slots].unsqueeze(1), drafts), 1)
        hidden = self.target(tokens, rows)
        targets, *known = self._pick(hidden, batch, length, tokens)
        kept = accept(drafts, targets, batch.limits)
        self.states.commit(slots, kept)
        state.length[slots] = length + kept
        state.kept[slots] = kept
        state.last[slots] = targets.gather(1, (kept - 1).unsqueeze(1)).squeeze(1)
        if self.drafter:
            state.fresh[slots, : k + 1] = targets
            state.hidden[slots, : k + 1] = hidden
        return (targets, kept, *known)

    def _reach(self, of: Batch | Chunk) -> int:
        return of.num_pages * self.run.page_tokens

    def _pick(
        self, hidden: Tensor, batch: Batch, length: Tensor, tokens: Tensor
    ) -> tuple[Tensor, ...]:
        """The target's token of every row [B, R]: its argmax, or its draw where a slot samples.

        tokens [B, R]: the rows' own. Then the log probabilities, where wished.
        """
        num_slots, num_rows = hidden.shape[:2]
        who = batch.sampled
        if who is None or len(who) < num_slots:
            targets = self.head.greedy(hidden.flatten(0, 1)).view(num_slots, num_rows)
        else:
            targets = length.new_empty(num_slots, num_rows)
        if who is None:
            return (targets,)
        owners, first = batch.slots[who], length[who]
        if batch.wishes.edited:
            self.slots.edits.note(owners, first, tokens[who])
        ahead = torch.arange(1, num_rows + 1, device=length.device)
        picked, *known = self.slots.pick(
            self.head.logits(hidden[who].flatten(0, 1)),
            owners.repeat_interleave(num_rows),
            (first.unsqueeze(1) + ahead).flatten(),
            batch.wishes,
            self._reach(batch),
        )
        return (targets.index_copy(0, who, picked.view(len(who), num_rows)), *known)
