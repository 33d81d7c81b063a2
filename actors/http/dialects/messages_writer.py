"""How an answer is written to /v1/messages: one message of blocks, or the events that build it.

    Chunk -> ReplyReader -> thought, content, calls -> blocks -> events      all blocks -> a message
A block is a thought, a text or a call of a tool; one is open at a time. A whole answer takes the
same way as a stream, and its events are dropped. Errors have a form of their own too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.http import reply
from outrider.actors.http.bodies import ApiError
from outrider.actors.http.calls import ArgumentsPiece, CallBegins, CallEnds
from outrider.actors.http.reply import Content, Reasoning
from outrider.actors.http.reply_reader import ReplyReader
from outrider.actors.http.writing import Event

ERRORS: Mapping[int, str] = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""`type` of an error by its status."""
DELTAS: Mapping[str, tuple[str, str, str]] = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
"""By type of block: its field that comes in pieces, the type of these, and their own field."""
NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


class MessagesWriter:
    """Writes the answer of one request."""

    stream_end = b""

    def __init__(self, model: str, reader: ReplyReader) -> None:
        self._model, self._reader = model, reader
        self._id = _new_id("msg")
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last block goes on."""
        self._pieces: list[str] = []
        """Text of the open block."""
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._events: list[Event] = []
        self._has_begun = False

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> bytes:
        (answer,) = answers
        self._read(answer)
        return msgspec.json.encode(self._message(self._usage(usage)))

    def events(self, index: int, chunk: Chunk, prompt_ids: Sequence[int]) -> list[Event]:
        self._begin(len(prompt_ids))
        self._read(chunk)
        return self._taken()

    def last_events(self, usage: dict[str, Any]) -> list[Event]:
        self._tell("message_delta", delta=self._ended, usage=self._usage(usage))
        self._tell("message_stop")
        return self._taken()

    def error_events(self, error: ApiError) -> list[Event]:
        return [error_object(error)]

    def _begin(self, num_prompt_tokens: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0, **NO_CACHE}
            self._tell("message_start", message=self._message(usage))
            self._tell("ping")

    def _read(self, part: Chunk | Completion) -> None:
        """More of the answer."""
        for event in self._reader.read(part):
            self._say(event)
        if part.finish_reason is None:
            return
        self._close()
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._ended["stop_sequence"] = part.stop_string
        if part.finish_reason == "length":
            self._ended["stop_reason"] = "max_tokens"
        elif part.stop_string is not None:
            self._ended["stop_reason"] = "stop_sequence"
        else:
            self._ended["stop_reason"] = "tool_use" if has_calls else "end_turn"

    def _say(self, event: reply.Event) -> None:
        match event:
            case Reasoning(text):
                self._open("thinking", thinking="", signature="")
                self._add(text)
            case Content(text):
                self._open("text", text="")
                self._add(text)
            case CallBegins(name):
                self._close()
                self._open("tool_use", id=_new_id("toolu"), name=name, input={})
            case ArgumentsPiece(text):
                self._add(text)
            case CallEnds():
                self._close()

    def _open(self, kind: str, **fields: Any) -> None:
        """The last block is one of this kind now; a new one begins with these fields."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return
        self._close()
        self._blocks.append({"type": kind, **fields})
        self._is_open, self._pieces = True, []
        self._tell_of_block("content_block_start", content_block=dict(self._blocks[-1]))

    def _add(self, text: str) -> None:
        """More of the open block."""
        self._pieces.append(text)
        _, kind, name = DELTAS[self._blocks[-1]["type"]]
        self._tell_of_block("content_block_delta", delta={"type": kind, name: text})

    def _close(self) -> None:
        """The open block, if there is one, is complete, or cut off."""
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._pieces)
        name = DELTAS[block["type"]][0]
        block[name] = _arguments(text) if name == "input" else text
        self._is_open = False
        self._tell_of_block("content_block_stop")

    def _tell_of_block(self, kind: str, **fields: Any) -> None:
        self._tell(kind, index=len(self._blocks) - 1, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields})

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            **self._ended,
            "usage": usage,
        }

    def _usage(self, told: dict[str, Any]) -> dict[str, Any]:
        """`usage` in the words of this API. told: as responses.usage_of."""
        cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": told["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens},
            "speculation": told["speculation"],
        }


def error_object(error: ApiError) -> dict[str, Any]:
    """An error in the form of this API."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else ERRORS[400])
    is_long = error.error["code"] == "context_length_exceeded"
    message = f"prompt is too long: {error}" if is_long else str(error)  # clients look for that
    return {"type": "error", "error": {"type": kind, "message": message}}


def _arguments(text: str) -> dict[str, Any]:
    """Those of a call; none of one that was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
