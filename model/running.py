"""What the host knows of the requests on a rank, and of device work that nobody has read yet.

    Join -> SlotTable.add -> RunningRequest -> its tokens -> SlotTable.take -> Progress
    a launched step -> InFlightStep -> read

A request's counters are changed by its own methods and by SlotTable alone. The device may be ahead
of what stands here by the results that are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.model.step import Join, Leave, Progress, Sampling
from outrider.parallel.device import Fetched


@dataclass(slots=True)
class RunningRequest:
    """A request in a slot, as far as the host has read."""

    join: Join
    draft_tokens: int
    """The most drafts that an iteration may make for it."""
    prefilled: int = 0
    """Prompt tokens that have been launched."""
    emitted: int = 0
    """Tokens of the answer that have been read."""
    last: int = -1
    """The last of them."""
    in_flight: int = 0
    """Results that are not read yet; each brings one token at least."""
    last_rows: int = 0
    """Rows of its last verify pass; 0 right after prefill."""
    kept: int = 1
    """Those of them that were kept, as far as the host has read; 1 right after prefill."""
    draft_lag: int = 0
    """The most rows that the draft has not seen (model/backlog.py), without the last pass's."""

    @property
    def slot(self) -> int:
        return self.join.slot

    @property
    def prompt(self) -> list[int]:
        return self.join.tokens

    @property
    def sampling(self) -> Sampling:
        return self.join.sampling

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that have not been launched."""
        return len(self.join.tokens) - self.prefilled

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.join.tokens) + self.emitted

    @property
    def position(self) -> int:
        """Rows that its caches hold, if all that is in flight are first tokens."""
        return self.num_tokens + self.in_flight - 1

    @property
    def remaining(self) -> int:
        return self.join.sampling.max_tokens - self.emitted

    @property
    def tokens_needed(self) -> int:
        """Tokens that the results in flight do not bring for certain."""
        return self.remaining - self.in_flight

    def launch_prompt(self, count: int) -> None:
        """`count` prompt tokens were launched; the end of the prompt yields a token."""
        self.prefilled += count
        if self.prefilled == len(self.prompt):
            self.in_flight += 1

    def launch_rows(self, count: int) -> None:
        """A verify pass of `count` rows was launched; it yields a token at least."""
        self.last_rows = count
        self.in_flight += 1


class SlotTable:
    """Who sits in which slot; every rank's is the same."""

    def __init__(self) -> None:
        self._requests: dict[int, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, slot: int) -> RunningRequest | None:
        return self._requests.get(slot)

    def add(self, join: Join, max_draft_tokens: int) -> None:
        """Fill a slot, which must be free; a request makes `max_draft_tokens` drafts at most.

        An iteration yields one token more than it keeps drafts, and the prompt yields the first.
        """
        assert join.slot not in self._requests, f"slot {join.slot} is taken"
        own, useful = join.sampling.draft_tokens, max(0, join.sampling.max_tokens - 2)
        limit = min(max_draft_tokens if own is None else own, max_draft_tokens, useful)
        self._requests[join.slot] = RunningRequest(join, limit)

    def remove(self, leave: Leave) -> None:
        """Empty a slot; does nothing when the request is gone already."""
        if self._holds(leave.slot, leave.request):
            del self._requests[leave.slot]

    def prefilling(self) -> list[RunningRequest]:
        """Those with prompt tokens left, the oldest first."""
        waiting = [r for r in self._requests.values() if r.prompt_left]
        return sorted(waiting, key=lambda r: r.join.request)

    def decoding(self) -> list[RunningRequest]:
        """Those that need tokens from another iteration, by slot."""
        return [
            r
            for _, r in sorted(self._requests.items())
            if not r.prompt_left and r.tokens_needed > 0
        ]

    def take(
        self,
        request: RunningRequest,
        tokens: list[int],
        logprobs: list[list[tuple[int, float]]],
        *,
        drafted: int = 0,
        accepted: int = 0,
        verified: bool = True,
    ) -> list[Progress]:
        """Add the tokens of a result up to the request's end, which frees its slot.

        The result of a request that has left meanwhile is dropped.
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

    def draft_limit(self) -> int | None:
        """The most drafts that an iteration may make for any request; None without a request."""
        return max((r.draft_tokens for r in self._requests.values()), default=None)

    def digest(self) -> int:
        """63 bits that say who sits where and how far along; equal on all ranks."""
        table = [
            (slot, r.join.request, r.prefilled, r.emitted, r.last)
            for slot, r in sorted(self._requests.items())
        ]
        return hash(tuple(table)) & (2**63 - 1)

    def _holds(self, slot: int, request: int) -> bool:
        held = self._requests.get(slot)
        return held is not None and held.join.request == request


@dataclass(frozen=True, slots=True)
class InFlight:
    """Results on their way to the host."""

    results: Fetched
    """First tokens [E], or what Executor.iterate returned."""
    requests: list[RunningRequest]
    """Whose they are, in order."""
    limits: list[int] = field(default_factory=list)
    """Of an iteration: the drafts that each request took."""
    num_drafts: int = 0
    """Of an iteration: the drafts that it made for each of them and that they could take."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose results nobody has read yet."""

    firsts: list[InFlight]
    """By prompt chunk: first tokens of the prompts that ended in it."""
    iteration: InFlight | None = None
    """None when no request decoded."""
