"""How an answer is written in OpenAI's form: whole, or as the events of a stream.

    Completion, Chunk -> ResponseWriter -> dict
Nothing here waits, and nothing knows of sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.actors.driver.messages import Chunk, Completion, RequestStats
from outrider.model.text import REPLACEMENT, Tokenizer


@dataclass(kw_only=True)
class ResponseWriter:
    """How one request's answer is written."""

    chat: bool
    model: str
    tokenizer: Tokenizer | None
    echoes: Sequence[str] = ()
    """By choice: text that comes before the answer's own."""
    token_ids: bool = False
    logprobs: bool = False
    usage_last: bool = False
    """A stream ends with a chunk of the usage alone, and every other says `usage: null`."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    _offsets: dict[int, int] = field(default_factory=dict)
    """By choice: characters of tokens so far, for text_offset; set once the stream has begun"""

    def __post_init__(self) -> None:
        self.id = self.id or ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            text = self._echo(index) + answer.text
            choice: dict[str, Any] = {"index": index}
            choice |= (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            choice["logprobs"] = self._logprobs(index, answer.logprobs)
            choice["finish_reason"] = answer.finish_reason
            if self.token_ids:
                choice |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.token_ids}
            choices.append(choice)
        return self._object("chat.completion", choices) | {"usage": usage}

    def piece(self, index: int, chunk: Chunk, prompt_ids: Sequence[int]) -> list[dict[str, Any]]:
        """The stream's events for one chunk; the first of a choice may have one before it."""
        begins = index not in self._offsets
        text = (self._echo(index) if begins else "") + chunk.text
        logprobs = self._logprobs(index, chunk.logprobs)
        told = bool(text or chunk.finish_reason or logprobs or (self.token_ids and chunk.token_ids))
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": chunk.finish_reason}
        if self.token_ids:
            choice["token_ids"] = chunk.token_ids
            choice |= {"prompt_token_ids": prompt_ids} if begins and not self.chat else {}
        choices = [choice] if told else []
        if self.chat and begins:
            start = {"index": index, "delta": {"role": "assistant", "content": ""}}
            start |= {"logprobs": None, "finish_reason": None}
            start |= {"prompt_token_ids": prompt_ids} if self.token_ids else {}
            choices.insert(0, start)
        extra = {"usage": None} if self.usage_last else {}
        return [self._object("chat.completion.chunk", [one]) | extra for one in choices]

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the usage, behind all others."""
        return self._object("chat.completion.chunk", []) | {"usage": usage}

    def _object(self, chat_object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    def _logprobs(
        self, index: int, rows: Sequence[Sequence[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        """rows: of each token its (id, log probability), then those of the likeliest."""
        offset = self._offsets.setdefault(index, 0)
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                self._entry(*row[0]) | {"top_logprobs": [self._entry(*o) for o in row[1:]]}
                for row in rows
            ]
            return {"content": content, "refusal": None} if rows else None
        tokens = [self._text(row[0][0]) for row in rows]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": [{self._text(i): value for i, value in row[1:]} for row in rows],
            "text_offset": offsets,
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        """A token of a chat's log probabilities; bytes null where it is part of a character."""
        text = self._text(token)
        whole = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": whole}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)


def usage_of(
    prompt_tokens: int, completion_tokens: int, stats: Sequence[RequestStats]
) -> dict[str, Any]:
    """prompt_tokens counts each prompt once, whatever n."""
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "iterations": sum(s.iterations for s in stats),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
        },
    }
