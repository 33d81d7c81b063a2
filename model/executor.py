"""One rank's device work: run a chunk of prompts, or an iteration over the slots that decode.

    draft pass 0 (kept rows, true hiddens) -> passes 1..K-1 -> verify K+1 rows -> accept -> commit

Nothing here reads a tensor back or waits for the device: counts, positions and tokens stay there.
It holds the target, the draft, and all memory that is kept between passes.
Shapes: B slots of a batch | K drafts | R = K+1 rows | T prompt tokens of a chunk | E prompts that
        end in it | N rows of any slots | H hidden | V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.model.batch import DecodeBatch, PromptChunk
from outrider.model.blocks import Params
from outrider.model.cache import GdnStates, KvPages, Snapshots
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.lookup import LONG_MATCH
from outrider.model.mtp import MtpDraft
from outrider.model.plan import storages
from outrider.model.qwen3_5 import Qwen35
from outrider.model.sampling import NO_FEATURES
from outrider.model.slots import SlotTensors
from outrider.model.step import MAX_LOGPROBS, Restore
from outrider.model.weights import head_share
from outrider.parallel.device import Device
from outrider.parallel.operands import GatheredSlots, PickRows, SamplingFeatures
from outrider.parallel.vocab import Fp8Head, LMHead

SCORED_ROWS = 64
"""The most rows of a prompt whose logits are held at a time, to make log probabilities of them."""

RunPiece = Callable[[int | str, Callable[[], Any]], Any]
"""(name of a piece of an iteration, its work) -> what the work returns. Draft passes are named by
their number, the other pieces "gather_slots", "lookup", "drafts" and "verify"."""


def run_at_once(name: int | str, work: Callable[[], Any]) -> Any:
    """A RunPiece that does nothing but the work."""
    return work()


class Drafter(Protocol):
    """What proposes tokens. The target verifies them, so the output is exact whatever they are."""

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        """Remember the rows of a prompt chunk; hidden [B, T, H]: the target's."""
        ...

    def resume(self, slot: int, prompt: Sequence[int], num_rows: int, hidden: Tensor) -> None:
        """Remember the first num_rows rows of a slot's prompt, whose pages it shares; hidden [H]:
        the target's, of the last of them."""
        ...

    def propose(self, batch: DecodeBatch, gathered: GatheredSlots, run: RunPiece) -> Tensor:
        """-> drafts [B, K] int64, the same on every rank. gathered: what the slots remember."""
        ...

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        """Remember the rows of iterations that drafted nothing, before `batch` runs.

        width: the most of them that any slot has.
        """
        ...


