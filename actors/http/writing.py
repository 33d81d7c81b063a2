"""What every dialect of the API must be able to write, and how server-sent events look.

    Completion -> AnswerWriter.whole -> JSON      Chunk -> AnswerWriter.events -> encoded -> bytes
A writer belongs to one HTTP request. Nothing here waits, and nothing knows of sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.http.bodies import ApiError

Event = dict[str, Any]
"""The data of a server-sent event. One with a `type` is named after it."""


class AnswerWriter(Protocol):
    """Writes the answer of one HTTP request in the words of its dialect."""

    stream_end: bytes
    """What a stream that was not cut ends with, behind its last event."""

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> bytes:
        """The JSON of an answer that is no stream. usage: as responses.usage_of tells it."""
        ...

    def events(self, index: int, chunk: Chunk, prompt_ids: Sequence[int]) -> list[Event]:
        """What a stream says of one chunk of a choice; nothing while there is nothing to say."""
        ...

    def last_events(self, usage: dict[str, Any]) -> list[Event]:
        """What follows the chunks of all choices."""
        ...

    def error_events(self, error: ApiError) -> list[Event]:
        """What a stream ends with that cannot go on."""
        ...


def encoded(events: Iterable[Event]) -> bytes:
    """The events as they are sent."""
    return b"".join(map(_encoded, events))


def _encoded(event: Event) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"
