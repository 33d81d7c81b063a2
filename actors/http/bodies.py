"""OpenAI's requests and answers: what a body may say, and what comes back in which form.

    bytes -> CompletionBody, ChatBody -> Sampling        Chunk, Completion -> ResponseWriter -> dict
A field that is not here is refused by name, never ignored. Beyond OpenAI's: top_k, min_p,
repetition_penalty, min_tokens, ignore_eos, stop_token_ids, return_token_ids, chat_template_kwargs,
speculation. Nothing here waits, and nothing knows of sockets.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from outrider.model.step import MAX_DRAFT_TOKENS, MAX_LOGIT_BIAS, MAX_LOGPROBS, Sampling

MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS = 16, 256, 64


COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of a completion; a chat may go on to the end of the context."""


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


TokenCount = Annotated[int, Field(ge=1, lt=1 << 31)]


BodyT = TypeVar("BodyT", bound="Body")


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.error = {"message": message, "type": kind, "param": param, "code": code}


class Body(pydantic.BaseModel):
    """Exact types (a number is no text), no NaN, no field that we do not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """ApiError for fields that are fine alone and not together."""


class StreamOptions(Body):
    include_usage: bool = False


class Speculation(Body):
    draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class Settings(Body):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    n: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: Annotated[str, Field(max_length=256)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()

    @property
    def top(self) -> int | None:
        """Likeliest tokens to report with each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def ceiling(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def samplings(self, room: int) -> list[Sampling]:
        """One for each of the n choices of a prompt. room: tokens the context has left for it."""
        most = max(1, room if self.ceiling is None else min(self.ceiling, room))
        if self.ceiling is not None and self.min_tokens > self.ceiling:
            raise ApiError(
                400, f"min_tokens = {self.min_tokens}: more than max_tokens", param="min_tokens"
            )
        seed = None if self.seed is None else self.seed & ((1 << 63) - 1)
        keys: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "ignore_eos",
            )
        }  # fmt: skip
        keys |= {
            "max_tokens": most,
            "min_tokens": min(self.min_tokens, most),
            "top_k": max(self.top_k, 0),
            "logit_bias": tuple((int(i), v) for i, v in (self.logit_bias or {}).items()),
            "logprobs": self.top,
            "stop_ids": tuple(self.stop_token_ids or ()),
            "draft_tokens": self.speculation.draft_tokens,
        }
        seeds = (None if seed is None else (seed + i) & ((1 << 63) - 1) for i in range(self.n))
        return [Sampling(seed=one, **keys) for one in seeds]

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream", param="stream_options")


class CompletionBody(Settings):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def ceiling(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return [given]
        return given

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "logprobs: not supported together with echo", param="logprobs")


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(Settings):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def ceiling(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")
        if None not in (both := {self.max_tokens, self.max_completion_tokens}) and len(both) == 2:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens"
            )
        taken = {"messages", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
        if taken:
            raise ApiError(
                400, f"chat_template_kwargs.{min(taken)}: set by us", param="chat_template_kwargs"
            )


def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """The body, or an ApiError 400 that names the first field that is wrong."""
    try:
        body = kind.model_validate_json(data)
        body.check()
        return body
    except pydantic.ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False)[0]
    where = [str(part) for part in first["loc"] if not _is_branch(part)]
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(where[-1], kind.model_fields, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close and len(where) == 1 else ""
        raise ApiError(
            400, f"{name}: not supported by this server{hint}", param=name, code="unsupported"
        )
    rule = first["msg"]
    raise ApiError(400, f"{name}: {rule}" if name else f"the body: {rule}", param=name or None)


def _is_branch(part: object) -> bool:
    """A word of pydantic's for one kind of a union, not a name of ours: `list[str]`, `str`."""
    words = r"(list|dict|function)[-\[].*|constrained-.*|str|int|float|bool|\[key\]"
    return isinstance(part, str) and re.fullmatch(words, part) is not None
