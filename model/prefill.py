"""Which prompt tokens a step runs: those of the oldest requests first, under a budget of rows.

    requests in the order they came -> PrefillPolicy.next_chunks -> [PaddedSpans]

The budget bounds all rows of a step, padding included. Where any shape will do, one chunk holds
spans of several requests, padded to the longest. Where prompts are captured as graphs, or attention
wants its lengths on the host, each chunk holds one span, padded to a captured width.
It remembers nothing: the caller advances the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.model.config import RunConfig
from outrider.model.plan import powers_of_two
from outrider.model.running import RunningRequest
from outrider.parallel.device import Capabilities

MIN_CAPTURED_ROWS, MAX_CAPTURED_ROWS = 64, 2048
"""The narrowest and the widest prompt chunk that is captured; a longer one is several replays."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens `start` to `stop` of one request."""

    request: RunningRequest
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def ends_prompt(self) -> bool:
        return self.stop == len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class PaddedSpans:
    """Spans that run in one forward pass, each padded to `width` rows."""

    spans: list[PromptSpan]
    width: int

    @property
    def num_rows(self) -> int:
        return self.width * len(self.spans)


class PrefillPolicy:
    """budget: rows of a step. widths: those that a chunk may have, rising; empty: any.

    together: a chunk may hold spans of several requests.
    """

    def __init__(self, budget: int, widths: Sequence[int] = (), *, together: bool = False) -> None:
        self.budget, self.widths, self.together = budget, tuple(widths), together

    @staticmethod
    def of(run: RunConfig, can: Capabilities) -> PrefillPolicy:
        """The policy for the ranks' kind of device."""
        widest = min(run.prefill_chunk, MAX_CAPTURED_ROWS)
        widths = powers_of_two(min(MIN_CAPTURED_ROWS, widest), widest)
        return PrefillPolicy(
            run.prefill_chunk,
            widths if can.prompt_graphs else (),
            together=not (can.graphs or can.host_lengths),
        )

    def next_chunks(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        """The chunks of one step; `requests` have prompt tokens left, the oldest comes first."""
        return self._padded_together(requests) if self.together else self._one_by_one(requests)

    def _padded_together(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        spans: list[PromptSpan] = []
        width = 0
        for request in requests:
            count = min(request.prompt_left, self.budget)
            if max(width, count) * (len(spans) + 1) > self.budget:
                break
            spans.append(PromptSpan(request, request.prefilled, request.prefilled + count))
            width = max(width, count)
        return [PaddedSpans(spans, width)] if spans else []

    def _one_by_one(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        chunks: list[PaddedSpans] = []
        rows_left = self.budget
        for request in requests:
            start, end = request.prefilled, len(request.prompt)
            while start < end:
                count, width = self._fit(end - start, rows_left)
                if not count:
                    return chunks
                chunks.append(PaddedSpans([PromptSpan(request, start, start + count)], width))
                start, rows_left = start + count, rows_left - width
        return chunks

    def _fit(self, num_tokens: int, rows_left: int) -> tuple[int, int]:
        """How many of the tokens a chunk takes, and its width; 0 and 0 when no width fits."""
        if not self.widths:
            count = min(num_tokens, rows_left)
            return count, count
        fitting = [width for width in self.widths if width <= rows_left]
        if not fitting:
            return 0, 0
        count = min(num_tokens, fitting[-1])
        return count, next(width for width in fitting if width >= count)
