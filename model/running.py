"""What the host knows of the requests on a rank, and of results that it has not read yet.

    Join -> SlotTable.add -> RunningRequest -> its tokens -> SlotTable.add_tokens -> Progress
    Grow -> SlotTable.grow: a request takes part in an iteration when its rows surely have pages
    a launched step -> InFlightStep -> its results

The device may be ahead of the host by the results that are in flight. A request is changed by its
own methods and by SlotTable, except for draft_lag, which Runner._catch_up keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.model.banned import BannedSequences
from outrider.model.grammar import Matcher
from outrider.model.step import Grow, Join, Leave, Progress, Sampling
from outrider.parallel.device import Fetched


@dataclass(slots=True)
class RunningRequest:
    """A request in a slot, as far as the host has read its results."""

    join: Join
    draft_tokens: int
    """The most drafts that an iteration may make for it."""
    matcher: Matcher | BannedSequences | None = None
    """Where it stands in what says which tokens may follow; None where nothing does."""
    prefilled: int = 0
    """Number of tokens of `prompt` that have been launched."""
    emitted: int = 0
    """Number of tokens of the answer that have been read."""
    last: int = -1
    """The last token that has been read."""
    in_flight: int = 0
    """Number of results that have not been read. Each brings one token at least."""
    last_rows: int = 0
    """Rows of the last verify pass that was launched; 0 right after prefill."""
    kept: int = 1
    """Rows that the last verify pass kept of which the result was read; 1 right after prefill."""
    begins: bool = False
    """Whether all of its prompt's rows were restored, and nothing has been launched for it yet."""
    draft_lag: int = 0
    """The most rows that may wait for the draft in its backlog (model/backlog.py)."""
    num_pages: int = field(init=False)
    """KV pages that it has."""
    prompt: list[int] = field(init=False)
    """The tokens that prefill runs: the request's prompt, and of one that comes back also its
    answer so far, without the last token, which the next iteration runs."""

    def __post_init__(self) -> None:
        emitted = self.join.emitted
        self.prompt = self.join.tokens + emitted[:-1]
        self.num_pages = len(self.join.pages)
        if emitted:
            self.emitted, self.last = len(emitted), emitted[-1]
        if self.join.restore is not None:
            self.prefilled = self.join.restore.rows
            self.begins = not self.prompt_left

    @property
    def slot(self) -> int:
        return self.join.slot

    @property
    def sampling(self) -> Sampling:
        return self.join.sampling

    @property
    def prompt_left(self) -> int:
        """Number of tokens of `prompt` that have not been launched."""
        return len(self.prompt) - self.prefilled

    @property
    def resumes(self) -> bool:
        """Whether it comes back with a part of its answer: prefill then yields no token."""
        return bool(self.join.emitted)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt, and of the answer as far as it was read."""
        return len(self.join.tokens) + self.emitted

    @property
    def position(self) -> int:
        """Rows that its caches hold, if nothing but a first token is in flight."""
        return self.num_tokens + self.in_flight - 1

    @property
    def remaining(self) -> int:
        """Tokens of the answer that have not been read, at most."""
        return self.join.sampling.max_tokens - self.emitted

    @property
    def tokens_needed(self) -> int:
        """Tokens of the answer that the results in flight may not bring, at most."""
        return self.remaining - self.in_flight

    def stop_after(self, start: int) -> int:
        """The end of a chunk of the prompt from `start` on: where its state is to be saved next, or
        the prompt's end."""
        return next((s.rows for s in self.join.saves if s.rows > start), len(self.prompt))

    def place_at(self, rows: int) -> int | None:
        """The place where the state behind so many rows of the prompt is saved, if it is."""
        return next((s.snapshot for s in self.join.saves if s.rows == rows), None)

    def launch_prompt(self, count: int) -> None:
        """`count` prompt tokens have been launched. The end of the prompt brings a token, unless
        that is known already."""
        self.prefilled += count
        self.begins = False
        if self.prefilled == len(self.prompt) and not self.resumes:
            self.in_flight += 1

    def launch_rows(self, count: int) -> None:
        """A verify pass of `count` rows has been launched. It brings a token at least."""
        self.last_rows = count
        self.in_flight += 1


