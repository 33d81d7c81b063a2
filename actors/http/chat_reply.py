"""One reply of a chat in OpenAI's form: the message of a whole answer, the deltas of a stream.

    text -> ReplyParser -> events -> deltas: reasoning_content, content, tool_calls, in this order
    text, finish_reason -> message
A delta is what its name says: all deltas of a stream, put together, are the message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from outrider.actors.http.calls import ArgumentsPiece, CallBegins, CallEnds
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.reply import Content, Event, Reasoning, ReplyParser, assemble
from outrider.model.reply_form import ReplyForm
from outrider.model.text import Tokenizer

Delta = dict[str, Any]


def reply_parser(body: ChatBody, form: ReplyForm) -> ReplyParser:
    """A parser for one reply to this chat."""
    use = body.tool_use
    return ReplyParser(
        form, use.schemas, max_calls=use.max_calls, calls_in_thought=not use.is_forced
    )


class ChatReply:
    """Of one choice. Either `message` is asked for once, or `deltas` for every piece of text."""

    def __init__(self, body: ChatBody, form: ReplyForm) -> None:
        self._with_reasoning = body.include_reasoning
        self._with_special = not body.skip_special_tokens
        self._parser = reply_parser(body, form)
        self._num_calls = 0
        self._token_ids: list[int] = []

    def deltas(self, text: str, token_ids: Iterable[int], finish: str | None) -> list[Delta]:
        """What the text adds to the message. finish: why it is the last one; None: it is not."""
        self._token_ids += token_ids
        told = [self._delta(event) for event in self._events(text, finish)]
        return [delta for delta in told if delta]

    def message(self, text: str, token_ids: Iterable[int], finish: str) -> dict[str, Any]:
        """The message, but for its role."""
        self._token_ids += token_ids
        reply = assemble(self._events(text, finish))
        self._num_calls = len(reply.calls)
        message: dict[str, Any] = {"content": reply.content}
        if reply.reasoning:
            message |= self._reasoning(reply.reasoning)
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [_call(one.name, one.arguments) for one in reply.calls]
        return message

    def finish_reason(self, finish: str) -> str:
        """OpenAI's word for the end of an answer."""
        return "tool_calls" if finish == "stop" and self._num_calls else finish

    def num_reasoning_tokens(self, tokenizer: Tokenizer | None) -> int:
        """Tokens of the thought, with its tags."""
        end, at = self._parser.num_thought_characters, 0
        if end is not None and tokenizer is not None:
            for count, token in enumerate(self._token_ids):
                if at >= end:
                    return count
                at += tokenizer.num_characters(token, special=self._with_special)
        return len(self._token_ids) if end != 0 else 0

    def _events(self, text: str, finish: str | None) -> list[Event]:
        events = self._parser.push(text)
        return events + (self._parser.finish(was_cut=finish == "length") if finish else [])

    def _delta(self, event: Event) -> Delta:
        match event:
            case Reasoning(text):
                return self._reasoning(text)
            case Content(text):
                return {"content": text}
            case CallBegins(name):
                self._num_calls += 1
                return {"tool_calls": [{"index": self._num_calls - 1, **_call(name, "")}]}
            case ArgumentsPiece(text):
                call = {"index": self._num_calls - 1, "function": {"arguments": text}}
                return {"tool_calls": [call]}
            case CallEnds():
                return {}

    def _reasoning(self, text: str) -> Delta:
        """Under both of its names: DeepSeek's and SGLang's, and vLLM's."""
        return {"reasoning_content": text, "reasoning": text} if self._with_reasoning else {}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