class MtpDrafter:
    """Drafts with the checkpoint's MTP layer, which remembers rows as keys and values."""

    def __init__(self, draft: MtpDraft, head: LMHead, slots: SlotTensors) -> None:
        self.draft, self.head, self.slots = draft, head, slots
        self.coupled = True
        """Whether a sampled slot's drafts are drawn with the noise of the target's own rows."""

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        table = self.slots.table_of(chunk.slots, chunk.num_pages)
        rows = self.slots.rows(chunk.slots, chunk.first, chunk.draft_counts, hidden.shape[1], table)
        self.draft.write_kv(hidden, chunk.following, rows)
        self.slots.backlog.clear(chunk.slots)

    def resume(self, slot: int, prompt: Sequence[int], num_rows: int, hidden: Tensor) -> None:
        """The last row depends on the token that follows it. Where that is not known yet, the next
        iteration writes the row, as after any prompt."""
        slots = self.slots.ints([slot])
        self.slots.backlog.clear(slots)
        if num_rows == len(prompt):
            return
        first, token = self.slots.ints([num_rows - 1]), self.slots.ints([[prompt[num_rows]]])
        table = self.slots.table_of(slots, self.slots.max_pages)
        rows = self.slots.rows(slots, first, self.slots.ones[:1], 1, table)
        self.draft.write_kv(hidden.view(1, 1, -1), token, rows)

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        slots, backlog = batch.slots, self.slots.backlog
        counts, table = backlog.count[slots], self.slots.table_of(slots, batch.num_pages)
        first = self.slots.length[slots] - self.slots.kept[slots] - counts
        rows = self.slots.rows(slots, first, counts, width, table)
        self.draft.write_kv(backlog.hidden[slots, :width], backlog.fresh[slots, :width], rows)
        backlog.clear(slots)

    def propose(self, batch: DecodeBatch, gathered: GatheredSlots, run: RunPiece) -> Tensor:
        if batch.num_drafts == 0:
            if self.slots.run.auto_depth:  # without it, no request of this batch ever drafts
                run(0, lambda: self.slots.backlog.push(batch.slots, gathered))
            return batch.slots.new_empty(len(batch.slots), 0)
        hidden, draft = run(0, lambda: self._first_pass(batch, gathered))
        drafts = [draft]
        for i in range(1, batch.num_drafts):
            hidden, draft = run(i, partial(self._next_pass, batch, gathered, hidden, [*drafts]))
            drafts.append(draft)
        return run("drafts", lambda: torch.stack(drafts, 1))

    def _first_pass(self, batch: DecodeBatch, gathered: GatheredSlots) -> tuple[Tensor, Tensor]:
        """Pass 0 over the rows that the last verify pass kept -> hidden [B, 1, H], draft [B]."""
        rows = self.slots.rows(
            batch.slots,
            gathered.start,
            gathered.kept,
            batch.max_kept,
            gathered.table,
            host_lengths=batch.host_lengths_of(0),
        )
        hidden = self.draft(gathered.hidden, gathered.fresh, rows)
        last = (gathered.kept - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        hidden = hidden.gather(1, last)
        return hidden, self._choose(hidden, batch, gathered, [])

    def _next_pass(
        self, batch: DecodeBatch, gathered: GatheredSlots, hidden: Tensor, drafts: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The pass after those that made `drafts` [B], over one row a slot: the last one's hidden
        [B, 1, H] -> its own, and a draft."""
        i = len(drafts)
        rows = self.slots.rows(
            batch.slots,
            gathered.length,
            self.slots.ones[: len(batch.slots)],
            1,
            gathered.table,
            shift=i - 1,
            host_lengths=batch.host_lengths_of(i),
        )
        hidden = self.draft(hidden, drafts[-1].unsqueeze(1), rows)
        return hidden, self._choose(hidden, batch, gathered, drafts)

    def _choose(
        self, hidden: Tensor, batch: DecodeBatch, gathered: GatheredSlots, drafts: list[Tensor]
    ) -> Tensor:
        """The draft [B] that follows `drafts`, from hidden [B, 1, H].

        The target keeps a draft that equals its own token. So the draft is picked as the target
        picks that token: with the same edits, filters and noise, from the draft's logits.
        """
        features = replace(batch.features, logprobs=None, masked=False)
        if features == NO_FEATURES or not self.coupled:
            return self.head.greedy(hidden.squeeze(1))
        rows = PickRows(
            slots=batch.slots,
            last=gathered.length,
            shift=len(drafts),
            drafts=torch.stack(drafts, 1) if drafts and features.edited else None,
            noise=gathered.noise,
        )
        by_slot = self.slots.sampling.by_slot
        return self.head.pick(hidden, rows, by_slot, features, exact=False)[0].squeeze(1)


class LookupDrafter:
    """Drafts what followed the last tokens where they stood before in the request."""

    def __init__(self, slots: SlotTensors) -> None:
        self.history, self.page_tokens = slots.history, slots.run.page_tokens
        self.ints = slots.ints

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        self.history.write(chunk.slots, chunk.first, chunk.tokens, chunk.counts)

    def resume(self, slot: int, prompt: Sequence[int], num_rows: int, hidden: Tensor) -> None:
        slots, first, counts = (self.ints([number]) for number in (slot, 0, num_rows))
        self.history.write(slots, first, self.ints([prompt[:num_rows]]), counts)

    def propose(self, batch: DecodeBatch, gathered: GatheredSlots, run: RunPiece) -> Tensor:
        return run("lookup", lambda: self.look(batch, gathered))[0]

    def look(self, batch: DecodeBatch, gathered: GatheredSlots) -> tuple[Tensor, Tensor]:
        """Remember the tokens that the last pass kept; -> as TokenHistory.find."""
        self.history.write(batch.slots, gathered.start + 1, gathered.fresh, gathered.kept)
        most = batch.num_pages * self.page_tokens
        return self.history.find(batch.slots, gathered.length, batch.num_drafts, most)

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        """Nothing waits: every iteration writes its tokens, whether it drafts or not."""


class MtpOrLookup:
    """Drafts with the MTP layer, and by looking where at least LONG_MATCH tokens stood before."""

    def __init__(self, mtp: Drafter, lookup: LookupDrafter) -> None:
        self.mtp, self.lookup = mtp, lookup

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        self.lookup.prefill(chunk, hidden)
        self.mtp.prefill(chunk, hidden)

    def resume(self, slot: int, prompt: Sequence[int], num_rows: int, hidden: Tensor) -> None:
        for drafter in (self.lookup, self.mtp):
            drafter.resume(slot, prompt, num_rows, hidden)

    def propose(self, batch: DecodeBatch, gathered: GatheredSlots, run: RunPiece) -> Tensor:
        found, matched = run("lookup", lambda: self.lookup.look(batch, gathered))
        drafts = self.mtp.propose(batch, gathered, run)
        return torch.where((matched >= LONG_MATCH).unsqueeze(1), found, drafts)

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        self.mtp.catch_up(batch, width)


class Executor:
    """The target, the draft, the caches and the slot tensors of one rank."""

    def __init__(self, model: ModelConfig, run: RunConfig, params: Params, device: Device) -> None:
        size, rank = device.tp.size, device.tp.rank
        self.device, self.run = device, run
        self.check_drafts: Callable[[Tensor, Tensor], Tensor] | None = None
        """An ablation's: (drafts, targets) -> the drafts that are compared with the targets."""
        self.slots = SlotTensors(model, run, device)
        self.states = GdnStates(model, run, device)
        self.memory = self.slots.memory(fold=self.states.fold)
        heads = model.attention
        self.pages = KvPages(
            len(model.full_layers), heads.kv_heads_of(size), heads.head_dim, run, device
        )
        self.snapshots = Snapshots(
            self.states, model.gdn.conv_kernel - 1, model.hidden_size, run.num_snapshots
        )
        self.target = Qwen35(model, params, self.pages, self.states, device)
        table = params["embed_tokens.weight"]
        share = head_share(table, rank, size) if model.tie_word_embeddings else None
        self.head = LMHead(params["lm_head.weight"] if share is None else share, device)
        self.draft_pages: KvPages | None = None
        self.drafter: Drafter | None = None
        if run.uses_mtp:
            body_device = device if run.draft_body == "sharded" else device.local()
            kv_heads = heads.kv_heads_of(body_device.tp.size)
            self.draft_pages = KvPages(1, kv_heads, heads.head_dim, run, device)
            self.drafter = self._mtp_drafter(model, params, self.draft_pages, body_device)
        if run.uses_lookup:
            lookup = LookupDrafter(self.slots)
            self.drafter = MtpOrLookup(self.drafter, lookup) if self.drafter else lookup

    def _mtp_drafter(
        self, model: ModelConfig, params: Params, pages: KvPages, body_device: Device
    ) -> MtpDrafter:
        """The draft, its body over the group of body_device, its head over the target's group."""
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
        return MtpDrafter(MtpDraft(model, tensors, table, pages, body_device), scorer, self.slots)

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes held as "weights", "states", "kv", "snapshots"; shared storage counts once."""
        memory = storages([self.slots, self.states, self.pages, self.draft_pages, self.snapshots])
        pages = [self.pages, *([self.draft_pages] if self.draft_pages else [])]
        by_slot = [*self.states.tensors(), *self.slots.backlog.tensors()]
        by_slot += [*self.slots.sampling.tables(), *self.slots.history.tensors()]
        return {
            "weights": sum(n for address, n in storages(self).items() if address not in memory),
            "states": sum(t.nbytes for t in by_slot),
            "kv": sum(t.nbytes for part in pages for t in part.tensors()),
            "snapshots": sum(t.nbytes for t in self.snapshots.tensors()),
        }

    def prefill(self, chunk: PromptChunk) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Run a chunk's prompt tokens through the target and the draft.

        -> the target's hiddens [B, T, H], valid until its next pass; and of the prompts that end in
        the chunk the greedy first tokens [E] int64 with the hiddens [E, H] that made them, or None
        when no prompt ends.
        """
        rows = self.slots.rows(
            chunk.slots,
            chunk.first,
            chunk.counts,
            chunk.tokens.shape[1],
            self.slots.table_of(chunk.slots, chunk.num_pages),
            prefill=True,
            host_lengths=chunk.host_lengths,
        )
        hidden = self.target(chunk.tokens, rows)
        if self.drafter:
            self.drafter.prefill(chunk, hidden)
        self.states.fold.index_fill_(0, chunk.slots, 0)
        self.slots.length[chunk.slots] = chunk.first + chunk.counts
        if chunk.ends is None:
            return hidden, None
        slots, last_rows = chunk.slots[chunk.ends], chunk.counts[chunk.ends] - 1
        last_hidden = hidden[chunk.ends, last_rows]  # [E, H]
        tokens = self.head.greedy(last_hidden)
        self.slots.last[slots] = tokens
        self.slots.kept.index_fill_(0, slots, 1)
        self.slots.fresh[slots, 0], self.slots.hidden[slots, 0] = tokens, last_hidden
        return hidden, (tokens, last_hidden)

    def score_prompt(self, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the tokens that follow rows of a prompt.

        hidden [N, H] of prefill, following [N] int64, both of real rows alone -> ids int64 and
        values float32 [N, 1 + MAX_LOGPROBS] (sampling.log_probs).
        """
        pieces = zip(hidden.split(SCORED_ROWS), following.split(SCORED_ROWS))
        scores = [self.head.log_probs(rows, tokens, MAX_LOGPROBS) for rows, tokens in pieces]
        ids, values = zip(*scores)
        return torch.cat(ids), torch.cat(values)

    def score_ids(self, hidden: Tensor, ids: Sequence[int]) -> Tensor:
        """hidden [N, H] of rows, and token ids -> log probabilities [N, n] of each behind each."""
        return self.head.log_probs_of(hidden, self.slots.ints(ids))

    def begin(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As prefill returns of prompts that end, for slots [E] all of whose rows were restored."""
        hidden = self.slots.hidden[slots, 0]
        tokens = self.head.greedy(hidden)
        self.slots.last[slots] = tokens
        self.slots.fresh[slots, 0] = tokens
        return tokens, hidden

    def save(self, slot: int, place: int, hidden: Tensor) -> None:
        """Save a slot's state right after a chunk of its prompt; hidden [H]: of the last row."""
        self.snapshots.save(place, self.states, slot, hidden)

    def restore(self, slot: int, saved: Restore, prompt: Sequence[int]) -> None:
        """Begin a slot, which was reset, behind rows of its prompt that another request has run."""
        hidden = self.snapshots.restore(saved.snapshot, self.states, slot)
        for pages in (self.pages, self.draft_pages):
            if pages is not None:
                pages.copy(saved.copied_page, saved.page)
        self.slots.length[slot] = saved.rows
        self.slots.hidden[slot, 0] = hidden
        if self.drafter:
            self.drafter.resume(slot, prompt, saved.rows, hidden)

    def pick_firsts(
        self, slots: Tensor, features: SamplingFeatures, tokens: Tensor, last_hidden: Tensor
    ) -> tuple[Tensor, ...]:
        """The first tokens [E, 1] of prompts, picked as the requests of slots [E] say; -1 where a
        hidden is not a number.

        features: what they need. tokens, last_hidden: what prefill returned of them. Where log
        probabilities are asked for, their ids and values [E, 1, 1 + n] follow (sampling.log_probs).
        """
        broken = _has_nan(last_hidden).unsqueeze(1)
        if features == NO_FEATURES:
            return (tokens.unsqueeze(1).masked_fill(broken, -1),)
        memory = self.slots.sampling
        rows = PickRows(slots=slots, last=self.slots.length[slots] - 1)
        hidden = last_hidden.unsqueeze(1)
        picked, *log_probs = self.head.pick(hidden, rows, memory.by_slot, features)
        self.slots.last[slots] = picked.squeeze(1)
        self.slots.fresh[slots, 0] = picked.squeeze(1)
        if features.edited:
            self._count_tokens(slots, picked, torch.ones_like(slots))
        return (picked.masked_fill(broken, -1), *log_probs)

    def set_lasts(self, lasts: dict[int, int]) -> None:
        """Go on behind tokens that are known already, by slot, in place of prefill's first ones."""
        slots, tokens = (self.slots.ints(list(part)) for part in (lasts, lasts.values()))
        self.slots.last[slots] = tokens
        self.slots.fresh[slots, 0] = tokens

    def iterate(self, batch: DecodeBatch, run: RunPiece = run_at_once) -> tuple[Tensor, ...]:
        """Draft, verify, accept and commit.

        -> targets [B, K+1] int64 and kept [B] int64: the b-th slot gains targets[b, :kept[b]]; kept
        is -1 where a hidden of the slot is not a number. Where log probabilities are asked for,
        their ids and values [B, K+1, 1 + n] follow (sampling.log_probs). run: runs each piece.
        """
        gathered, drafts = self.draft(batch, run)
        return run("verify", lambda: self.verify(batch, gathered, drafts))

    def draft(
        self, batch: DecodeBatch, run: RunPiece = run_at_once
    ) -> tuple[GatheredSlots, Tensor]:
        """The first part of an iteration: what the slots remember, and drafts [B, K] int64."""
        gathered = run("gather_slots", lambda: self._gather_slots(batch))
        if self.drafter:
            return gathered, self.drafter.propose(batch, gathered, run)
        return gathered, batch.slots.new_empty(len(batch.slots), 0)

    def _gather_slots(self, batch: DecodeBatch) -> GatheredSlots:
        table, ops = self.slots.block_table[:, : batch.num_pages], self.device.ops
        gathered = ops.gather_slots(batch.slots, self.memory, table, batch.max_kept)
        if not batch.features.drawn:
            return gathered
        memory, num_rows = self.slots.sampling, batch.num_drafts + 1
        noise = ops.noise_ahead(
            batch.slots, gathered.length, num_rows, memory.by_slot, memory.first_id
        )
        return replace(gathered, noise=noise)

    def verify(
        self, batch: DecodeBatch, gathered: GatheredSlots, drafts: Tensor
    ) -> tuple[Tensor, ...]:
        """The second part: the target over [last token, drafts], then accept and commit.

        -> as iterate.
        """
        rows = self.slots.rows(
            batch.slots,
            gathered.length,
            batch.limits,
            batch.num_drafts + 1,
            gathered.table,
            more=1,
            fold=gathered.fold,
            max_fold=batch.max_fold,
            host_lengths=batch.host_lengths_of(-1),
        )
        tokens = torch.cat((gathered.last.unsqueeze(1), drafts), 1)
        hidden = self.target(tokens, rows)
        targets, *log_probs = self._pick(hidden, batch, gathered, drafts)
        if self.check_drafts is not None:
            drafts = self.check_drafts(drafts, targets)
        kept = self.device.ops.accept_commit(
            batch.slots, drafts, targets, batch.limits, hidden, self.memory
        )
        if batch.features.edited:
            self._count_tokens(batch.slots, targets, kept)
        return (targets, kept.masked_fill(_has_nan(hidden), -1), *log_probs)

    def _pick(
        self, hidden: Tensor, batch: DecodeBatch, gathered: GatheredSlots, drafts: Tensor
    ) -> tuple[Tensor, ...]:
        """The target's own token of every row [B, R]; then log probabilities as in iterate.

        hidden [B, R, H]; drafts [B, K]: the tokens in the rows after each slot's first.
        """
        if batch.features == NO_FEATURES:
            return (self.head.greedy(hidden.flatten(0, 1)).view(hidden.shape[:2]),)
        rows = PickRows(
            slots=batch.slots, last=gathered.length, drafts=drafts, noise=gathered.noise
        )
        return self.head.pick(hidden, rows, self.slots.sampling.by_slot, batch.features)

    def _count_tokens(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Add the first counts[b] of the tokens [B, R] to the answers that edits look at."""
        memory = self.slots.sampling
        self.device.ops.count_tokens(memory.history, slots, tokens, counts, memory.first_id)


def _has_nan(hidden: Tensor) -> Tensor:
    """hidden [N, ...] -> [N] bool: where it holds something that is not a number, or infinities of
    both signs. Every rank has the same hiddens, and so the same answer."""
    return hidden.flatten(1).sum(1).isnan()
