"""How an answer is written to /v1/responses: one object of items, or the events that build it.

    Chunk -> ReplyReader -> thought, content, calls -> items -> events      all items -> the object
An item is a thought, a message or a call of a function; one is open at a time. A whole answer takes
the same way as a stream, and its events are dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.http import reply
from outrider.actors.http.bodies import ApiError
from outrider.actors.http.calls import ArgumentsPiece, CallBegins, CallEnds
from outrider.actors.http.dialects.responses_body import ResponsesBody, sealed
from outrider.actors.http.reply import Content, Reasoning
from outrider.actors.http.reply_reader import ReplyReader
from outrider.actors.http.writing import Event


@dataclass(frozen=True, kw_only=True)
class PartForm:
    """How the one part of an item is told, which holds its text."""

    type: str
    home: str
    """The field of the item that lists the part."""
    index: str
    """What events call the part's place in that list."""
    event: str
    """The beginning of the names of events about the part."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the part."""
    text_extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of events about its text."""


TEXT = PartForm(
    type="output_text", home="content", index="content_index", event="content_part",
    extra={"annotations": [], "logprobs": []}, text_extra={"logprobs": []},
)  # fmt: skip
THOUGHT = PartForm(
    type="reasoning_text", home="content", index="content_index", event="content_part"
)
SUMMARY = PartForm(
    type="summary_text", home="summary", index="summary_index", event="reasoning_summary_part"
)
"""The thought itself, where a summary of it is asked for."""


class ResponsesWriter:
    """Writes the answer of one request."""

    stream_end = b""

    def __init__(
        self,
        body: ResponsesBody,
        model: str,
        reader: ReplyReader,
        defaults: Mapping[str, float],
    ) -> None:
        """defaults: what the request gets for the fields that it leaves open."""
        self._body, self._model, self._reader, self._defaults = body, model, reader, defaults
        self._id, self._created_s = _new_id("resp"), int(time.time())
        self._status = "in_progress"
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item goes on."""
        self._pieces: list[str] = []
        """Text of the open item."""
        self._events: list[Event] = []
        self._num_events = 0
        self._forms = {"message": TEXT, "reasoning": SUMMARY if body.wants_summary else THOUGHT}
        """By type of item."""

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> bytes:
        (answer,) = answers
        self._read(answer)
        return msgspec.json.encode(self._response(usage))

    def events(self, index: int, chunk: Chunk, prompt_ids: Sequence[int]) -> list[Event]:
        self._begin()
        self._read(chunk)
        return self._taken()

    def last_events(self, usage: dict[str, Any]) -> list[Event]:
        self._tell(self._status, response=self._response(usage))
        return self._taken()

    def error_events(self, error: ApiError) -> list[Event]:
        self._begin()
        told = {"code": error.error["code"] or error.error["type"], "message": str(error)}
        self._status = "failed"
        failed = self._response(None) | {"error": {**told, "code": "server_error"}}
        self._events.append(
            {"type": "error", "sequence_number": self._num_events, "param": None} | told
        )
        self._num_events += 1
        self._tell("failed", response=failed)
        return self._taken()

    def _begin(self) -> None:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                self._tell(kind, response=self._response(None))

    def _read(self, part: Chunk | Completion) -> None:
        """More of the answer."""
        for event in self._reader.read(part):
            self._say(event)
        if part.finish_reason is None:
            return
        if not self._items:
            self._open("message", role="assistant", content=[])
        self._status = "incomplete" if part.finish_reason == "length" else "completed"
        self._close(self._status)

    def _say(self, event: reply.Event) -> None:
        match event:
            case Reasoning(text):
                self._text("reasoning", text, summary=[], content=[])
            case Content(text):
                self._text("message", text, role="assistant", content=[])
            case CallBegins(name):
                self._close("completed")
                self._open("function_call", call_id=_new_id("call"), name=name, arguments="")
            case ArgumentsPiece(text):
                self._pieces.append(text)
                self._tell_of_item("function_call_arguments.delta", delta=text)
            case CallEnds():
                self._close("completed")

    def _text(self, kind: str, text: str, **fields: Any) -> None:
        """More text of an item of this kind, which begins with `fields` if it is a new one."""
        if not self._is_open or self._items[-1]["type"] != kind:
            self._close("completed")
            self._open(kind, **fields)
        self._pieces.append(text)
        self._tell_of_text(self._forms[kind], "delta", delta=text)

    def _open(self, kind: str, **fields: Any) -> None:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": _new_id(prefix), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open, self._pieces = True, []
        self._tell("output_item.added", output_index=len(self._items) - 1, item=dict(item))
        if form := self._forms.get(kind):
            self._tell_of_part(form, "added", text="")

    def _close(self, status: str) -> None:
        """The open item, if there is one, is complete, or cut off."""
        if not self._is_open:
            return
        item, text = self._items[-1], "".join(self._pieces)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            self._tell_of_item("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            form = self._forms[kind]
            self._tell_of_text(form, "done", text=text)
            item[form.home] = [self._tell_of_part(form, "done", text=text)]
            if kind == "reasoning" and self._body.wants_sealed_thoughts:
                item["encrypted_content"] = sealed(text)
        item["status"] = status
        self._is_open = False
        self._tell("output_item.done", output_index=len(self._items) - 1, item=item)

    def _tell_of_text(self, form: PartForm, kind: str, **fields: Any) -> None:
        name = "reasoning_summary_text" if form is SUMMARY else form.type
        self._tell_of_item(f"{name}.{kind}", **{form.index: 0}, **fields, **form.text_extra)

    def _tell_of_part(self, form: PartForm, kind: str, *, text: str) -> dict[str, Any]:
        """The part of the open item -> as it is told."""
        part = {"type": form.type, "text": text, **form.extra}
        self._tell_of_item(f"{form.event}.{kind}", **{form.index: 0}, part=part)
        return part

    def _tell_of_item(self, kind: str, **fields: Any) -> None:
        index = len(self._items) - 1
        self._tell(kind, item_id=self._items[-1]["id"], output_index=index, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        number = self._num_events
        self._events.append({"type": f"response.{kind}", "sequence_number": number, **fields})
        self._num_events += 1

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        """The object as it is now; usage: None while it is not known."""
        body = self._body
        is_cut = self._status == "incomplete"
        picked = {
            name: self._defaults[name] if asked is None else asked
            for name, asked in (("temperature", body.temperature), ("top_p", body.top_p))
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "service_tier": "default",
            "store": False,
            **picked,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "user": body.user,
        }

    def _usage(self, told: dict[str, Any]) -> dict[str, Any]:
        """`usage` in the words of this API. told: as responses.usage_of."""
        cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": told["total_tokens"],
            "speculation": told["speculation"],
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
