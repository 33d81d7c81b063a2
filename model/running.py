"""What the host knows of the requests on a rank, and of device work that nobody has read yet.

    Join -> RunningRequest (prompt and tokens so far, results in flight)
    a step -> InFlightStep -> read

Plain records of model/runner.py, which alone changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.model.step import Join, Sampling
from outrider.parallel.device import Fetched


@dataclass(slots=True)
class RunningRequest:
    """What the host knows of a request in a slot."""

    join: Join
    draft_tokens: int
    prefilled: int = 0
    emitted: int = 0
    last: int = -1
    in_flight: int = 0
    """Results under way; each brings one token at least."""
    waiting: int = 0
    """Rows of its last verify pass; 0 right after prefill."""
    kept: int = 1
    """Of those, the ones kept, as far as the host has read; 1 right after prefill."""

    draft_lag: int = 0
    """Most rows that the draft has not seen yet (model/backlog.py), without the last pass's."""

    @property
    def prompt(self) -> list[int]:
        return self.join.tokens

    @property
    def sampling(self) -> Sampling:
        return self.join.sampling

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.join.tokens)

    @property
    def position(self) -> int:
        """Rows its caches hold, if all that is under way are first tokens."""
        return len(self.prompt) + self.emitted + self.in_flight - 1

    @property
    def remaining(self) -> int:
        return self.join.sampling.max_tokens - self.emitted

    @property
    def tokens_needed(self) -> int:
        """Tokens that what is under way does not bring for certain."""
        return self.remaining - self.in_flight


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Device work whose results nobody has read yet."""

    firsts: list[tuple[Fetched, list[RunningRequest]]]
    """First tokens [E], and the slots whose prompts ended with them."""
    verified: Fetched | None
    batch_of: list[RunningRequest]
    """Slots of the iteration, and its targets [B, K+1] and kept [B]."""
    limits: list[int]


def log_probs_of(
    slots: Sequence[RunningRequest], ids: list[list[list[int]]], values: list[list[list[float]]]
) -> dict[int, list[list[tuple[int, float]]]]:
    """By request, of each of its rows: (id, log probability) of the token and the likeliest.

    ids, values [n, rows, 1 + top] of the n slots that need logits; slots that were padded follow.
    """
    owners = [slot for slot in slots if slot.sampling.needs_logits]
    return {
        slot.join.request: [
            list(zip(row[: top + 1], logs[: top + 1]))
            for row, logs in zip(ids[index], values[index])
        ]
        for index, slot in enumerate(owners)
        if (top := slot.sampling.logprobs) is not None
    }


def padded(sampled: list[int], size: int) -> list[int]:
    """DecodeBatch indices up to a power of two by the first one again, which changes no result.

    Never up to `size`, the batch: as many as that says that no slot is left to be greedy.
    """
    wanted = 1 << (len(sampled) - 1).bit_length() if sampled else 0
    most = max(len(sampled), size - 1)
    return sampled + sampled[:1] * (min(wanted, most) - len(sampled))
