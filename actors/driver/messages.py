"""What an Engine and its driver say to each other: calls one way, replies the other.

    Engine -- Call --> driver        driver -- Reply --> Engine
Each travels as msgpack over a Connection (ranks/connection.py). Calls that want a reply have a
number, which their replies carry.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from outrider.model.step import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to answer it, as the caller asks for it."""

    prompt: str | list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end the answer before them; their tokens are among `token_ids`."""
    include_stop: bool = False
    """Whether the text that ended the answer, or that of the token which did, belongs to it."""
    show_special: bool = False
    """Whether special tokens have text."""
    draft_info: bool = False
    """Whether each chunk of the answer holds tokens of one source, which its `draft_info` names."""
    priority: int = 0
    """Of those that wait, the request with the smallest number gets the next slot."""
    cache_salt: str = ""
    """Work on a prompt's beginning is shared with requests of the same salt alone."""
    key: str = ""
    """Name under which the caller may abort it; empty: none."""


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """Counters and times of one request."""

    iterations: int = 0
    """Verify passes; the prefill, which yields the first token, is none."""
    drafter: str | None = None
    """Where its drafts came from: speculation.drafter; None where it was offered none."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the draft at position i (0 first) was accepted; as long as the engine's K."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, because an earlier request began like it."""
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
    stop_string: str | None = None
    """The stop string that ended it; None where something else did."""
    seed: int
    stats: RequestStats
    prompt_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    """In the form of `logprobs`, one for each of `prompt_ids`: None for the first, which follows
    nothing. Empty unless sampling.prompt_logprobs asks for them."""


@dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """Where the tokens of a chunk come from.

    The tokens of an iteration are its accepted drafts, which are one chunk, and behind them the
    target's own token, which is another: the one that it says instead of a wrong draft or, where
    all drafts were accepted, one more.
    """

    source: Literal["draft", "target"]
    drafted: int | None = None
    """Drafts that the iteration verified; None unless the chunk is the last of an iteration. The
    first token of an answer comes without one."""
    accepted: int | None = None
    """Of `drafted`, those that were accepted and belong to the answer; None where that is."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens since the chunk before. `finish_reason` and `stats` are set on the last one."""

    token_ids: list[int]
    text: str
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    """On the first chunk: as Completion.prompt_logprobs."""
    at_s: float = 0.0
    """From submit to the newest of these tokens, on the driver's clock."""
    finish_reason: str | None = None
    stop_string: str | None = None
    """On the last chunk: as Completion.stop_string."""
    stats: RequestStats | None = None
    draft_info: DraftInfo | None = None
    """Where GenerationRequest.draft_info asks for it."""


class Failure(msgspec.Struct, frozen=True):
    """An exception on its way to the caller, who raises it again."""

    kind: str
    """Its class name: one of ERRORS."""
    message: str
    detail: str = ""
    """The traceback, where there is one."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """An error that is none of ERRORS is a fault of ours, and ends the call it belongs to."""
        kind = type(error).__name__
        if kind in ERRORS:
            return cls(kind=kind, message=str(error), detail=getattr(error, "detail", ""))
        trace = "".join(traceback.format_exception(error))
        return cls(RequestFailedError.__name__, f"the request failed: {kind}: {error}", trace)

    def error(self) -> Exception:
        kind = ERRORS[self.kind]
        if issubclass(kind, (EngineDeadError, RequestFailedError)):
            return kind(self.message, self.detail)
        return kind(self.message)


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        PromptTooLongError,
        QueueFullError,
        RequestAbortedError,
        RequestFailedError,
        EngineDeadError,
        EngineClosedError,
    )
}


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Answer all of these, each with an Answered, then reply with Completed. `call` is on every
    reply to this call."""

    call: int
    requests: list[GenerationRequest]


class Stream(msgspec.Struct, frozen=True, tag=True):
    """Answer this one; every chunk is a reply."""

    call: int
    request: GenerationRequest


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Reply with Stats."""

    call: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End requests by key. No reply; keys that name no unfinished request are ignored."""

    keys: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the driver. No reply."""


Call = Generate | Stream | GetStats | Abort | Stop
"""What an Engine sends to its driver."""


class Answered(msgspec.Struct, frozen=True, tag=True):
    """One answer of a Generate, as soon as it is there. index: of its request."""

    call: int
    index: int
    completion: Completion


class Completed(msgspec.Struct, frozen=True, tag=True):
    """All answers of a Generate have been sent."""

    call: int


class Streamed(msgspec.Struct, frozen=True, tag=True):
    """One chunk of a Stream; the one with a finish_reason is the last reply."""

    call: int
    chunk: Chunk


class Stats(msgspec.Struct, frozen=True, tag=True):
    call: int
    stats: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The call ends with this error."""

    call: int
    failure: Failure


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Nobody asked for it: bytes loaded and to load, over all ranks."""

    done_bytes: int
    total_bytes: int


Reply = Answered | Completed | Streamed | Stats | Failed | LoadProgress
"""What a driver sends to its Engine."""
