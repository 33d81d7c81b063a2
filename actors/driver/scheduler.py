"""Which request runs next, in which slot, on which pages. Of equal priority: first come first.

    add -> Request -> commands() -> Join        StepEvent -> apply -> Request, freed at its end
                                    Join <- waiting again <- suspend
A request holds KV pages for its text and for the next few iterations, and gets more as it goes on
(Grow). Where none are left, the youngest request gives its slot and its pages back and joins again
later. What can never fit is refused at once. It touches no device and knows nothing of callers.
"""

from __future__ import annotations

import dataclasses
import heapq
import secrets
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from outrider.actors.driver.blocks import BlockAllocator
from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.driver.prefix import Chain, PrefixCache
from outrider.actors.driver.request import Counters, Detokenizer, Request
from outrider.actors.driver.suspects import Suspects
from outrider.actors.errors import (
    PromptTooLongError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from outrider.model.step import Command, Grow, Join, Leave, Progress, Restore, Sampling, StepEvent

ITERATIONS_AHEAD = 4
"""A request gets more pages before those that it has may be full after so many iterations: when
the driver reads results, the ranks have launched two more, and a Grow is on its way for one."""
GROWTH_TOKENS = 64
"""What a request gets beyond that, so that few commands bring few tokens each."""

REPLY_START_TOKENS = 32
"""A chat's prompt ends with fewer tokens than these, behind the end of its last turn."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a request; all of it follows from cluster.yaml and the model."""

    max_slots: int
    max_model_len: int
    max_queue: int
    num_pages: int
    page_tokens: int
    draft_tokens: int
    drafter: str
    overshoot_rows: int
    """Rows past max_tokens that an iteration may write (model.plan.overshoot_rows)."""
    num_snapshots: int = 0
    """Places for states of prompts' beginnings; 0: every prompt is computed."""
    snapshot_tokens: int = 2048
    """A long prompt's state is saved at multiples of so many tokens, and at its end."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """By field of Sampling: what a request takes that leaves it open (Spec.sampling_defaults)."""

    def room_for(self, prompt_tokens: int) -> int:
        """Tokens an answer may have at most behind such a prompt; 0 or less: it does not fit."""
        cached = (self.num_pages - 1) * self.page_tokens - self.overshoot_rows
        return min(self.max_model_len, cached) - prompt_tokens


class Scheduler:
    """All unfinished requests, and what they hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockAllocator(limits.max_slots, limits.num_pages)
        self._suspects = Suspects(enough_tokens=2 * (limits.draft_tokens + 1))
        self.prefix = PrefixCache(self.blocks, limits.num_snapshots, limits.snapshot_tokens)
        self._waiting: dict[int, Request] = {}
        self._line: list[tuple[int, int]] = []
        """Heap of (priority, number) of those that wait, and of some that do not any more, or
        stand in it twice."""
        self._running: dict[int, Request] = {}
        """By the number of their join."""
        self._leaves: list[Leave] = []
        """Of requests that ended before the ranks knew, or were suspended; sent before any other
        request joins."""
        self._numbers = count()
        self.reset_totals()

    def reset_totals(self) -> None:
        """Count from here on."""
        self.counters = Counters(self.limits.draft_tokens)
        self.num_preemptions = self.num_hits = self.cached_tokens = 0
        self.prefix.num_evicted = 0
        self.num_requests = {"submitted": 0, "finished": 0, "aborted": 0, "failed": 0}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prefilling(self) -> bool:
        """Whether a request has got no token since it joined."""
        return any(not request.num_since_join for request in self._running.values())

    @property
    def unfinished(self) -> list[Request]:
        return [*self._waiting.values(), *self._running.values()]

    def add(
        self,
        asked: GenerationRequest,
        prompt: Sequence[int],
        detokenizer: Detokenizer | None = None,
    ) -> Request:
        """Queue a request; prompt: that of `asked`, as token ids. RequestError if it can never run.

        max_tokens beyond the context is cut to what fits; the answer then ends with "length".
        Fields of the sampling that the request leaves open take the model's defaults.
        """
        limits, sampling, tokens = self.limits, asked.sampling, list(prompt)
        self._check_length(len(tokens))  # before each of them is looked at
        self._check_ids("prompt token {} at index {}", tokens)
        self._check_ids("logit_bias token {}", [token for token, _ in sampling.logit_bias])
        self._check_ids("stop token {}", sampling.stop_ids)
        self._check_ids("allowed_token_ids: token {}", sampling.allowed_ids)
        self._check_ids("bad_words: token {}", sampling.banned_ids)
        self._check_ids("logprob_token_ids: token {}", sampling.logprob_ids)
        for sequence in sampling.banned_sequences:
            self._check_ids("bad_words: token {}", sequence)
        ends = self._end_ids(sampling)
        if sampling.min_tokens and sampling.allowed_ids and set(sampling.allowed_ids) <= set(ends):
            raise RequestError(
                f"allowed_token_ids: all of them end the answer, which min_tokens = "
                f"{sampling.min_tokens} forbids; lower it, or allow another token"
            )
        max_tokens = min(sampling.max_tokens, limits.max_model_len - len(tokens))
        self._check_pages(len(tokens), max_tokens)
        request = Request(
            next(self._numbers),
            tokens,
            replace(
                sampling.with_defaults(limits.sampling_defaults),
                max_tokens=max_tokens,
                min_tokens=min(sampling.min_tokens, max_tokens),
                seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            ),
            draft_tokens=limits.draft_tokens,
            drafter=limits.drafter,
            stop=asked.stop,
            include_stop=asked.include_stop,
            draft_info=asked.draft_info,
            key=asked.key,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            detokenizer=detokenizer,
        )
        self._wait(request)
        self.num_requests["submitted"] += 1
        return request

    def commands(self) -> list[Command]:
        """What the ranks must be told now, in order: who leaves, who gets pages, then who joins.

        Requests join by priority, and of equal priority in the order they came. Joining stops at
        the first request that does not fit; later ones wait behind it. One whose beginning is being
        computed waits for that; later ones leave it a slot and pages. While there are suspects, the
        first of them runs alone.
        """
        grows = self._grow_all()
        commands: list[Command] = [*self._leaves, *grows]
        self._leaves.clear()
        if not self._waiting:
            return commands
        reserved = sum(self._pages_to_come(request) for request in self._running.values())
        awaiting: dict[int, Request] = {}
        while self.blocks.free_slots > len(awaiting) and (request := self._next()) is not None:
            if request.number in awaiting or self._awaits_another(request):
                heapq.heappop(self._line)
                reserved += self._pages_wanted(request)
                awaiting[request.number] = request
                continue
            join = self._admit(request, reserved)
            if join is None:
                break
            reserved += self._pages_to_come(request)
            commands.append(join)
        for request in awaiting.values():
            heapq.heappush(self._line, _age(request))
        return commands

    def _awaits_another(self, request: Request) -> bool:
        """Whether a request that runs computes the beginning of this one just now, and more of it
        than is there already."""
        chain = request.chain = request.chain or self._chain_of(request)
        coming = self.prefix.coming(chain) if self._may_begin_later(request) else 0
        if not coming:
            return False
        hit = self.prefix.find(chain)
        return coming > (hit.rows if hit else 0)

    def _admit(self, request: Request, reserved: int) -> Join | None:
        """Give a waiting request a slot and its first pages; None where they lack, or would leave
        fewer than `reserved` to the running ones."""
        chain = request.chain = request.chain or self._chain_of(request)
        hit = self.prefix.find(chain) if self._may_begin_later(request) else None
        shared = hit.pages if hit else []
        self.blocks.hold(shared)
        need = self._pages_wanted(request) - len(shared)
        fits = need + reserved <= self.blocks.available_pages and self.prefix.make_room(need)
        allocation = self.blocks.allocate(request.number, need, shared) if fits else None
        if allocation is None:
            self.blocks.release(shared)
            return None
        del self._waiting[request.number]
        self._running[request.join_number] = request
        rows = hit.rows if hit else 0
        request.admit(allocation.slot, rows)
        self.num_hits += hit is not None
        self.cached_tokens += rows
        page = allocation.pages[len(shared)]
        return Join(
            slot=allocation.slot,
            request=request.join_number,
            tokens=request.prompt,
            pages=list(allocation.pages),
            sampling=request.sampling,
            end_ids=self._end_ids(request.sampling),
            emitted=list(request.emitted),
            restore=hit and Restore(hit.snapshot, hit.rows, hit.last_page, page),
            saves=self.prefix.reserve(request.join_number, chain, rows, self._turn_end(chain)),
        )

    def _chain_of(self, request: Request) -> Chain:
        """Of the tokens that prefill runs for it."""
        tokens = request.prompt + request.emitted[:-1]
        return Chain(tokens, self.limits.page_tokens, request.cache_salt)

    def _turn_end(self, chain: Chain) -> int:
        """The tokens of a conversation up to the end of its last turn, 0 where there is none. What
        follows asks for the answer, in words that templates leave out of the next prompt."""
        tokens, eos_ids = chain.tokens, self.limits.eos_ids
        tail = range(max(0, len(tokens) - REPLY_START_TOKENS), len(tokens))
        return max((index + 1 for index in tail if tokens[index] in eos_ids), default=0)

    def _may_begin_later(self, request: Request) -> bool:
        """Whether it may start behind rows that others have run. Log probabilities of its prompt
        need all rows, once."""
        return request.sampling.prompt_logprobs is None or bool(request.emitted)

    def apply(self, event: StepEvent) -> list[Request]:
        """Hand a step's progress to its requests, and free those that ended; -> each that changed.

        A step may bring a request its first token and those of an iteration. Progress of a request
        that ended or was suspended while the step ran is dropped.
        """
        changed: dict[int, Request] = {}
        for progress in event.progress:
            request = self._running.get(progress.request)
            if request is None:
                continue
            assert request.slot == progress.slot, f"{progress} is not of slot {request.slot}"
            if progress.tokens:
                self.prefix.publish(request.join_number, self.blocks.pages_of(request.number))
            self._accept(request, progress)
            if request.ended:
                known = progress.finish is not None or bool(progress.error)
                self._free(request, ranks_know=known)
            if self._suspects.note_progress(request) and self._suspects and not request.ended:
                self.suspend(request.number)
            changed[request.number] = request
        return list(changed.values())

    def suspend(self, number: int) -> None:
        """Take the slot and the pages of a running request; it waits for others.

        It stands in line by its priority and its number, so before those that came later.
        """
        request = self._running_one(number)
        assert request is not None, f"request {number} does not run"
        self._free(request, ranks_know=False)
        self._resume_later(request)

    def suspend_all(self) -> Request | None:
        """The ranks are lost: every request that was running waits for others.

        -> the request that is to blame, if it is known; it waits like the others.
        """
        requests = list(self._running.values())
        culprit = self._suspects.note_loss(requests)
        for request in requests:
            self._free(request, ranks_know=True)
            self._resume_later(request)
        self._leaves.clear()
        self.prefix.clear()
        return culprit

    def use_ranks(self, num_pages: int) -> list[Request]:
        """New ranks hold so many KV pages; -> those that can never run on them and have failed."""
        assert not self._running, "requests still run on other ranks"
        self.limits = dataclasses.replace(self.limits, num_pages=num_pages)
        self.blocks = self.prefix.blocks = BlockAllocator(self.limits.max_slots, num_pages)
        failed = []
        for request in list(self._waiting.values()):
            try:
                self._check_pages(len(request.prompt), request.sampling.max_tokens)
            except RequestError as error:
                self.fail(request, RequestFailedError(f"the ranks were started anew: {error}"))
                failed.append(request)
        return failed

    def fail(self, request: Request, error: Exception) -> None:
        """End a waiting request with `error`."""
        del self._waiting[request.number]
        self._suspects.drop(request)
        request.fail(error)
        self.num_requests["failed"] += 1

    def abort(self, number: int) -> Request | None:
        """End a request before its answer is complete; None: no unfinished one has this number."""
        running = self._running_one(number)
        request = running or self._waiting.pop(number, None)
        if request is None:
            return None
        self._suspects.drop(request)
        request.fail(RequestAbortedError(f"request {number} was aborted"))
        self.num_requests["aborted"] += 1
        if running is not None:
            self._free(running, ranks_know=False)
        return request

    def fail_all(self, error: Exception) -> list[Request]:
        """The ranks are gone: every unfinished request ends with `error`."""
        requests = self.unfinished
        for request in requests:
            request.fail(error)
        self.num_requests["failed"] += len(requests)
        self._waiting.clear()
        self._line.clear()
        self._running.clear()
        self._suspects.clear()
        return requests

    def _accept(self, request: Request, progress: Progress) -> None:
        try:
            self.counters.add(request.accept(progress))
        except Exception as error:  # of its text, say: the other requests go on
            why = f"request {request.number} failed: {type(error).__name__}: {error}"
            request.fail(RequestFailedError(why, "".join(traceback.format_exception(error))))
        if request.finish is not None:
            self.num_requests["finished"] += 1
        elif request.error is not None:
            self.num_requests["failed"] += 1

    def _next(self) -> Request | None:
        """Whose turn it is to join, if there is room; None: nobody's."""
        if self._suspects:
            return None if self._running else self._suspects.first
        while self._line:
            request = self._waiting.get(self._line[0][1])
            if request is not None:
                return request
            heapq.heappop(self._line)  # it has joined, or was aborted
        return None

    def _running_one(self, number: int) -> Request | None:
        return next((r for r in self._running.values() if r.number == number), None)

    def _wait(self, request: Request) -> None:
        self._waiting[request.number] = request
        heapq.heappush(self._line, _age(request))

    def _resume_later(self, request: Request) -> None:
        request.suspend(next(self._numbers))
        self._wait(request)

    def _free(self, request: Request, *, ranks_know: bool) -> None:
        """Give back the slot and the pages of a running request; it has ended or waits again."""
        assert request.slot is not None
        del self._running[request.join_number]
        self.blocks.free(request.number)
        self.prefix.cancel(request.join_number)
        if not ranks_know:
            self._leaves.append(Leave(slot=request.slot, request=request.join_number))
        if not self._running:
            self.blocks.check_idle()

    def _grow_all(self) -> list[Grow]:
        """Pages for requests whose next iterations need more, the oldest first.

        Where a request cannot get what its next iteration needs, the youngest of all is suspended,
        which may be that request itself.
        """
        grows: list[Grow] = []
        for request in sorted(self._running.values(), key=_age):
            while request.slot is not None:
                held = len(self.blocks.pages_of(request.number))
                if held >= self._pages_for(request, self._rows * ITERATIONS_AHEAD):
                    break
                wanted = self._pages_wanted(request) - held
                self.prefix.make_room(min(wanted, self.blocks.available_pages))
                pages = self.blocks.grow(request.number, wanted)
                if pages:
                    grows.append(Grow(slot=request.slot, request=request.join_number, pages=pages))
                if held + len(pages) >= self._pages_for(request, self._rows):
                    break
                self.suspend(max(self._running.values(), key=_age).number)
                self.num_preemptions += 1
        return grows

    def _pages_for(self, request: Request, rows_ahead: int) -> int:
        """Pages for the text of a request and so many rows behind it, as far as it may ever get."""
        rows = len(request.prompt) + len(request.emitted) + rows_ahead
        most = self._pages_of(len(request.prompt), request.sampling.max_tokens)
        return min(-(-rows // self.limits.page_tokens), most)

    def _pages_wanted(self, request: Request) -> int:
        """The pages that a request is given when it joins or needs more."""
        return self._pages_for(request, self._rows * ITERATIONS_AHEAD + GROWTH_TOKENS)

    def _pages_to_come(self, request: Request) -> int:
        """The pages that a running request will ask for next. They are not given to new ones: one
        that joins must not be the next to be suspended."""
        ahead = self._rows * ITERATIONS_AHEAD + 2 * GROWTH_TOKENS
        held = len(self.blocks.pages_of(request.number))
        return max(0, self._pages_for(request, ahead) - held)

    @property
    def _rows(self) -> int:
        """The most rows of a request in an iteration."""
        return self.limits.draft_tokens + 1

    def _end_ids(self, sampling: Sampling) -> list[int]:
        """The token ids that end an answer."""
        ends = sampling.stop_ids + (() if sampling.ignore_eos else self.limits.eos_ids)
        return list(dict.fromkeys(ends))

    def _pages_of(self, prompt_tokens: int, max_tokens: int) -> int:
        rows = prompt_tokens + max_tokens + self.limits.overshoot_rows
        return -(-rows // self.limits.page_tokens)

    def _check_ids(self, what: str, tokens: Sequence[int]) -> None:
        size = self.limits.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            index, token = next(
                (index, token) for index, token in enumerate(tokens) if not 0 <= token < size
            )
            rule = f"token ids of this model lie in [0, {size})"
            raise RequestError(f"{what.format(token, index)}: {rule}")

    def _check_length(self, prompt_tokens: int) -> None:
        limits = self.limits
        if not prompt_tokens:
            raise RequestError("the prompt is empty: it needs at least 1 token")
        longest = limits.max_model_len - 1
        if prompt_tokens > longest:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens, {prompt_tokens - longest} too many: "
                f"the maximum context length is limits.max_model_len = {limits.max_model_len} "
                f"tokens, which leaves {longest} for a prompt; shorten it, or raise "
                "limits.max_model_len in cluster.yaml"
            )

    def _check_pages(self, prompt_tokens: int, max_tokens: int) -> None:
        limits = self.limits
        need, have = self._pages_of(prompt_tokens, max_tokens), self.blocks.usable_pages
        if need > have:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} needs {need} KV pages "
                f"of {limits.page_tokens} tokens, the cache has {have}: {need - have} too few; "
                "lower max_tokens, or raise cache.num_pages in cluster.yaml"
            )


def _age(request: Request) -> tuple[int, int]:
    """Smaller for requests that come first: by priority, then in the order they were submitted."""
    return request.priority, request.number
