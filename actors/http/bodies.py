"""What the body of a request may say, in OpenAI's form and with our own fields.

    bytes -> parse -> CompletionBody or ChatBody -> samplings, prompts, conversation
null means that a field is absent. What changes no text (fields.py) is taken out first; a field that
is not known is refused by name, unless serve.unknown_fields says otherwise. Nothing here waits, and
nothing knows of sockets or tokenizers.
"""

from __future__ import annotations

import codecs
import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from outrider.actors.http.fields import changes_nothing, neutral_values
from outrider.actors.http.structured import Structured
from outrider.model.step import MAX_DRAFT_TOKENS, MAX_LOGIT_BIAS, MAX_LOGPROBS, Sampling

MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS = 16, 256, 64
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
INSTRUCTING = ("system", "developer")
"""Roles of messages that are no turn of the conversation."""
MAX_NAME_CHARS = 64
"""Longest field name that an error repeats in full."""
MAX_NAMED_FIELDS = 20
"""Most fields that one error names."""


BodyT = TypeVar("BodyT", bound="Settings")


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

    def check_choices(self, num_prompts: int, n: int) -> None:
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


def _rule(text: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{text}", {"text": text})


def _unsupported(text: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{text}", {"text": text})


def _prompts(value: Any) -> Any:
    """The prompts, each a text or token ids. Looks at types and extremes, not at each id."""
    prompts = [value] if isinstance(value, str) else value
    kinds = set(map(type, prompts)) if isinstance(prompts, list) else {None}
    if kinds == {int}:
        prompts = [value]
    elif kinds != {list} and not kinds <= {str}:
        raise _rule("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not prompts or not all(prompts):
        raise _rule("empty: it needs at least 1 token")
    for ids in (prompt for prompt in prompts if isinstance(prompt, list)):
        if set(map(type, ids)) != {int}:
            raise _rule("token ids must be whole numbers")
        if min(ids) < 0 or max(ids) > MAX_ID:
            wrong = next(i for i in ids if not 0 <= i <= MAX_ID)
            raise _rule(f"token id {reprlib.repr(wrong)}: ids lie in [0, {MAX_ID}]")
    return prompts


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not set(map(type, texts)) <= {str}:
        raise _rule("must be a text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise _rule(f"{len(texts)} texts: at most {MAX_STOPS} are allowed")
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _rule(f"a text of {len(text)} characters: each may have 1 to {MAX_STOP_CHARS}")
    return texts


def _parts(value: Any) -> Any:
    """The content of a message as a list of parts; a text is one of them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise _rule('must be a text, or a list of parts {"type": "text", "text": "..."}')
    return value


def _whole(value: Any) -> Any:
    """5.0 as 5: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bias(value: dict[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            raise _rule(f"{reprlib.repr(key)} is no token id: keys are whole numbers in quotes")
    return {int(key): bias for key, bias in value.items()}


def _template_values(value: dict[str, Any]) -> dict[str, Any]:
    value = {name: one for name, one in value.items() if one is not None}
    if not set(map(type, value.values())) <= {bool, int, float, str}:
        raise _rule("each value must be a text, a number, true or false")
    if taken := {"messages", "add_generation_prompt"} & value.keys():
        raise _rule(f"{min(taken)} is set by the server")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_ID)]
TokenCount = Annotated[Whole, Field(ge=1, le=MAX_ID)]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
    pydantic.AfterValidator(_bias),
]
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


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    draft_tokens: Annotated[Whole, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class Settings(Structured, Body):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop), WithJsonSchema(Texts)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=1 << 16)] = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Bias | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=MAX_ID)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()

    @classmethod
    def table_name(cls) -> str:
        return "Settings"

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None: no log probabilities at all."""
        raise NotImplementedError

    @property
    def max_answer_tokens(self) -> int | None:
        """Tokens of an answer at most, as the client asked; None: as many as the context holds."""
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def samplings(self, context_left: int, defaults: Mapping[str, float]) -> list[Sampling]:
        """One for each of the n choices of a prompt that leaves `context_left` tokens.

        defaults: the model's, which win over those of the API (Limits.sampling_defaults).
        """
        asked = self.max_answer_tokens
        max_tokens = max(1, context_left if asked is None else min(asked, context_left))
        keys = self.model_dump(include=SAME_IN_SAMPLING) | {
            "max_tokens": max_tokens,
            "min_tokens": min(self.min_tokens, max_tokens),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "logprobs": self.num_logprobs,
            "stop_ids": tuple(self.stop_token_ids or ()),
            "draft_tokens": self.speculation.draft_tokens,
            "grammar": self.grammar,
        }
        first = self.seed
        seeds = (None if first is None else (first + i) & MAX_SEED for i in range(self.n))
        open_fields = {**DEFAULTS, **defaults}
        return [Sampling(seed=seed, **keys).with_defaults(open_fields) for seed in seeds]

    def check(self, limits: BodyLimits | None) -> None:
        """ApiError for fields that are right alone and not together, or that exceed the limits."""
        both = {self.max_tokens, self.max_completion_tokens}
        if None not in both and len(both) == 2:
            why = "max_tokens and max_completion_tokens differ: give one"
            raise ApiError(400, why, param="max_tokens")
        ends = {"min_tokens": self.min_tokens > 0, "ignore_eos": self.ignore_eos}
        if conflict := self.grammar_conflict(ends):
            raise ApiError(400, conflict[1], param=conflict[0])
        most = self.max_answer_tokens
        if most is not None and self.min_tokens > most:
            why = f"min_tokens = {self.min_tokens}: more than max_tokens = {most}"
            raise ApiError(400, why, param="min_tokens")


class CompletionBody(Settings):
    prompt: Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(Prompts)]
    """A list of prompts, whatever the form it came in: texts, or lists of token ids."""
    echo: bool = False
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def max_answer_tokens(self) -> int | None:
        asked = super().max_answer_tokens
        return COMPLETION_TOKENS if asked is None else asked

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "logprobs: not supported together with echo", param="logprobs")
        if limits is not None:
            limits.check_choices(len(self.prompt), self.n)
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
            raise _unsupported(f"a part of type {shown}: not supported; this server reads text")
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

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")
        if limits is not None:
            limits.check_choices(1, self.n)


def parse(kind: type[BodyT], data: bytes, limits: BodyLimits | None = None) -> BodyT:
    """The body, or an ApiError 400.

    The error names all fields that are not supported, or else the first that is wrong and its rule.
    """
    try:
        given = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as problem:
        raise ApiError(400, f"the body: Invalid JSON: {problem}") from None
    try:
        body = kind.model_validate(given)
    except pydantic.ValidationError as problem:
        problems = problem.errors(include_url=False)
        unknown = [one for one in problems if _is_unknown(one)]
        if limits is None or not limits.ignore_unknown or not unknown:
            raise _refusal(kind, problems) from None
        body = _without(kind, given, unknown)
    body.check(limits)
    return body


def _is_unknown(problem: ErrorDetails) -> bool:
    """Whether it is a field that nobody here has heard of."""
    return problem["type"] == "extra_forbidden" and not neutral_values(str(problem["loc"][-1]))


def _without(kind: type[BodyT], given: Any, unknown: Sequence[ErrorDetails]) -> BodyT:
    """The body without its unknown fields; ApiError where something else is wrong."""
    for problem in unknown:
        *path, name = problem["loc"]
        holder = given
        for step in path:
            holder = holder[step]
        del holder[name]
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as problem:
        raise _refusal(kind, problem.errors(include_url=False)) from None


def _refusal(kind: type[Body], problems: Sequence[ErrorDetails]) -> ApiError:
    """problems: pydantic's description of what is wrong; its `loc` holds names and indices."""
    foreign = [one for one in problems if one["type"] in ("extra_forbidden", "unsupported")]
    if foreign:
        why = "; ".join(_why_unsupported(kind, one) for one in foreign[:MAX_NAMED_FIELDS])
        more = len(foreign) - MAX_NAMED_FIELDS
        why += f"; and {more} more" if more > 0 else ""
        return ApiError(400, why, param=_name_of(foreign[0]), code="unsupported")
    problem = problems[0]
    name = _name_of(problem)
    if not problem["loc"]:
        return ApiError(400, f"the body: {problem['msg']}")
    if problem["type"] in ("rule", "missing"):
        return ApiError(400, f"{name}: {problem['msg']}", param=name)
    value = reprlib.repr(problem["input"])
    return ApiError(400, f"{name} = {value}: {problem['msg']}", param=name)


def _why_unsupported(kind: type[Body], problem: ErrorDetails) -> str:
    name = _name_of(problem)
    if problem["type"] == "unsupported":
        return f"{name}: {problem['msg']}"
    if neutral := neutral_values(str(problem["loc"][-1])):
        allowed = " or ".join(json.dumps(value) for value in neutral)
        value = reprlib.repr(problem["input"])
        return f"{name} = {value}: not supported by this server; only {allowed} is accepted"
    known = kind.model_fields if len(problem["loc"]) == 1 else ()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{name or repr(name)}: not supported by this server{hint}"


def _name_of(problem: ErrorDetails) -> str:
    """The field that a problem is about; names of nested ones are joined by dots."""
    return ".".join(_shortened(str(part)) for part in problem["loc"])


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."
