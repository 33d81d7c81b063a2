"""One rank's engine: a table of slots on the host, an Executor on the device.

    apply(Join, Leave) -> step(): a prefill chunk, then an iteration -> [Progress]

Every rank applies the same commands and reads the same tokens, so each decides ends (EOS, stop id,
length) for itself and all agree. The only place that reads tensors back is `_collect`.
Letters: K drafted tokens | R = K+1 rows a slot | B slots of a batch
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.model import ablation, backlog
from outrider.model.config import RunConfig, load_config
from outrider.model.edits import SamplingFeatures
from outrider.model.executor import DecodeBatch, Drafter, Executor, PromptChunk
from outrider.model.plan import (
    check_device,
    check_pages,
    memory_plan,
    overshoot_rows,
    pages_for,
    powers_of_two,
)
from outrider.model.running import InFlightStep, RunningRequest, log_probs_of, padded
from outrider.model.step import Join, Leave, Progress, Sampling
from outrider.model.weights import load, settle_head
from outrider.parallel.device import Device, Fetched
from outrider.parallel.graph import Graphs

MAX_CAPTURED_ROWS = 2048
"""Widest prompt chunk that is captured; more of a prompt is several replays."""


class Runner:
    """Loads a rank's share of the model and runs steps.

    on_load(bytes read, bytes in all) is called while weights load. Raises ConfigError when the
    checkpoint cannot be run so.
    """

    def __init__(
        self,
        run: RunConfig,
        device: Device,
        *,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.run, self.device = run, ablation.old_device(device, run.ablation)
        model = settle_head(load_config(Path(run.model_dir)), Path(run.model_dir))
        gdn = replace(model.gdn, coarse_state=model.gdn.coarse_state and run.coarse_state)
        self.model = replace(model, gdn=gdn)
        check_device(run, device.capabilities)
        check_pages(run, memory_plan(self.model, run))
        params = load(self.model, run, device.tp.rank, device.torch_device, on_load)
        with torch.inference_mode():
            self.executor = Executor(self.model, run, params, device)
            ablation.undo(self.executor)
        self.run_ahead = device.capabilities.run_ahead
        self.slots: dict[int, RunningRequest] = {}
        self.depth = run.draft_tokens
        self._launched: deque[InFlightStep] = deque()
        self._graphs = Graphs(self.device)
        self._chunks: dict[int, PromptChunk] = {}
        self._batches: dict[tuple[object, ...], DecodeBatch] = {}
        """With graphs: what captured chunks (by width) and iterations (by shape) read."""
        self._sent: dict[int, list[int]] = {}
        """Values that a standing batch's tensors hold, by their id: only changes are sent."""
        self.buckets = run.batch_buckets or self.batch_sizes()

    def warm_up(self) -> None:
        """Run short requests through everything, so that the first real one is not slower.

        With graphs, every batch size and prompt width runs twice: once eagerly, once captured.
        """
        widths, sizes = self._prefill_widths(), self.buckets or (1,)
        for _ in range(2 if self.device.capabilities.graphs else 1):
            for width in widths:
                self._rehearse(1, width)
            for size in sizes[1:]:
                self._rehearse(size, 1)
            for depth in range(1, self.run.draft_tokens + 1 if self.run.auto_depth else 0):
                for size in sizes:
                    self._rehearse(size, 1, (depth, 0))

    def _rehearse(self, num_slots: int, prompt: int, depths: tuple[int, ...] = ()) -> None:
        """A prefill and a few iterations of some slots, on pages that nobody holds yet."""
        run = self.run
        prompt = min(prompt, run.max_model_len - 1)
        how = Sampling(max_tokens=min(2 * run.draft_tokens + 2, run.max_model_len - prompt))
        need = pages_for(
            prompt + how.max_tokens + overshoot_rows(run.draft_tokens), run.page_tokens
        )
        if 1 + num_slots * need > run.num_pages and num_slots > 1:
            return
        for slot in range(num_slots):
            pages = list(range(1 + slot * need, min(1 + (slot + 1) * need, run.num_pages)))
            number = slot - num_slots
            tokens = [0] * prompt
            self.apply([Join(slot=slot, request=number, tokens=tokens, pages=pages, sampling=how)])
        for depth in itertools.cycle(depths or (run.draft_tokens,)):
            if not self.has_work:
                break
            self.limit_drafts(depth)
            self.step()
        self.limit_drafts(run.draft_tokens)

    @torch.inference_mode()
    def apply(self, commands: Sequence[Join | Leave]) -> None:
        """Fill and empty slots. A Leave of a request that is gone is ignored."""
        for command in commands:
            if isinstance(command, Join):
                assert command.slot not in self.slots, f"slot {command.slot} is taken"
                wish = command.sampling.draft_tokens
                most = self.run.draft_tokens
                self.slots[command.slot] = RunningRequest(
                    command, most if wish is None else min(wish, most)
                )
                self.executor.slots.reset(command)
                self.executor.states.reset(command.slot)
            elif self._tenant(command.slot) == command.request:
                del self.slots[command.slot]

    def batch_sizes(self) -> tuple[int, ...]:
        """Those that graphs are captured for; none where there are no graphs."""
        graphs = self.device.capabilities.graphs
        return powers_of_two(1, self.run.max_slots) if graphs else ()

    @property
    def has_work(self) -> bool:
        """True while a request waits for tokens or a result waits to be read."""
        return bool(self.slots or self._launched)

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One chunk of prefill if any waits, then one iteration over the decoding slots."""
        if self.slots:
            self._launched.append(self._launch())
        progress: list[Progress] = []
        if len(self._launched) > self.run_ahead or not self.slots:
            progress += self._collect(self._launched.popleft())
        if self._launched:  # a first token is there an iteration before the rest of its step
            progress += self._collect_firsts(self._launched[-1])
        return progress

    def limit_drafts(self, depth: int) -> None:
        """From the next step on, at most `depth` drafts an iteration."""
        self.depth = depth

    def digest(self) -> int:
        """63 bits that say who sits where and how far along; equal on all ranks."""
        table = [
            (slot, s.join.request, s.prefilled, s.emitted, s.last)
            for slot, s in sorted(self.slots.items())
        ]
        return hash(tuple(table)) & (2**63 - 1)

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes this rank holds as weights, states and KV; storage that is shared counts once."""
        return self.executor.allocated_bytes()

    def use_drafter(self, drafter: Drafter) -> None:
        """Draft with something else than the checkpoint's MTP layer (tests force drafts)."""
        self.executor.drafter = drafter

    def _tenant(self, slot: int) -> int | None:
        held = self.slots.get(slot)
        return held.join.request if held else None

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        # Through numpy: torch.tensor takes four times as long over a list of a prompt's length.
        return self.device.send(torch.from_numpy(np.array(values, dtype=np.int64)))

    def _launch(self) -> InFlightStep:
        firsts = self._launch_prefill()
        held = [s for _, s in sorted(self.slots.items()) if s.decoding and s.tokens_needed > 0]
        if not held:
            return InFlightStep(firsts, None, [], [])
        limits = [min(s.draft_tokens, s.tokens_needed - 1, self.depth) for s in held]
        batch = self._batch(held, limits)
        self._settle_backlog(held, batch)
        if self.run.ablation.sync_each_draft:
            pieces = ablation.synced(self._graphs, self.device, batch)
            results = self.executor.iterate(batch, pieces)
        elif batch.sampled is None or self.device.capabilities.sampled_graphs:
            key, needed = batch.key, batch.sampled is None
            work = partial(self.executor.iterate, batch)
            results = self._graphs.run(key, work, needed=needed)
        else:
            results = self.executor.iterate(batch)
        for slot in held:
            slot.waiting = batch.num_drafts + 1
            slot.in_flight += 1
        return InFlightStep(firsts, self.device.fetch(results), held, limits)

    def _settle_backlog(self, held: list[RunningRequest], batch: DecodeBatch) -> None:
        """Before `batch`: have the draft see what it owes, if it drafts or would owe too much."""
        drafter, most = self.executor.drafter, max(slot.draft_lag for slot in held)
        if drafter is None:
            return
        if most and (batch.num_drafts or most > backlog.ROWS - self.run.draft_tokens - 1):
            drafter.catch_up(batch, 1 << (most - 1).bit_length())
            for slot in held:
                slot.draft_lag = 0
        if batch.num_drafts == 0:
            for slot in held:
                slot.draft_lag += max(1, slot.waiting)

    def _batch(self, held: list[RunningRequest], limits: list[int]) -> DecodeBatch:
        run = self.run
        graphs = self.device.capabilities.graphs
        k = run.draft_tokens if run.pin_rows else self.depth if graphs else max(limits)
        sampled = [i for i, s in enumerate(held) if s.sampling.needs_logits]
        padding = next((n for n in self.buckets if n >= len(held)), len(held)) - len(held)
        slots = [s.join.slot for s in held] + [run.max_slots] * padding
        own_limits = limits + [0] * padding
        features = SamplingFeatures.of([held[i].sampling for i in sampled])
        if graphs and (not sampled or self.device.capabilities.sampled_graphs):
            sampled = padded(sampled, len(slots))
            return self._standing_batch(slots, own_limits, k, held, sampled, features)
        reach = max(len(s.prompt) + s.emitted for s in held) + (self.run_ahead + 1) * (
            run.draft_tokens + 1
        )
        waiting = max(s.waiting for s in held)
        width = max(1, waiting)
        return DecodeBatch(
            slots=self._ints(slots),
            limits=self._ints(own_limits),
            num_drafts=k,
            width=width,
            waiting=waiting,
            num_pages=min(pages_for(reach, run.page_tokens), self.executor.slots.max_pages),
            sampled=self._ints(sampled) if sampled else None,
            reach=self._reach(held, len(slots), k, width),
            features=features,
        )

    def _reach(
        self, held: list[RunningRequest], size: int, k: int, width: int
    ) -> tuple[list[int], ...] | None:
        """DecodeBatch.reach where the device wants it; padding slots start in the null page.

        Only a first token may be under way: the rest follows from results that were read.
        """
        if not self.device.capabilities.host_lengths:
            return None
        assert self.run_ahead == 0, "host lengths need the results of the iteration before"
        length = [s.position for s in held]
        padding = size - len(held)
        first = [p - s.kept + width for p, s in zip(length, held)] + [width] * padding
        later = [[p + i for p in length] + [1] * padding for i in range(1, k)]
        return first, *later, [p + k + 1 for p in length] + [k + 1] * padding

    def _standing_batch(
        self,
        slots: list[int],
        limits: list[int],
        k: int,
        held: list[RunningRequest],
        sampled: list[int],
        features: SamplingFeatures,
    ) -> DecodeBatch:
        """The batch whose tensors (and lists) a captured iteration reads, with these values.

        Width, factor rows and pages are the most there can be: counts on the device say the rest.
        """
        width = self.run.draft_tokens + 1
        reach = self._reach(held, len(slots), k, width)
        key = (len(slots), k, len(sampled), features)
        if key not in self._batches:
            self._batches[key] = DecodeBatch(
                slots=self._ints(slots),
                limits=self._ints(limits),
                num_drafts=k,
                width=width,
                waiting=width,
                num_pages=self.executor.slots.max_pages,
                sampled=self._ints(sampled) if sampled else None,
                reach=reach,
                features=features,
            )
        batch = self._batches[key]
        for standing, now in zip(batch.reach or (), reach or ()):
            standing[:] = now
        for name, values in (("slots", slots), ("limits", limits), ("sampled", sampled)):
            tensor = getattr(batch, name)
            if values and self._sent.get(id(tensor)) != values:
                tensor.copy_(self._ints(values))
                self._sent[id(tensor)] = values
        return batch

    def _launch_prefill(self) -> list[tuple[Fetched, list[RunningRequest]]]:
        """The next prompt tokens, oldest request first, at most `prefill_chunk` padded rows."""
        waiting = [s for s in self.slots.values() if not s.decoding]
        waiting.sort(key=lambda s: s.join.request)
        can = self.device.capabilities
        singly = can.graphs or can.host_lengths
        share = self._share_singly(waiting) if singly else self._share_padded(waiting)
        firsts = []
        for taken in share:
            first, ending = self._prefill(taken, max(count for _, count in taken))
            for slot, count in taken:
                slot.prefilled += count
            for slot in ending:
                slot.in_flight += 1
            if first is not None:
                firsts.append((self.device.fetch(first), ending))
        return firsts

    def _share_padded(
        self, waiting: list[RunningRequest]
    ) -> list[list[tuple[RunningRequest, int]]]:
        """One chunk of several slots, padded to one width."""
        budget = self.run.prefill_chunk
        taken: list[tuple[RunningRequest, int]] = []
        width = 0
        for slot in waiting:
            count = min(len(slot.prompt) - slot.prefilled, budget)
            if taken and max(width, count) * (len(taken) + 1) > budget:
                break
            taken.append((slot, count))
            width = max(width, count)
        return [taken] if taken else []

    def _share_singly(
        self, waiting: list[RunningRequest]
    ) -> Iterator[list[tuple[RunningRequest, int]]]:
        """Chunks of one slot each, of a captured width if any, as many as the budget takes."""
        budget, captured = self.run.prefill_chunk, self.device.capabilities.prompt_graphs
        for slot in waiting:
            while budget > 0 and not slot.decoding:
                most = self._prefill_widths()[-1] if captured else budget
                count = min(len(slot.prompt) - slot.prefilled, most)
                yield [(slot, count)]  # whose taker advances slot.prefilled
                budget -= self._prefill_width(count) if captured else count

    def _prefill_width(self, count: int) -> int:
        return next(w for w in self._prefill_widths() if w >= count)

    def _prefill(
        self, taken: list[tuple[RunningRequest, int]], width: int
    ) -> tuple[tuple[Tensor, ...] | None, list[RunningRequest]]:
        """One slot's chunk replays a graph of its width; anything else runs eagerly.

        A first token that needs logits is picked after the replay, which picks the likeliest.
        """
        if not self.device.capabilities.prompt_graphs or len(taken) > 1:
            chunk, ending = self._chunk(taken, width)
            first = self.executor.prefill(chunk)
        else:
            width = self._prefill_width(width)
            chunk, ending = self._chunk(taken, width)
            first = self._graphs.run(
                ("prefill", width),
                partial(self.executor.prefill, self._standing_chunk(chunk, width)),
                needed=False,
            )
        if not ending or first is None:
            return None, ending
        return self.executor.pick_firsts(chunk, *first), ending

    def _standing_chunk(self, fresh: PromptChunk, width: int) -> PromptChunk:
        """The chunk whose tensors a captured prefill reads, with these values in them."""
        if width not in self._chunks:
            most = self.executor.slots.max_pages
            ends = self._ints([0])  # always computed; it means something where a prompt ends
            self._chunks[width] = replace(fresh, num_pages=most, ends=ends)
        chunk = self._chunks[width]
        for name in ("slots", "tokens", "following", "first", "counts", "known"):
            getattr(chunk, name).copy_(getattr(fresh, name))
        return chunk

    def _prefill_widths(self) -> list[int]:
        """Widths that a captured chunk is padded to: powers of two up to prefill_chunk."""
        widest = min(self.run.prefill_chunk, MAX_CAPTURED_ROWS)
        widths = list(powers_of_two(min(64, widest), widest))
        return widths if self.device.capabilities.prompt_graphs else widths[:1]

    def _chunk(
        self, taken: list[tuple[RunningRequest, int]], width: int
    ) -> tuple[PromptChunk, list[RunningRequest]]:
        tokens, following, ends = [], [], []
        for i, (slot, count) in enumerate(taken):
            start, stop = slot.prefilled, slot.prefilled + count
            padding = [0] * (width - count)
            tokens.append(slot.prompt[start:stop] + padding)
            after = slot.prompt[start + 1 : stop + 1]
            following.append(after + [0] * (width - len(after)))
            if stop == len(slot.prompt):
                ends.append(i)
        counts = [count for _, count in taken]
        sampled = [j for j, i in enumerate(ends) if taken[i][0].sampling.needs_logits]
        reach = max(s.prefilled + count for s, count in taken)
        chunk = PromptChunk(
            slots=self._ints([s.join.slot for s, _ in taken]),
            tokens=self._ints(tokens),
            following=self._ints(following),
            first=self._ints([s.prefilled for s, _ in taken]),
            counts=self._ints(counts),
            known=self._ints([c - (i in ends) for i, c in enumerate(counts)]),
            ends=self._ints(ends) if ends else None,
            num_pages=pages_for(reach, self.run.page_tokens),
            sampled=self._ints(sampled) if sampled else None,
            reach=[reach] if self.device.capabilities.host_lengths else None,
            features=SamplingFeatures.of([taken[ends[j]][0].sampling for j in sampled]),
        )
        return chunk, [taken[i][0] for i in ends]

    def _collect(self, launched: InFlightStep) -> list[Progress]:
        """Read a step's tokens, once; a slot whose tenant has left meanwhile is passed over."""
        progress = self._collect_firsts(launched)
        if launched.verified is None:
            return progress
        targets_of, kept_of, *known = launched.verified.wait()
        logprobs = _log_probs(launched.batch_of, known, targets_of.shape[1])
        rows = zip(launched.batch_of, launched.limits, targets_of.tolist(), kept_of.tolist())
        for slot, limit, targets, kept in rows:
            slot.kept = kept
            progress += self._advance(
                slot, targets[:kept], logprobs, drafted=limit, accepted=kept - 1
            )
        return progress

    def _collect_firsts(self, launched: InFlightStep) -> list[Progress]:
        """Read the first tokens of a step; the second time there are none."""
        progress = []
        for fetched, slots in launched.firsts:
            first, *known = fetched.wait()
            logprobs = _log_probs(slots, known, 1)
            for slot, token in zip(slots, first.tolist(), strict=True):
                progress += self._advance(slot, [token], logprobs, verified=False)
        launched.firsts.clear()
        return progress

    def _advance(
        self,
        slot: RunningRequest,
        tokens: list[int],
        logprobs: dict[int, list[list[tuple[int, float]]]],
        *,
        drafted: int = 0,
        accepted: int = 0,
        verified: bool = True,
    ) -> list[Progress]:
        """Book a request's new tokens up to its end; frees the slot there."""
        join = slot.join
        if self._tenant(join.slot) != join.request:
            return []
        slot.in_flight -= 1
        tokens = tokens[: slot.remaining]
        stop = next((i for i, t in enumerate(tokens) if t in join.end_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        slot.emitted += len(tokens)
        slot.last = tokens[-1]
        finish = "stop" if stop is not None else "length" if slot.remaining == 0 else None
        if finish:
            del self.slots[join.slot]
        return [
            Progress(
                request=join.request,
                slot=join.slot,
                tokens=tokens,
                logprobs=logprobs.get(join.request, [])[: len(tokens)],
                drafted=drafted,
                accepted=accepted,
                verified=verified,
                finish=finish,
            )
        ]


def _log_probs(
    slots: Sequence[RunningRequest], known: Sequence[Tensor], num_rows: int
) -> dict[int, list[list[tuple[int, float]]]]:
    """known: ids and values [n * num_rows, 1 + top] (`log_probs_of`), or nothing."""
    if not known:
        return {}
    ids, values = (part.view(-1, num_rows, part.shape[-1]).tolist() for part in known)
    return log_probs_of(slots, ids, values)
