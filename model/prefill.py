"""Which prompt tokens a step runs: those of the oldest requests first, within a budget of rows.

    requests, the oldest first -> PrefillPolicy.next_chunks -> [PaddedSpans]

The budget bounds all rows of a step, padding included. A span ends where a state is to be saved. A
device that runs any shape gets one chunk with spans of several requests. A device that captures
prompts as graphs, or that needs lengths on the host, gets chunks of one span each. It remembers
nothing: the caller advances the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.model.config import RunConfig
from outrider.model.plan import powers_of_two
from outrider.model.running import RunningRequest
from outrider.parallel.device import Capabilities

MIN_CAPTURED_ROWS, MAX_CAPTURED_ROWS = 64, 2048
"""The narrowest and the widest prompt chunk that is captured. A longer prompt takes several."""


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
    """Spans of prompts that run in one forward pass, each padded to `width` rows."""

    spans: list[PromptSpan]
    width: int

    @property
    def num_rows(self) -> int:
        return self.width * len(self.spans)


class PrefillPolicy:
    """Chooses the spans of each step.

    budget: the most rows of a step. widths: the widths that a chunk may have, rising; without any,
    all are allowed. together: whether a chunk may hold spans of several requests.
    """

    def __init__(self, budget: int, widths: Sequence[int] = (), *, together: bool = False) -> None:
        self.budget, self.widths, self.together = budget, tuple(widths), together

    @staticmethod
    def of(run: RunConfig, can: Capabilities) -> PrefillPolicy:
        """The policy for a device with these capabilities."""
        widest = min(run.prefill_chunk, MAX_CAPTURED_ROWS)
        widths = powers_of_two(min(MIN_CAPTURED_ROWS, widest), widest)
        return PrefillPolicy(
            run.prefill_chunk,
            widths if can.prompt_graphs else (),
            together=not (can.graphs or can.host_lengths),
        )

    def next_chunks(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        """The chunks of one step. The requests all have prompt tokens left, the oldest is first."""
        return self._padded_together(requests) if self.together else self._one_by_one(requests)

    def _padded_together(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        """Stops at the first request that does not fit; later ones wait behind it."""
        spans: list[PromptSpan] = []
        width = 0
        for request in requests:
            left = request.stop_after(request.prefilled) - request.prefilled
            count = min(left, self.budget)
            if max(width, count) * (len(spans) + 1) > self.budget:
                break
            spans.append(PromptSpan(request, request.prefilled, request.prefilled + count))
            width = max(width, count)
        return [PaddedSpans(spans, width)] if spans else []

    def _one_by_one(self, requests: Iterable[RunningRequest]) -> list[PaddedSpans]:
        """Gives each prompt as many chunks as the rows that are left allow, then the next one."""
        chunks: list[PaddedSpans] = []
        rows_left = self.budget
        for request in requests:
            start, end = request.prefilled, len(request.prompt)
            while start < end:
                count, width = self._fit(request.stop_after(start) - start, rows_left)
                if not count:
                    return chunks
                chunks.append(PaddedSpans([PromptSpan(request, start, start + count)], width))
                start, rows_left = start + count, rows_left - width
        return chunks

    def _fit(self, num_tokens: int, rows_left: int) -> tuple[int, int]:
        """-> tokens that a chunk takes and its width, the smallest that holds them; both are 0 when
        no width fits."""
        if not self.widths:
            count = min(num_tokens, rows_left)
            return count, count
        fitting = [width for width in self.widths if width <= rows_left]
        if not fitting:
            return 0, 0
        count = min(num_tokens, fitting[-1])
        return count, next(width for width in fitting if width >= count)
