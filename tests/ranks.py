"""Runners for tests: one rank, or several as threads of this process, each with its real share.

    team(folder, tensor_parallel=2, ...) -> Team;   team.run([Request(...), ...]) -> outputs

Threads meet in parallel.group.threads: a TP run is the real sharded computation, no processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from outrider.benchmarks.differences import find_differences, margin_of
from outrider.model.batch import DecodeBatch, PromptChunk
from outrider.model.config import RunConfig, load_config
from outrider.model.executor import RunPiece
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.runner import Runner
from outrider.model.step import Join, Progress, Sampling
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone, threads
from outrider.parallel.operands import GatheredSlots


@dataclass
class Output:
    """What one request produced."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    drafted: int = 0
    accepted: int = 0
    iterations: int = 0
    kept: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    error: str = ""


class BlockAllocator:
    """Pages and outputs of the requests of one test, as the driver would keep them."""

    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self.free = list(range(1, run.num_pages))
        self.held: dict[int, list[int]] = {}
        self.outputs: dict[int, Output] = {}

    def join(self, request: int, slot: int, prompt: Sequence[int], sampling: Sampling) -> Join:
        need = len(prompt) + sampling.max_tokens + overshoot_rows(self.run.draft_tokens)
        pages = [self.free.pop() for _ in range(pages_for(need, self.run.page_tokens))]
        self.held[request], self.outputs[request] = pages, Output()
        return Join(
            slot=slot,
            request=request,
            tokens=list(prompt),
            pages=pages,
            sampling=sampling,
            end_ids=list(sampling.stop_ids),
        )

    def book(self, progress: Sequence[Progress]) -> list[int]:
        """Add tokens; returns slots that became free."""
        ended = []
        for p in progress:
            out = self.outputs[p.request]
            assert out.finish is None
            assert not out.error
            if p.prompt_logprobs:
                assert out.tokens == p.tokens == [], "log probabilities of the prompt come first"
                out.prompt_logprobs += p.prompt_logprobs
                continue
            out.tokens += p.tokens
            out.logprobs += p.logprobs
            out.drafted += p.drafted
            out.accepted += p.accepted
            out.iterations += p.verified
            if p.verified:
                out.kept.append(p.accepted + 1)
            if p.finish or p.error:
                out.finish, out.error = p.finish, p.error
                self.free += self.held.pop(p.request)
                ended.append(p.slot)
        return ended


def serve(
    runner: Runner, requests: Sequence[tuple[Sequence[int], Sampling]], stagger: int = 0
) -> list[Output]:
    """Run requests on one rank, joining as slots come free; `stagger` steps between joins."""
    books = BlockAllocator(runner.run)
    free = list(range(runner.run.max_slots))
    waiting = list(enumerate(requests))
    steps = 0
    while waiting or runner.has_work:
        commands = []
        while waiting and free and steps >= stagger * waiting[0][0]:
            request, (prompt, sampling) = waiting.pop(0)
            commands.append(books.join(request, free.pop(0), prompt, sampling))
        runner.apply(commands)
        free = sorted(free + books.book(runner.step() if runner.has_work else []))
        steps += 1
        assert steps < 5000, "no progress"
    assert len(books.free) == runner.run.num_pages - 1, "pages leaked"
    return [books.outputs[i] for i in range(len(requests))]


class Team:
    """All ranks of one model."""

    def __init__(self, folder: Path, **changes: object) -> None:
        keys: dict = {
            "model_dir": str(folder),
            "max_slots": 4,
            "max_model_len": 256,
            "page_tokens": 8,
            "num_pages": 160,
            "prefill_chunk": 32,
            **changes,
        }
        self.run_config = RunConfig(**keys)
        size = self.run_config.tensor_parallel
        groups = threads(size) if size > 1 else [alone()]
        self.runners = [Runner(self.run_config, open_device("cpu", 0, g)) for g in groups]
        self.model = load_config(folder)

    def each(self, work: Callable[[Runner], object]) -> list:
        """Run `work` on every rank at once; raises what any of them raised."""
        if len(self.runners) == 1:
            return [work(self.runners[0])]
        results: list = [None] * len(self.runners)
        errors: list[BaseException] = []

        def body(i: int) -> None:
            try:
                results[i] = work(self.runners[i])
            except BaseException as error:
                errors.append(error)
                self.runners[i].device.tp.close()

        workers = [threading.Thread(target=body, args=(i,)) for i in range(len(self.runners))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        return results

    def top2_margin(self, tokens: list[int]) -> float:
        """Logit of the likeliest token behind `tokens` less that of the second."""
        asked = Sampling(max_tokens=1, logprobs=2, draft_tokens=0)
        return margin_of(self.generate([(tokens, asked)])[0].logprobs[0])

    def assert_same(self, prompt: list[int], tokens: list[int], expected: list[int]) -> None:
        """Equal tokens; the error names the first that differs, and the top-2 margin there."""
        differences = find_differences([(prompt, tokens, expected)], self.top2_margin)
        assert not differences, f"prompt of {len(prompt)}: {differences[0]}"

    def generate(
        self, requests: Sequence[tuple[Sequence[int], Sampling]], stagger: int = 0
    ) -> list[Output]:
        """Outputs of the requests; asserts that all ranks produced the same."""
        outputs = self.each(lambda runner: serve(runner, requests, stagger))
        for other in outputs[1:]:
            assert other == outputs[0], "ranks disagree"
        return outputs[0]


def record_drafts(runner: Runner) -> dict[tuple[int, int], list[int]]:
    """From now on: (request, rows that its caches held) -> the drafts that it was offered."""
    drafter, offered = runner.executor.drafter, {}
    assert drafter is not None
    propose = drafter.propose

    def recording(batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        drafts = propose(batch, at, run)
        lengths = at.length.tolist()
        for slot, length, row in zip(batch.slots.tolist(), lengths, drafts.tolist()):
            request = runner.slots.get(slot)
            if request is not None:  # padding has none
                offered[request.join.request, length] = row
        return drafts

    drafter.propose = recording  # type: ignore[method-assign]
    return offered


class ForcedDrafter:
    """Proposes the known continuation of each prompt, wrong wherever `right` says so.

    right(position of the drafted token in the output, i of the draft) -> bool
    """

    def __init__(
        self, runner: Runner, answers: dict[tuple[int, ...], list[int]], right: Callable
    ) -> None:
        self.runner, self.answers, self.right = runner, answers, right

    def prefill(self, chunk: PromptChunk, hidden: Tensor) -> None:
        """Nothing to see."""

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        """Nothing to see."""

    def resume(self, slot: int, prompt: Sequence[int], num_rows: int, hidden: Tensor) -> None:
        """Nothing to see."""

    def propose(self, batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        vocab = self.runner.model.vocab_size
        drafts = torch.zeros(len(batch.slots), batch.num_drafts, dtype=torch.int64)
        for b, slot in enumerate(batch.slots.tolist()):
            held = self.runner.slots.get(slot)
            if held is None:
                continue
            answer = self.answers[tuple(held.join.tokens)]
            done = int(self.runner.executor.slots.length[slot]) - len(held.join.tokens) + 1
            for i in range(batch.num_drafts):
                token = answer[done + i] if done + i < len(answer) else 0
                good = self.right(done + i, i)
                drafts[b, i] = token if good else (token + 1) % vocab
        return drafts
