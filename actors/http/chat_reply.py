"""One reply of a chat in OpenAI's form: the message of a whole answer, the deltas of a stream.

    Chunk -> ReplyReader -> events -> deltas: reasoning_content, content, tool_calls, in this order
    Completion -> message
A delta is what its name says: all deltas of a stream, put together, are the message.
"""

from __future__ import annotations

import secrets
from typing import Any

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.http.calls import ArgumentsPiece, CallBegins, CallEnds
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.reply import Content, Event, Reasoning, assemble
from outrider.actors.http.reply_reader import ReplyReader
from outrider.model.reply_form import ReplyForm
from outrider.model.text import Tokenizer

Delta = dict[str, Any]


class ChatReply:
    """Of one choice. Either `message` is asked for once, or `deltas` for every piece of text."""

    def __init__(self, body: ChatBody, form: ReplyForm, tokenizer: Tokenizer | None) -> None:
        self._with_reasoning = body.include_reasoning
        self._reader = ReplyReader(body, form, tokenizer)
        self._num_calls = 0

    def deltas(self, chunk: Chunk) -> list[Delta]:
        """What the chunk adds to the message."""
        told = [self._delta(event) for event in self._reader.read(chunk)]
        return [delta for delta in told if delta]

    def message(self, answer: Completion) -> dict[str, Any]:
        """The message, but for its role."""
        reply = assemble(self._reader.read(answer))
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

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought so far, with its tags."""
        return self._reader.num_reasoning_tokens

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
