"""What the body of a request may say, in OpenAI's form and with our own fields.

    bytes -> parse (parsing.py) -> CompletionBody, or ChatBody (chats.py) -> samplings, prompts
null means that a field is absent. What changes no text (fields.py) is taken out first. Nothing here
waits, and nothing knows of sockets or tokenizers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from outrider.actors.http.fields import changes_nothing
from outrider.actors.http.rules import rule
from outrider.actors.http.structured import Structured
from outrider.model.step import (
    MAX_ALLOWED_IDS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_IDS,
    MAX_LOGPROBS,
    Grammar,
    Sampling,
)

MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS = 16, 256, 64
MAX_BAD_WORDS = 64
MAX_SALT_CHARS = 1024
MAX_ID = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1


COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of a completion; a chat may go on to the end of the context."""


DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
"""What OpenAI's API means by a field that a request leaves open, unless the model has a default."""
SAME_IN_SAMPLING = {
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos"),
}
"""Fields that go into Sampling as they are."""


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
        super().__init__(status, message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def __str__(self) -> str:
        return str(self.error["message"])

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error where fields have other names. names: the new one by the old one."""
        old, dot, rest = (self.error["param"] or "").partition(".")
        if old not in names:
            return self
        message = str(self)
        if message.startswith(old):
            message = names[old] + message.removeprefix(old)
        return ApiError(
            self.status, message, kind=self.error["type"] or "", param=names[old] + dot + rest,
            code=self.error["code"], retry_after_s=self.retry_after_s,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """What no request to a server may exceed. Checked before any text is tokenised."""

    max_choices: int
    """Answers of one request, prompts x n (serve.max_choices)."""
    max_prompt_tokens: int
    """Of one prompt (limits.max_model_len - 1)."""
    ignore_unknown: bool = False
    """Whether fields that are not known are dropped (serve.unknown_fields)."""
    chat_templates: bool = True
    """Whether a request may bring a chat template (serve.request_templates)."""

    def check_choices(self, num_prompts: int, n: int) -> None:
        """n: of a prompt, the larger one of n and best_of."""
        count = num_prompts * n
        if count > self.max_choices:
            why = f"{num_prompts} prompts x n = {n}: {count} answers"
            rule = f"serve.max_choices = {self.max_choices} is the most for one request"
            raise ApiError(400, f"{why}; {rule}", param="n")

    def check_prompt(self, num_tokens: int, param: str = "prompt", about: str = "") -> None:
        """ApiError for a prompt that cannot fit. param: its field; about: "at least "."""
        most = self.max_prompt_tokens
        if num_tokens > most:
            context = f"maximum context length is {most + 1} tokens (limits.max_model_len)"
            why = f"the prompt has {about}{num_tokens} tokens, {num_tokens - most} too many"
            raise ApiError(
                400, f"{why}: the {context}, which leaves {most} for a prompt; shorten it",
                param=param, code="context_length_exceeded",
            )  # fmt: skip


def _prompts(value: Any) -> Any:
    """The prompts, each a text or token ids. Looks at types and extremes, not at each id."""
    prompts = [value] if isinstance(value, str) else value
    kinds = set(map(type, prompts)) if isinstance(prompts, list) else {None}
    if kinds == {int}:
        prompts = [value]
    elif kinds != {list} and not kinds <= {str}:
        raise rule("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not prompts or not all(prompts):
        raise rule("empty: it needs at least 1 token")
    for ids in (prompt for prompt in prompts if isinstance(prompt, list)):
        if set(map(type, ids)) != {int}:
            raise rule("token ids must be whole numbers")
        if min(ids) < 0 or max(ids) > MAX_ID:
            wrong = next(i for i in ids if not 0 <= i <= MAX_ID)
            raise rule(f"token id {reprlib.repr(wrong)}: ids lie in [0, {MAX_ID}]")
    return prompts


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not set(map(type, texts)) <= {str}:
        raise rule("must be a text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise rule(f"{len(texts)} texts: at most {MAX_STOPS} are allowed")
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise rule(f"a text of {len(text)} characters: each may have 1 to {MAX_STOP_CHARS}")
    return texts


def _whole(value: Any) -> Any:
    """5.0 as 5: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bias(value: dict[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            raise rule(f"{reprlib.repr(key)} is no token id: keys are whole numbers in quotes")
    return {int(key): bias for key, bias in value.items()}


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_ID)]
TokenCount = Annotated[Whole, Field(ge=0, le=MAX_ID)]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
    pydantic.AfterValidator(_bias),
]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
"""How /openapi.json writes a field that takes a text or a list of texts."""
StopTexts = Annotated[list[str], BeforeValidator(_stop), WithJsonSchema(Texts)]
Ids = {"type": "array", "items": {"type": "integer"}}
Prompts = {"anyOf": [*Texts["anyOf"], Ids, {"type": "array", "items": Ids}]}


