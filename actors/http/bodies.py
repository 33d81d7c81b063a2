"""What the body of a request may say, in OpenAI's form and with our own fields.

    bytes -> parse (parsing.py) -> CompletionBody or ChatBody -> samplings, prompts, conversation
null means that a field is absent. What changes no text (fields.py) is taken out first. Nothing here
waits, and nothing knows of sockets or tokenizers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from outrider.actors.http.fields import changes_nothing
from outrider.actors.http.rules import rule, unsupported
from outrider.actors.http.structured import Structured
from outrider.model.step import (
    MAX_ALLOWED_IDS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Sampling,
)

MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS = 16, 256, 64
MAX_BAD_WORDS, MAX_TEMPLATE_CHARS = 64, 1 << 16
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
SET_BY_SERVER = {"messages", "add_generation_prompt", "continue_final_message", "chat_template"}
"""What chat_template_kwargs may not hold."""
INSTRUCTING = ("system", "developer")
"""Roles of messages that are no turn of the conversation."""


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


def _parts(value: Any) -> Any:
    """The content of a message as a list of parts; a text is one of them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise rule('must be a text, or a list of parts {"type": "text", "text": "..."}')
    return value


def _whole(value: Any) -> Any:
    """5.0 as 5: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bias(value: dict[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            raise rule(f"{reprlib.repr(key)} is no token id: keys are whole numbers in quotes")
    return {int(key): bias for key, bias in value.items()}


def _template_values(value: dict[str, Any]) -> dict[str, Any]:
    value = {name: one for name, one in value.items() if one is not None}
    if not set(map(type, value.values())) <= {bool, int, float, str}:
        raise rule("each value must be a text, a number, true or false")
    if taken := SET_BY_SERVER & value.keys():
        raise rule(f"{min(taken)} is set by the server; it may be a field of the body")
    return value


def _thinking(value: Any) -> Any:
    """true for {"type": "enabled"}, as some clients write it."""
    words = {"enabled": True, "adaptive": True, "disabled": False}
    if isinstance(value, dict) and value.get("type") in words:
        return words[value["type"]]
    if not isinstance(value, bool):
        raise rule('must be true, false, or {"type": "enabled" or "disabled"}')
    return value


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
Ids = {"type": "array", "items": {"type": "integer"}}
Prompts = {"anyOf": [*Texts["anyOf"], Ids, {"type": "array", "items": Ids}]}
TemplateValues = Annotated[dict[str, Any], pydantic.AfterValidator(_template_values)]


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
    stop: Annotated[list[str], BeforeValidator(_stop), WithJsonSchema(Texts)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS)] = []
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=MAX_ID)] | None = None
    priority: Annotated[Whole, Field(ge=-MAX_ID, le=MAX_ID)] = 0
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
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
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

    def samplings(
        self,
        context_left: int,
        defaults: Mapping[str, float],
        banned_ids: tuple[int, ...] = (),
    ) -> list[Sampling]:
        """One for each answer of a prompt that leaves `context_left` tokens.

        defaults: the model's, which win over those of the API (Limits.sampling_defaults).
        banned_ids: the tokens of bad_words.
        """
        asked = self.max_answer_tokens
        max_tokens = max(1, context_left if asked is None else min(asked, context_left))
        keys = self.model_dump(include=SAME_IN_SAMPLING) | {
            "max_tokens": max_tokens,
            "min_tokens": min(self.min_tokens, max_tokens),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_ids": tuple(self.allowed_token_ids or ()),
            "banned_ids": banned_ids,
            "logprobs": self.num_logprobs if self.num_answers == self.n else self.num_logprobs or 0,
            "prompt_logprobs": self.num_prompt_logprobs,
            "stop_ids": tuple(self.stop_token_ids or ()),
            "draft_tokens": self.speculation.draft_tokens,
            "grammar": self.grammar,
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
        if self.stream and self.prompt_logprobs is not None:
            why = "prompt_logprobs: not with stream; echo and logprobs of completions are streamed"
            raise ApiError(400, why, param="prompt_logprobs")
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


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that hold a text."""


class Part(Body):
    """A part of a message."""

    type: str
    text: str

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.get("type")
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            shown = reprlib.repr(kind)
            raise unsupported(f"a part of type {shown}: not supported; this server reads text")
        if kind == "refusal" and "refusal" in given:
            given["text"] = given.pop("refusal")
        return given


class Message(Body):
    """One turn of a conversation. It may be an answer of ours or of another server, sent again."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(_parts)]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content."""
    refusal: str | None = None
    """What an answer says instead of its content."""

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("role") == "assistant":  # an empty answer has no content
            given.setdefault("content", given.get("refusal", ""))
        return given

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """What a chat template gets of this message."""
        told = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        given = {name: value for name, value in told.items() if value is not None}
        return {"role": self.role, "content": self.text, **given}


class ChatBody(Settings):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateValues | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking: Annotated[bool, BeforeValidator(_thinking)] | None = None
    enable_thinking: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        """What the chat template gets. `developer` is another name of `system`.

        All system messages become one at the beginning: templates refuse any other.
        """
        instructions = [m.text for m in self.messages if m.role in INSTRUCTING]
        said = [m.for_template() for m in self.messages if m.role not in INSTRUCTING]
        if instructions:
            said.insert(0, {"role": "system", "content": "\n\n".join(instructions)})
        return said

    @property
    def starts_reply(self) -> bool:
        """Whether the prompt begins a new turn of the assistant."""
        said = self.add_generation_prompt
        return not self.continue_final_message if said is None else said

    @property
    def reply_role(self) -> str:
        """Who says the answer: the assistant, or else who said the last message."""
        return "assistant" if self.starts_reply else self.messages[-1].role

    @property
    def echoed(self) -> str:
        """The text that `echo` puts before the answer: of the last message, if it is the same
        one's who answers."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == self.reply_role else ""

    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template. Of fields that disagree the more special one counts."""
        values: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            values = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks}
        for one in (self.thinking, self.enable_thinking):
            if one is not None:
                values["enable_thinking"] = one
        return values | (self.chat_template_kwargs or {})

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        if self.continue_final_message and self.starts_reply:
            why = "continue_final_message: not with add_generation_prompt, which begins a new one"
            raise ApiError(400, why, param="continue_final_message")
        if self.chat_template is not None and limits is not None and not limits.chat_templates:
            rule = "this server takes none from a request (serve.request_templates)"
            raise ApiError(400, f"chat_template: {rule}", param="chat_template")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")
        if limits is not None:
            limits.check_choices(1, self.num_answers)
