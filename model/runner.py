"""One rank's engine: launches the next step, and reads the results of the step before.

    apply(Join, Leave, Grow) -> step(): prompt chunks, then an iteration, then results -> [Progress]

Every rank applies the same commands and reads the same tokens, so each finds the ends of requests
(EOS, stop id, length) for itself, and all agree. SlotTable knows the requests, PrefillPolicy and
BatchPacker say what is launched, Executor does it. No other file reads a tensor back.
Letters: B requests of a batch | n likeliest tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.model import ablation, backlog
from outrider.model.banned import BannedSequences
from outrider.model.batch import BatchPacker, DecodeBatch, PromptChunk
from outrider.model.config import RunConfig, load_config
from outrider.model.executor import Drafter, Executor, run_at_once
from outrider.model.grammar import GrammarError, Grammars, Matcher
from outrider.model.plan import check_device, check_pages, memory_plan
from outrider.model.prefill import PaddedSpans, PrefillPolicy
from outrider.model.running import InFlight, InFlightStep, RunningRequest, SlotTable
from outrider.model.sampling import NO_FEATURES
from outrider.model.step import Command, Join, Leave, NumbersError, Progress
from outrider.model.weights import load, settle
from outrider.parallel.device import Device, Fetched
from outrider.parallel.graph import Graphs


class Runner:
    """Loads a rank's share of the model and runs steps.

    on_load(bytes read, bytes in all) is called while weights load. ConfigError when the checkpoint
    cannot be run as `run` says on this device.
    """

    def __init__(
        self, run: RunConfig, device: Device, *, on_load: Callable[[int, int], None] | None = None
    ) -> None:
        self.run = run
        device = ablation.old_device(device, run.ablation)
        model = settle(load_config(Path(run.model_dir)), Path(run.model_dir))
        coarse = model.gdn.coarse_state and run.coarse_state
        gdn = replace(model.gdn, coarse_state=coarse, rows_in_turn=run.pin_rows)
        self.model = replace(model, gdn=gdn)
        check_device(run, device.capabilities)
        check_pages(run, memory_plan(self.model, run))
        self.grammars = Grammars(Path(run.model_dir), model.vocab_size, model.eos_ids)
        params = load(self.model, run, device.tp.rank, device.torch_device, on_load)
        with torch.inference_mode():
            self.executor = Executor(self.model, run, params, device)
            ablation.install_old_parts(self.executor)
        self.slots = SlotTable(run.page_tokens, run.draft_tokens + 1)
        self.depth = run.draft_tokens
        self.num_drafts = 0
        """The most drafts that a request could take in the iteration that was read last."""
        self._in_flight: deque[InFlightStep] = deque()
        self._failed: list[Progress] = []
        """Of requests that could not go on in this step."""
        self.use_device(device)

    def use_device(self, device: Device) -> None:
        """Launch on `device` from now on, as its capabilities allow. Nothing may be in flight."""
        self.device, self.run_ahead = device, device.capabilities.run_ahead
        self.graphs = Graphs(device)
        self.prefill_policy = PrefillPolicy.of(self.run, device.capabilities)
        self.packer = BatchPacker(self.run, device, self.executor.slots.max_pages)

    def use_drafter(self, drafter: Drafter) -> None:
        """Draft with something else than the checkpoint's MTP layer: tests force drafts."""
        self.executor.drafter = drafter

    def limit_drafts(self, depth: int) -> None:
        """From the next step on, at most `depth` drafts an iteration; needs run.auto_depth."""
        assert self.run.auto_depth, "rows would not wait for the draft (MtpDrafter.propose)"
        self.depth = depth

    @property
    def has_work(self) -> bool:
        """Whether a step would launch or read something. Requests may all wait for pages."""
        return bool(self._in_flight or self.slots.can_run)

    @property
    def draft_limit(self) -> int:
        """The most drafts that an iteration may make for any request here."""
        limit = self.slots.draft_limit()
        return self.run.draft_tokens if limit is None else limit

    def digest(self) -> int:
        """SlotTable.digest, in which ranks differ that hold different requests."""
        return self.slots.digest()

    def allocated_bytes(self) -> dict[str, int]:
        """Executor.allocated_bytes: what this rank holds as "weights", "states" and "kv"."""
        return self.executor.allocated_bytes()

    @torch.inference_mode()
    def apply(self, commands: Sequence[Command]) -> None:
        """Fill and empty slots, and hand out pages. A Leave or a Grow of a request that is gone is
        ignored."""
        for command in commands:
            if isinstance(command, Join):
                request = self.slots.add(command, self.run.draft_tokens, self._matcher(command))
                self.executor.slots.reset(command)
                self.executor.states.reset(command.slot)
                if command.restore is not None:
                    self.executor.restore(command.slot, command.restore, request.prompt)
            elif isinstance(command, Leave):
                self.slots.remove(command)
            elif (had := self.slots.grow(command)) is not None:
                self.executor.slots.grow(command, had)

    def _matcher(self, join: Join) -> Matcher | BannedSequences | None:
        """What says which tokens may follow the answer of a request; None where nothing does."""
        grammar, banned = join.sampling.grammar, join.sampling.banned_sequences
        if grammar is not None:
            return self.grammars.matcher(grammar, join.emitted)
        return BannedSequences(banned, join.emitted, self.model.vocab_size) if banned else None

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Launch the next step, then read the results of the step before.

        Where the device does not run ahead, the step that was just launched is read at once. Where
        it does, an end is found one iteration late, and the tokens beyond it are dropped. It does
        not while some request has a matcher.
        """
        launches = self.slots.can_run
        if launches:
            self._in_flight.append(self._launch())
        progress, self._failed = self._failed, []
        if not launches:
            progress += self._read(self._in_flight.popleft())
        while len(self._in_flight) > (0 if self.slots.constrained else self.run_ahead):
            progress += self._read(self._in_flight.popleft())
        if self._in_flight:  # first tokens are there before the iteration of their step
            progress += self._read_firsts(self._in_flight[-1])
        return progress

    def _launch(self) -> InFlightStep:
        """Enqueue prompt chunks, then an iteration over the requests that decode."""
        groups = self.prefill_policy.next_chunks(self.slots.prefilling())
        step = InFlightStep()
        for request in self.slots.beginning():  # one by one: kernels for one row are there
            slots = self.executor.slots.ints([request.slot])
            request.launch_prompt(0)
            self._launch_firsts([request], slots, *self.executor.begin(slots), step)
        for group in groups:
            self._launch_prompt(group, step)
        requests = self.slots.decoding()
        if not requests:
            return step
        depth = min(self.depth, max(r.draft_tokens for r in requests))
        limits = [min(r.draft_tokens, r.tokens_needed - 1, depth) for r in requests]
        batch = self.packer.decode(requests, limits, depth)
        self._catch_up(requests, batch)
        if any(request.matcher is not None for request in requests):
            look = partial(self._look_ahead, requests, limits, batch)
            results = self.run_in_two(batch, look)
        else:
            results = self.run_iteration(batch)
        if len(results) > 2 and all(r.sampling.logprobs is None for r in requests):
            results = results[:2]
        for request in requests:
            request.launch_rows(batch.num_drafts + 1)
        taken = min(batch.num_drafts, depth)
        fetched = self.device.fetch(results)
        hiddens = self.executor.slots.hidden  # of this iteration, until the next is launched
        rows = batch.num_drafts + 1
        named = self._named(requests, lambda index: hiddens[requests[index].slot, :rows])
        return replace(step, iteration=InFlight(fetched, requests, limits, taken, named))

    def _named(
        self, requests: Sequence[RunningRequest], hidden_of: Callable[[int], Tensor]
    ) -> dict[int, Fetched]:
        """The log probabilities of the ids that requests name, by index of the request.

        hidden_of: index -> the hiddens [N, H] that made its tokens. Only asked where ids are named.
        """
        return {
            index: self.device.fetch(
                [self.executor.score_ids(hidden_of(index), request.sampling.logprob_ids)]
            )
            for index, request in enumerate(requests)
            if request.sampling.logprob_ids
        }

    def _launch_prompt(self, group: PaddedSpans, step: InFlightStep) -> None:
        """Enqueue a chunk, and add what it brings to `step`: the first tokens of the prompts that
        end in it, and log probabilities of its tokens where they are asked for.

        A captured chunk picks the likeliest token. Where that is not what a request asks for, its
        token is picked anew after the replay.
        """
        chunk = self.packer.prompt(group)
        if self.device.capabilities.prompt_graphs:
            captured = self.packer.captured_prompt(chunk)
            work = partial(self.executor.prefill, captured)
            hidden, first = self.graphs.run(("prefill", group.width), work, needed=False)
        else:
            hidden, first = self.executor.prefill(chunk)
        step.scores.extend(self._score(group, chunk, hidden))
        for index, span in enumerate(group.spans):
            span.request.launch_prompt(span.count)
            place = span.request.place_at(span.stop)
            if place is not None:
                self.executor.save(span.request.slot, place, hidden[index, span.count - 1])
        ending = [span.request for span in group.spans if span.ends_prompt]
        if ending:
            assert first is not None, "a prompt that ends yields a token"
            assert chunk.ends is not None
            self._launch_firsts(ending, chunk.slots[chunk.ends], *first, step)

    def _launch_firsts(
        self,
        requests: list[RunningRequest],
        slots: Tensor,
        tokens: Tensor,
        hidden: Tensor,
        step: InFlightStep,
    ) -> None:
        """Add to `step` the first tokens of requests whose prompts have run.

        slots, tokens [E] int64 and hidden [E, H] are theirs: the greedy tokens, and the hiddens
        that made them. A request that comes back has a first token already.
        """
        new = [index for index, request in enumerate(requests) if not request.resumes]
        if len(new) < len(requests):
            self.executor.set_lasts({r.slot: r.last for r in requests if r.resumes})
            if not new:
                return
            rows = self.executor.slots.ints(new)
            slots, tokens, hidden = slots[rows], tokens[rows], hidden[rows]
            requests = [requests[index] for index in new]
        for request in requests:
            self._allow(request, [], 0)
        features = self.packer.first_features([request.sampling for request in requests])
        picked = self.executor.pick_firsts(slots, features, tokens, hidden)
        named = self._named(requests, lambda index: hidden[index : index + 1])
        step.firsts.append(InFlight(self.device.fetch(picked), requests, named=named))

    def _score(self, group: PaddedSpans, chunk: PromptChunk, hidden: Tensor) -> Iterator[InFlight]:
        """Log probabilities of the prompt tokens that follow the rows of a chunk, by request that
        asks for them. hidden [B, T, H]: of the chunk. The last token of a prompt has no follower.
        A request that comes back has had them all.
        """
        for index, span in enumerate(group.spans):
            count = span.count - span.ends_prompt
            asks = span.request.sampling.prompt_logprobs is not None and not span.request.resumes
            if count and asks:
                rows = hidden[index, :count], chunk.following[index, :count]
                scores = self.executor.score_prompt(*rows)
                yield InFlight(self.device.fetch(scores), [span.request])

    def _catch_up(self, requests: list[RunningRequest], batch: DecodeBatch) -> None:
        """Before `batch`, have the draft see the rows that wait in its backlog.

        It must when it drafts, and when the backlog has no room for the rows of another iteration.
        Where the batch drafts nothing, the rows that its requests kept last join the backlog. The
        draft need not see those of requests that never take a draft: they do not count.
        """
        drafter, requests = self.executor.drafter, [r for r in requests if r.draft_tokens]
        if drafter is None:
            return
        lag = max((request.draft_lag for request in requests), default=0)
        if lag and (batch.num_drafts or lag > backlog.ROWS - self.run.draft_tokens - 1):
            drafter.catch_up(batch, 1 << (lag - 1).bit_length())
            for request in requests:
                request.draft_lag = 0
        if batch.num_drafts == 0:
            for request in requests:
                request.draft_lag += max(1, request.last_rows)

    def run_iteration(self, batch: DecodeBatch) -> tuple[Tensor, ...]:
        """Enqueue an iteration, as a replay where it is captured; -> as Executor.iterate."""
        greedy = batch.features == NO_FEATURES
        if self.run.ablation.sync_each_draft:
            pieces = ablation.run_in_pieces(self.graphs, self.device, batch)
            return self.executor.iterate(batch, pieces)
        if greedy or self.device.capabilities.sampled_graphs:
            work = partial(self.executor.iterate, batch)
            return self.graphs.run(batch.key, work, needed=greedy)
        return self.executor.iterate(batch)

    def run_in_two(self, batch: DecodeBatch, look: Callable[[Tensor], None]) -> tuple[Tensor, ...]:
        """As run_iteration. In between, look(drafts [B, K] int64) may change the drafts, what
        their slots take, and the masks of the rows."""
        executor, graphs = self.executor, self.graphs
        if self.run.ablation.sync_each_draft or not self.device.capabilities.sampled_graphs:
            pieces = ablation.run_in_pieces(graphs, self.device, batch)
            run = pieces if self.run.ablation.sync_each_draft else run_at_once
            gathered, drafts = executor.draft(batch, run)
            look(drafts)
            return executor.verify(batch, gathered, drafts)
        first, second = (*batch.key, "drafts"), (*batch.key, "verify")
        gathered, drafts = graphs.run(first, partial(executor.draft, batch), needed=False)
        look(drafts)
        if graphs.is_eager(first):  # a captured second piece would read tensors that are gone
            return executor.verify(batch, gathered, drafts)
        work = partial(executor.verify, batch, gathered, drafts)
        return graphs.run(second, work, needed=False)

    def _look_ahead(
        self,
        requests: list[RunningRequest],
        limits: list[int],
        batch: DecodeBatch,
        drafts: Tensor,
    ) -> None:
        """Apply the matchers of `requests` to the drafts [B, K] of their iteration, and to limits,
        the drafts that each request takes."""
        (proposed,) = self.device.fetch([drafts]).wait()
        rows = proposed.tolist()
        for index, request in enumerate(requests):
            if request.matcher is not None:
                allowed = self._allow(request, rows[index], limits[index])
                limits[index] = len(allowed)
                rows[index][: len(allowed)] = allowed
        if drafts.shape[1]:
            drafts.copy_(self.device.send(torch.tensor(rows)))
        self.packer.set_limits(batch, limits)

    def _allow(self, request: RunningRequest, drafts: list[int], most: int) -> list[int]:
        """The drafts, at most so many, that the matcher of a request leaves; the device gets the
        masks of its rows. Where no token can follow, the request leaves with an error."""
        if request.matcher is None:
            return []
        try:
            ahead = request.matcher.look_ahead(drafts, most)
        except GrammarError as error:
            self._failed.append(self.slots.fail(request, f"sampling.grammar: {error}"))
            return []
        self.executor.slots.sampling.set_masks(request.slot, ahead.masks)
        return ahead.drafts

    def _read(self, step: InFlightStep) -> list[Progress]:
        """Wait for the results of a step and add them to its requests."""
        progress = self._read_firsts(step)
        if step.iteration is None:
            return progress
        iteration = step.iteration
        self.num_drafts = iteration.num_drafts
        targets, kept, *log_probs = iteration.results.wait()
        rows = zip(iteration.requests, iteration.limits, targets.tolist(), kept.tolist())
        for index, (request, limit, tokens, count) in enumerate(rows):
            _check_numbers(count)
            progress += self.slots.add_tokens(
                request,
                tokens[:count],
                _log_probs(request, index, log_probs, iteration.named),
                drafted=limit,
                accepted=count - 1,
            )
        return progress

    def _read_firsts(self, step: InFlightStep) -> list[Progress]:
        """Wait for the log probabilities of prompts and then the first tokens of a step; the second
        time there are none."""
        progress = []
        for scored in step.scores:
            (request,) = scored.requests
            ids, values = scored.results.wait()
            rows = _rows_of(ids, values, request.sampling.prompt_logprobs or 0)
            progress += self.slots.add_prompt_scores(request, rows)
        step.scores.clear()
        for first in step.firsts:
            tokens, *log_probs = first.results.wait()
            for index, (request, token) in enumerate(zip(first.requests, tokens.tolist())):
                _check_numbers(token[0])
                logprobs = _log_probs(request, index, log_probs, first.named)
                progress += self.slots.add_tokens(request, token, logprobs, verified=False)
        step.firsts.clear()
        return progress


def _check_numbers(result: int) -> None:
    """NumbersError for a result of the executor that says so."""
    if result < 0:
        raise NumbersError("a pass made hiddens that are not numbers: no token can follow them")


def _log_probs(
    request: RunningRequest, index: int, log_probs: Sequence[Tensor], named: dict[int, Fetched]
) -> list[list[tuple[int, float]]]:
    """Progress.logprobs of one request; empty when it asks for none.

    index: of the request in its batch. log_probs: ids and values [B, rows, 1 + n], where n
    may be more than the request asks for; nothing when no request asks. named: as InFlight.named;
    these ids take the place of the likeliest.
    """
    top = request.sampling.logprobs
    if top is None:
        return []
    ids, values = (part[index] for part in log_probs)
    if index not in named:
        return _rows_of(ids, values, top)
    (scores,) = named[index].wait()
    rows = zip(_rows_of(ids, values, 0), scores.tolist())
    return [own + _best_first(zip(request.sampling.logprob_ids, scores)) for own, scores in rows]


def _best_first(pairs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(pairs, key=lambda pair: -pair[1])


def _rows_of(ids: Tensor, values: Tensor, top: int) -> list[list[tuple[int, float]]]:
    """ids and values [rows, 1 + n] -> of each row the first 1 + top pairs of them."""
    rows = zip(ids[:, : top + 1].tolist(), values[:, : top + 1].tolist())
    return [list(zip(*row)) for row in rows]