class SlotTable:
    """Which request is in which slot. Every rank has the same table.

    page_tokens: tokens of a KV page. num_rows: the most rows of a request in an iteration, K+1.
    """

    def __init__(self, page_tokens: int, num_rows: int) -> None:
        self._page_tokens, self._num_rows = page_tokens, num_rows
        self._requests: dict[int, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, slot: int) -> RunningRequest | None:
        return self._requests.get(slot)

    @property
    def can_run(self) -> bool:
        """Whether a request has prompt tokens left, begins, or can take part in an iteration."""
        return any(r.prompt_left or self._decodes(r) or r.begins for r in self._requests.values())

    @property
    def constrained(self) -> bool:
        """Whether a request has a matcher: then each step is read before the next is launched."""
        return any(r.matcher is not None for r in self._requests.values())

    def add(
        self, join: Join, max_draft_tokens: int, matcher: Matcher | BannedSequences | None = None
    ) -> RunningRequest:
        """Put a request into a slot, which must be free. max_draft_tokens: the engine's K.

        No more drafts are made for it than its answer can hold: the prompt brings the first token,
        and an iteration brings one token more than the drafts that it keeps. One that comes back
        has emitted tokens; matcher: behind them.
        """
        assert join.slot not in self._requests, f"slot {join.slot} is taken"
        own, useful = join.sampling.draft_tokens, max(0, join.sampling.max_tokens - 2)
        limit = min(max_draft_tokens if own is None else own, max_draft_tokens, useful)
        self._requests[join.slot] = request = RunningRequest(join, limit, matcher)
        room = request.num_pages * self._page_tokens
        assert len(request.prompt) <= room, f"{len(request.prompt)} rows of a prompt in {room}"
        return request

    def grow(self, grow: Grow) -> int | None:
        """Note the pages that a request gets -> how many it had; None when it has left."""
        if not self._holds(grow.slot, grow.request):
            return None
        request = self._requests[grow.slot]
        had = request.num_pages
        request.num_pages += len(grow.pages)
        return had

    def remove(self, leave: Leave) -> None:
        """Take a request out of its slot; does nothing when it is gone already."""
        if self._holds(leave.slot, leave.request):
            del self._requests[leave.slot]

    def fail(self, request: RunningRequest, error: str) -> Progress:
        """Take a request out of its slot that cannot go on; what is in flight for it is dropped."""
        join = request.join
        del self._requests[join.slot]
        return Progress(
            request=join.request, slot=join.slot, tokens=[], verified=False, error=error
        )

    def prefilling(self) -> list[RunningRequest]:
        """The requests with prompt tokens left, the oldest first."""
        requests = (r for r in self._requests.values() if r.prompt_left)
        return sorted(requests, key=lambda r: r.join.request)

    def beginning(self) -> list[RunningRequest]:
        """The requests that begin, in the order of their slots."""
        return [r for _, r in sorted(self._requests.items()) if r.begins]

    def decoding(self) -> list[RunningRequest]:
        """The requests that another iteration must bring tokens, in the order of their slots.

        What one with a matcher may say next depends on all of its tokens: they must be read. One
        whose next rows may not have pages waits for a Grow.
        """
        return [r for _, r in sorted(self._requests.items()) if self._decodes(r)]

    def _decodes(self, request: RunningRequest) -> bool:
        """Whether it can take part in an iteration."""
        awaits_grammar = request.matcher is not None and request.in_flight
        return (
            not (request.prompt_left or request.begins or awaits_grammar)
            and request.tokens_needed > 0
            and self._has_room(request)
        )

    def _has_room(self, request: RunningRequest) -> bool:
        """Whether its pages hold the rows of another iteration, if those in flight keep all rows.
        The last token has no row yet."""
        most = request.num_tokens - 1 + (request.in_flight + 1) * self._num_rows
        return most <= request.num_pages * self._page_tokens

    def add_tokens(
        self,
        request: RunningRequest,
        tokens: list[int],
        logprobs: list[list[tuple[int, float]]],
        *,
        drafted: int = 0,
        accepted: int = 0,
        verified: bool = True,
    ) -> list[Progress]:
        """Add a result's tokens to its request, up to the request's end, which frees the slot.

        logprobs: Progress.logprobs of the tokens. -> one Progress; none when the request has left
        since the result was launched.
        """
        join = request.join
        if not self._holds(join.slot, join.request):
            return []
        tokens = tokens[: request.remaining]
        stop = next((i for i, t in enumerate(tokens) if t in join.end_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        request.in_flight -= 1
        request.kept = accepted + 1
        request.emitted += len(tokens)
        request.last = tokens[-1]
        finish = "stop" if stop is not None else "length" if request.remaining == 0 else None
        if request.matcher is not None and not finish:
            request.matcher.commit(tokens)
        if finish:
            del self._requests[join.slot]
        return [
            Progress(
                request=join.request,
                slot=join.slot,
                tokens=tokens,
                logprobs=logprobs[: len(tokens)],
                drafted=drafted,
                accepted=accepted,
                verified=verified,
                finish=finish,
            )
        ]

    def add_prompt_scores(
        self, request: RunningRequest, rows: list[list[tuple[int, float]]]
    ) -> list[Progress]:
        """Progress.prompt_logprobs of a request -> one Progress; none when it has left."""
        join = request.join
        if not self._holds(join.slot, join.request):
            return []
        return [
            Progress(
                request=join.request,
                slot=join.slot,
                tokens=[],
                verified=False,
                prompt_logprobs=rows,
            )
        ]

    def draft_limit(self) -> int | None:
        """The most drafts that an iteration may make for any request; None without a request."""
        return max((r.draft_tokens for r in self._requests.values()), default=None)

    def digest(self) -> int:
        """63 bits that depend on all requests, their slots, and how far the host has read them."""
        table = [
            (slot, r.join.request, r.prefilled, r.emitted, r.last, r.num_pages)
            for slot, r in sorted(self._requests.items())
        ]
        return hash(tuple(table)) & (2**63 - 1)

    def _holds(self, slot: int, request: int) -> bool:
        present = self._requests.get(slot)
        return present is not None and present.join.request == request


@dataclass(frozen=True, slots=True)
class InFlight:
    """Results of a prompt chunk or of an iteration, on their way to the host."""

    results: Fetched
    """What Executor.pick_firsts or Executor.iterate returned."""
    requests: list[RunningRequest]
    """The requests that the results belong to, in the results' order."""
    limits: list[int] = field(default_factory=list)
    """Of an iteration: the drafts that each request took."""
    num_drafts: int = 0
    """Of an iteration: the most drafts that a request could take in it."""
    named: dict[int, Fetched] = field(default_factory=dict)
    """By index of a request that names ids: their log probabilities [rows, n]."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step of which not all results have been read."""

    firsts: list[InFlight] = field(default_factory=list)
    """The first tokens of prompts that ended, by prompt chunk."""
    scores: list[InFlight] = field(default_factory=list)
    """What Executor.score_prompt returned, of one request each, in the order of their tokens."""
    iteration: InFlight | None = None
    """The iteration of the step; None when no request decoded."""