class Body(pydantic.BaseModel):
    """Exact types (a number is no text), no NaN, no field that we do not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        """Take out what changes nothing."""
        if not isinstance(given, dict):
            return given
        owner, known = cls.table_name(), cls.model_fields
        return cls.complete({
            name: value
            for name, value in given.items()
            if value is not None and (name in known or not changes_nothing(owner, name, value))
        })  # fmt: skip

    @classmethod
    def table_name(cls) -> str:
        """Under which name fields.py lists what this class is sent beside its own fields."""
        return cls.__name__

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The fields, with what follows from them put in."""
        return given

    def check(self, limits: BodyLimits | None) -> None:
        """ApiError for fields that are right alone and not together, or that exceed the limits."""


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    draft_tokens: Annotated[Whole, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class CommonFields(Body):
    """What requests of every dialect may say in the same words."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS)] = []
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=MAX_ID)] | None = None
    priority: Annotated[Whole, Field(ge=-MAX_ID, le=MAX_ID)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Bias | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=MAX_ID)] = 0
    ignore_eos: bool = False
    user: str | None = None
    stream: bool = False
    speculation: Speculation = Speculation()


class Settings(Structured, CommonFields):
    """What completions and chats have in common."""

    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Annotated[Whole, Field(ge=1, le=1 << 16)] = 1
    best_of: Annotated[Whole, Field(ge=1, le=1 << 16)] | None = None
    echo: bool = False
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_IDS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_draft_info: bool = False
    """Each event of a stream holds tokens of one source, which it names: drafts or the target."""
    stream_options: StreamOptions | None = None

    @classmethod
    def table_name(cls) -> str:
        return "Settings"

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None: no log probabilities at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As num_logprobs, of the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def max_answer_tokens(self) -> int | None:
        """Tokens of an answer at most, as the client asked; None: as many as the context holds."""
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked

    @property
    def num_answers(self) -> int:
        """Of one prompt: n, or as many as the n best are chosen from."""
        return self.best_of or self.n

    def kept_prompt_tokens(self, max_model_len: int) -> int | None:
        """The most tokens of a prompt, whose beginning is dropped; None: nothing is.

        -1 leaves room for an answer of max_tokens.
        """
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - max(1, self.max_answer_tokens or 1))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def _check_allowed(self, banned: Sequence[Sequence[int]]) -> None:
        allowed = set(self.allowed_token_ids or ())
        if not allowed:
            return
        if any(len(one) > 1 for one in banned):
            why = "a word of several tokens, not together with allowed_token_ids"
            raise ApiError(400, f"bad_words: {why}: no token might be left", param="bad_words")
        if allowed <= {token for one in banned for token in one}:
            why = "allowed_token_ids: bad_words has all of them, so no token is left"
            raise ApiError(400, why, param="allowed_token_ids")

    def samplings(
        self,
        context_left: int,
        defaults: Mapping[str, float],
        banned: Sequence[Sequence[int]] = (),
        *,
        grammar: Grammar | None,
    ) -> list[Sampling]:
        """One for each answer of a prompt that leaves `context_left` tokens.

        defaults: the model's, which win over those of the API (Limits.sampling_defaults).
        banned: the tokens of each of bad_words. grammar: what holds the answer. ApiError where no
        token might be left.
        """
        self._check_allowed(banned)
        asked = self.max_answer_tokens
        max_tokens = max(1, context_left if asked is None else min(asked, context_left))
        keys = self.model_dump(include=SAME_IN_SAMPLING) | {
            "max_tokens": max_tokens,
            "min_tokens": min(self.min_tokens, max_tokens),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_ids": tuple(self.allowed_token_ids or ()),
            "banned_ids": tuple(token for token, *more in banned if not more),
            "banned_sequences": tuple(tuple(one) for one in banned if len(one) > 1),
            "logprobs": self.num_logprobs if self.num_answers == self.n else self.num_logprobs or 0,
            "prompt_logprobs": self.num_prompt_logprobs,
            "logprob_ids": tuple(dict.fromkeys(self.logprob_token_ids or ())),
            "stop_ids": tuple(self.stop_token_ids or ()),
            "draft_tokens": self.speculation.draft_tokens,
            "grammar": grammar,
        }
        first = self.seed
        seeds = (None if first is None else (first + i) & MAX_SEED for i in range(self.num_answers))
        open_fields = {**DEFAULTS, **defaults}
        return [Sampling(seed=seed, **keys).with_defaults(open_fields) for seed in seeds]

    def check(self, limits: BodyLimits | None) -> None:
        both = {self.max_tokens, self.max_completion_tokens}
        if None not in both and len(both) == 2:
            why = "max_tokens and max_completion_tokens differ: give one"
            raise ApiError(400, why, param="max_tokens")
        others = {
            "min_tokens": self.min_tokens > 0,
            "ignore_eos": self.ignore_eos,
            "allowed_token_ids": bool(self.allowed_token_ids),
            "bad_words": bool(self.bad_words),
        }
        if conflict := self.grammar_conflict(others):
            raise ApiError(400, conflict[1], param=conflict[0])
        if self.num_answers < self.n:
            raise ApiError(
                400, f"best_of = {self.best_of}: less than n = {self.n}", param="best_of"
            )
        if self.num_answers > self.n and self.stream:
            why = f"best_of = {self.best_of}: only {self.n} (n) with stream, which cannot choose"
            raise ApiError(400, why, param="best_of")
        if self.truncate_prompt_tokens == 0:
            why = "truncate_prompt_tokens = 0: a prompt needs 1 token; -1 keeps what fits"
            raise ApiError(400, why, param="truncate_prompt_tokens")
        if self.logprob_token_ids and self.num_logprobs is None:
            why = "logprob_token_ids: only with logprobs"
            raise ApiError(400, why, param="logprob_token_ids")
        if self.stream and self.prompt_logprobs is not None:
            why = "prompt_logprobs: not with stream; echo and logprobs of completions are streamed"
            raise ApiError(400, why, param="prompt_logprobs")
        if self.return_draft_info and not self.stream:
            why = "return_draft_info: only with stream: true, since it tells of single events"
            raise ApiError(400, why, param="return_draft_info")
        most = self.max_answer_tokens
        if most is not None and self.min_tokens > most:
            why = f"min_tokens = {self.min_tokens}: more than max_tokens = {most}"
            raise ApiError(400, why, param="min_tokens")


class CompletionBody(Settings):
    prompt: Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(Prompts)]
    """A list of prompts, whatever the form it came in: texts, or lists of token ids."""
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def max_answer_tokens(self) -> int | None:
        asked = super().max_answer_tokens
        return COMPLETION_TOKENS if asked is None else asked

    def echoes_special(self, choice: int) -> bool:
        """Whether special tokens of its prompt have text in what `echo` puts before a choice: they
        do where the client wrote them as text."""
        return self.truncate_prompt_tokens is None and isinstance(
            self.prompt[choice // self.n], str
        )

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        if limits is not None:
            limits.check_choices(len(self.prompt), self.num_answers)
            if self.truncate_prompt_tokens is None:
                limits.check_prompt(
                    max((len(ids) for ids in self.prompt if isinstance(ids, list)), default=0)
                )
