"""How an answer is written in OpenAI's form: whole, or as the events of a stream.

    Completion -> ResponseWriter.whole -> JSON        Chunk -> ResponseWriter.events -> dicts
Nothing here waits, and nothing knows of sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outrider.actors.driver.messages import Chunk, Completion, DraftInfo, RequestStats
from outrider.actors.http.bodies import ApiError, CompletionBody, Settings
from outrider.actors.http.chat_reply import ChatReply
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.writing import Event
from outrider.model.reply_form import PLAIN, ReplyForm
from outrider.model.text import Tokenizer


@dataclass(kw_only=True)
class ResponseWriter:
    """Writes the answer of one HTTP request, all its choices."""

    stream_end = b"data: [DONE]\n\n"
    body: Settings
    """What the client asked for, also of the answer's form."""
    model: str
    tokenizer: Tokenizer | None
    echoes: Sequence[str] = ()
    """By choice: text that comes before the answer's own."""
    form: ReplyForm = PLAIN
    """Of the reply to a chat."""
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)
    """By choice: characters of its answer so far, for text_offset; set by its first event."""
    _num_tokens: dict[int, int] = field(default_factory=dict)
    """By choice: tokens of its answer so far."""
    _replies: dict[int, ChatReply] = field(default_factory=dict)
    """By choice of a chat."""

    def __post_init__(self) -> None:
        self.chat = isinstance(self.body, ChatBody)
        self.role = self.body.reply_role if isinstance(self.body, ChatBody) else ""
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        options = self.body.stream_options
        self.with_usage = options is not None and options.include_usage
        """A stream ends with an event of the usage alone, and every other says `usage: null`."""
        self.with_running_usage = options is not None and (
            options.include_usage and options.continuous_usage_stats
        )
        """Every other says how many tokens its choice has so far instead."""

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> bytes:
        """The JSON of an answer that is no stream."""
        choices = [
            msgspec.Raw(msgspec.json.encode(self._choice(index, answer)))
            for index, answer in enumerate(answers)
        ]
        told = self._object("chat.completion", choices) | {"usage": self._usage(usage)}
        if self.chat and self.body.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(answers[0])
        return msgspec.json.encode(told)

    def events(self, index: int, chunk: Chunk, prompt_ids: Sequence[int]) -> list[Event]:
        """The events of a stream for one chunk of a choice; none while there is nothing to say."""
        is_first = index not in self._offsets
        logprobs = self._logprobs(index, chunk, prompt_ids)
        echo = self._echo(index) if is_first else ""
        ids: dict[str, Any] = {"token_ids": chunk.token_ids} if self.body.return_token_ids else {}
        prompt = {"prompt_token_ids": prompt_ids} if self.body.return_token_ids and is_first else {}
        source: dict[str, Any] = {}
        if chunk.draft_info is not None and chunk.token_ids:
            ids["draft_info"] = chunk.draft_info
            source = {"draft_info": DraftInfo(source=chunk.draft_info.source)}
        has_news = bool(echo or chunk.text or logprobs or (chunk.token_ids and ids))
        finish = chunk.finish_reason
        choices: list[dict[str, Any]] = []
        if not self.chat:
            if has_news or finish:
                told = {"text": echo + chunk.text, "logprobs": logprobs, "finish_reason": finish}
                choices.append(told | ids | prompt)
        else:
            silent = {"logprobs": None, "finish_reason": None}
            if is_first:
                choices.append({"delta": {"role": self.role, "content": ""}} | silent | prompt)
            reply = self._reply(index)
            deltas = reply.deltas(chunk)
            deltas = ([{"content": echo}] if echo else []) + deltas
            if has_news and not deltas and (logprobs or ids):
                deltas = [{"content": ""}]
            choices += [{"delta": delta} | silent | source for delta in deltas]
            if deltas:
                choices[-len(deltas)] |= {"logprobs": logprobs, **ids}
            if finish:
                choices.append(
                    {"delta": {}} | silent | {"finish_reason": reply.finish_reason(finish)}
                )
        extra = {"usage": None} if self.with_usage else {}
        if self.with_running_usage:
            extra = {"usage": self._running_usage(index, len(prompt_ids), len(chunk.token_ids))}
        return [
            self._object("chat.completion.chunk", [{"index": index, **choice}]) | extra
            for choice in choices
        ]

    def _running_usage(self, index: int, num_prompt: int, num_new: int) -> dict[str, int]:
        """`usage` of one choice so far, in the form of vLLM's continuous_usage_stats."""
        count = self._num_tokens[index] = self._num_tokens.get(index, 0) + num_new
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": count,
            "total_tokens": num_prompt + count,
        }

    def last_events(self, usage: dict[str, Any]) -> list[Event]:
        """The usage, where it is asked for."""
        told = self._object("chat.completion.chunk", []) | {"usage": self._usage(usage)}
        return [told] if self.with_usage else []

    def error_events(self, error: ApiError) -> list[Event]:
        return [{"error": error.error}]

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        echo, finish = self._echo(index), answer.finish_reason
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            reply = self._reply(index)
            message = reply.message(answer)
            if echo:
                message["content"] = echo + (message["content"] or "")
            choice["message"] = {"role": self.role, **message}
            finish = reply.finish_reason(finish)
        else:
            choice["text"] = echo + answer.text
        choice["logprobs"] = self._logprobs(index, answer, answer.prompt_ids)
        if not self.chat and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(answer)
        choice["finish_reason"] = finish
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.token_ids}
        return choice

    def _reply(self, index: int) -> ChatReply:
        """The reply that this choice of a chat is."""
        if index not in self._replies:
            assert isinstance(self.body, ChatBody)
            self._replies[index] = ChatReply(self.body, self.form, self.tokenizer)
        return self._replies[index]

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """With the tokens of the thoughts, of a chat."""
        if not self.chat:
            return usage
        count = sum(one.num_reasoning_tokens for one in self._replies.values())
        return with_reasoning(usage, count)

    def _object(self, chat_object: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    def _prompt_logprobs(self, answer: Completion) -> list[dict[str, Any] | None]:
        """In vLLM's form: of each token of the prompt, by id, its own entry and the likeliest."""
        most = self.body.prompt_logprobs or 0
        rows = answer.prompt_logprobs
        return [None if row is None else self._by_id(row[: 1 + most]) for row in rows]

    def _by_id(self, row: Sequence[tuple[int, float]]) -> dict[str, Any]:
        """row: a token, then the likeliest ones, best first. The rank of a token that is none of
        these is not known."""
        (own, logprob), *likeliest = row
        entries: dict[str, Any] = {str(own): {"logprob": logprob}}
        for rank, (token, value) in enumerate(likeliest, 1):
            entries[str(token)] = {"logprob": value, "rank": rank}
        for token, entry in entries.items():
            entry["decoded_token"] = self._bytes(int(token)).decode(errors="replace")
        return entries

    def _logprobs(
        self, index: int, part: Chunk | Completion, prompt_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        """The log probabilities of a part of an answer, behind those of the prompt if echoed."""
        offset = self._offsets.setdefault(index, 0)
        if self.body.num_logprobs is None:
            return None
        rows = part.logprobs
        if self.chat:
            content = [
                self._entry(*row[0]) | {"top_logprobs": [self._entry(*top) for top in row[1:]]}
                for row in rows
            ]
            return {"content": content, "refusal": None} if rows else None
        told: dict[str, list[Any]] = {
            "tokens": [self._name(row[0][0]) for row in rows],
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": [self._by_name(_with_own(row)) for row in rows],
            "text_offset": [],
        }
        if isinstance(self.body, CompletionBody) and self.body.echo and part.prompt_logprobs:
            special = self.body.echoes_special(index)
            before = self._echoed(index, prompt_ids, part.prompt_logprobs, special=special)
            told = {name: before[name] + values for name, values in told.items()}
            offset = len(self._echo(index))
        for row in rows:
            told["text_offset"].append(offset)
            offset += self._num_characters(row[0][0], special=not self.body.skip_special_tokens)
        self._offsets[index] = offset
        return told

    def _echoed(
        self,
        index: int,
        prompt_ids: Sequence[int],
        rows: Sequence[Sequence[tuple[int, float]] | None],
        *,
        special: bool,
    ) -> dict[str, list[Any]]:
        """`logprobs` of the prompt: null for its first token. rows: Completion.prompt_logprobs.
        special: its special tokens have text."""
        width = 1 + (self.body.num_logprobs or 0)
        shown = [row and row[:width] for row in rows]
        offsets, offset, end = [], 0, len(self._echo(index))
        for token in prompt_ids:
            offsets.append(min(offset, end))
            offset += self._num_characters(token, special=special)
        return {
            "tokens": [self._name(token) for token in prompt_ids],
            "token_logprobs": [row and row[0][1] for row in shown],
            "top_logprobs": [row and self._by_name(_with_own(row)) for row in shown],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token of a chat's log probabilities; bytes null where nothing is known of it."""
        name = self._name(token, escape="")
        return {"token": name, "logprob": logprob, "bytes": list(self._bytes(token)) or None}

    def _by_name(self, tokens: Sequence[tuple[int, float]]) -> dict[str, float]:
        """As many entries as tokens: one that is written like another is named by its id."""
        named: dict[str, float] = {}
        for token, logprob in tokens:
            name = self._name(token)
            named[f"token_id:{token}" if name in named else name] = logprob
        return named

    def _name(self, token: int, escape: str = "bytes:") -> str:
        """How a token is written: its text, or its bytes if they are a part of a character.

        OpenAI marks the latter with "bytes:" in completions, and not in chats.
        """
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        data = self._bytes(token)
        try:
            return data.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return escape + "".join(f"\\x{byte:02x}" for byte in data)

    def _num_characters(self, token: int, *, special: bool = False) -> int:
        """Characters of a text that begin in this token. special: special tokens have text."""
        return (
            0 if self.tokenizer is None else self.tokenizer.num_characters(token, special=special)
        )

    def _bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)


def _with_own(row: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The likeliest tokens of a row, and the token itself where it is none of them."""
    own, *likeliest = row
    return likeliest if own[0] in (token for token, _ in likeliest) else [*likeliest, own]


def with_reasoning(usage: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The usage of a chat. num_tokens: of the thoughts."""
    details = usage["completion_tokens_details"] | {"reasoning_tokens": num_tokens}
    return usage | {"completion_tokens_details": details}


def usage_of(
    prompt_tokens: int, completion_tokens: int, stats: Sequence[RequestStats], num_choices: int = 1
) -> dict[str, Any]:
    """OpenAI's `usage`, with the counts of speculation.

    prompt_tokens: each prompt once. stats: of all choices, prompt by prompt. A prompt's tokens are
    cached as far as they were for the first of its num_choices choices, since the others may share
    its work.
    """
    cached = sum(s.cached_tokens for s in stats[::num_choices])
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "drafter": next((s.drafter for s in stats if s.drafter), None),
            "iterations": sum(s.iterations for s in stats),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
        },
    }
