"""What the actors say to each other: requests and answers, orders, errors, and the wire.

    Engine -- Ask --> Driver -- Orders --> leader -- StepPlan --> followers
    Engine <-- Reply -- Driver <-- StepEvent -- leader
All of these travel as msgpack over zmq PAIR sockets (`Wire`), birth and death by Ray.
A wire lives for one epoch of the ranks (one life of the group): its address is new each time, so a
message of a dead epoch has no way to arrive and needs no number.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
)
from outrider.model.step import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it."""

    prompt: str | list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end the answer before them; their tokens are among `token_ids`."""
    key: str = ""
    """Name under which the caller may abort it; empty: none."""


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """Counters and times of one request."""

    iterations: int = 0
    """Verify passes; the prefill, which yields the first token, is none."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the draft at position i (0 first) was accepted; as long as the engine's K."""
    ttft_s: float = 0.0
    """From submit to the first token."""
    tpot_s: float = 0.0
    """Mean time a token after the first step that yielded one; 0 when nothing followed it."""
    e2e_s: float = 0.0
    """From submit to the last token."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer. `token_ids` holds the stop token, `text` does not."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """As model.step.Progress.logprobs; empty unless sampling.logprobs asks for them."""
    finish_reason: str
    seed: int
    stats: RequestStats


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens since the chunk before. `finish_reason` and `stats` are set on the last one."""

    token_ids: list[int]
    text: str
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    at_s: float = 0.0
    """From submit to the newest of these tokens, on the driver's clock."""
    finish_reason: str | None = None
    stats: RequestStats | None = None


class Failure(msgspec.Struct, frozen=True):
    """One of the errors above, on its way to the caller."""

    kind: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error).__name__
        if kind in ERRORS:
            return cls(kind=kind, message=str(error), detail=getattr(error, "detail", ""))
        trace = "".join(traceback.format_exception(error))
        return cls(EngineDeadError.__name__, f"the driver failed: {kind}: {error}", trace)

    def error(self) -> Exception:
        kind = ERRORS[self.kind]
        if issubclass(kind, EngineDeadError):
            return kind(self.message, self.detail)
        return kind(self.message)


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        QueueFullError,
        EngineDeadError,
        EngineClosedError,
        RequestAbortedError,
    )
}


class Ask(msgspec.Struct, kw_only=True):
    """One call of an Engine: requests to answer whole or in pieces, stats, aborts, or the end."""

    call: int = 0
    """Its number, on every Reply to it; 0 wants none."""
    requests: list[Request] = []
    pieces: bool = False
    """The one request is answered Chunk by Chunk."""
    stats: bool = False
    abort: list[str] = []
    stop: bool = False


class Reply(msgspec.Struct, kw_only=True, frozen=True):
    """One of: all completions, a chunk, stats, a failure; or, unasked, how far loading is."""

    call: int
    completions: list[Completion] = []
    chunk: Chunk | None = None
    stats: dict[str, Any] | None = None
    failure: Failure | None = None
    loaded: tuple[int, int] | None = None
