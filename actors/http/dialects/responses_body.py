"""What a request to /v1/responses may say: OpenAI's Responses API.

    input, instructions, text, reasoning, tools -> ResponsesBody.chat_fields -> a chat
Nothing is kept between requests, so the whole conversation is in `input`: messages, thoughts, calls
of functions and what they returned. Those that follow each other and are the assistant's are one
message of the chat.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from outrider.actors.http.bodies import Body, Whole
from outrider.actors.http.chats import Message, Part
from outrider.actors.http.dialects.body import DialectBody
from outrider.actors.http.rules import rule, unsupported

Texts = list[Part]
SEAL = "outrider:"
INCLUDABLE = frozenset({
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
"""Values of `include`. All but one ask for parts of items that no answer of this server has."""


def sealed(thought: str) -> str:
    """A thought as `encrypted_content`, which clients keep and send again without looking at it.

    It is no secret from whoever asked, so it is not encrypted. The seal tells it from thoughts of
    other servers, which only they can read.
    """
    return SEAL + thought


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


class MessageItem(Message):
    type: Literal["message"] = "message"


class FunctionCall(Body):
    """A call that an answer held."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Body):
    """What the client's function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Texts, BeforeValidator(_parts)]


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """A thought that an answer held."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = []
    content: list[ReasoningPart] = []
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        if self.content:
            return "".join(part.text for part in self.content)
        kept = self.encrypted_content or ""
        if kept.startswith(SEAL):
            return kept.removeprefix(SEAL)
        return "\n\n".join(part.text for part in self.summary)


Item = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem, "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput, "reasoning": ReasoningItem,
}  # fmt: skip


def _item(value: Any) -> Item:
    if not isinstance(value, dict):
        raise rule("must be an object")
    kind = value.get("type") or "message"
    if kind == "item_reference":
        raise unsupported("this server keeps no items (store: false): send the item itself")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise unsupported(f"an item of type {reprlib.repr(kind)}: not supported by this server")
    return ITEMS[kind].model_validate(value)


def _input(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _format(value: Any) -> dict[str, Any]:
    """`text.format`, whose schema stands in it and not in a part of it, as in a chat."""
    said = value if isinstance(value, dict) else {}
    match {name: one for name, one in said.items() if one is not None}:
        case {"type": "text" | "json_object", **rest} as given if not rest:
            return given
        case {"type": "json_schema", "schema": dict(), **rest} as given:
            if rest.keys() <= {"name", "description", "strict"}:
                return given
    raise rule(
        'must be {"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "name": "...", "schema": {...}}'
    )


def _include(value: str) -> str:
    if value not in INCLUDABLE:
        raise unsupported(f"{reprlib.repr(value)}: not supported by this server")
    return value


def _keeps_nothing(value: Any) -> None:
    raise unsupported("this server keeps no answers: send the whole conversation as input")


class TextSettings(Body):
    format: Annotated[dict[str, Any], BeforeValidator(_format)] = {"type": "text"}


class ReasoningSettings(Body):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""


class FunctionTool(Body):
    """A function that the client can call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.get("type")
        if isinstance(kind, str) and kind != "function":
            why = "not supported; this server knows functions, which the client calls"
            raise unsupported(f"a tool of type {reprlib.repr(kind)}: {why}")
        return given


class ResponsesBody(DialectBody):
    names = {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }  # fmt: skip
    input: Annotated[
        list[Annotated[Any, BeforeValidator(_item)]],
        BeforeValidator(_input),
        Field(min_length=1, max_length=4096),
        WithJsonSchema({
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
        }),
    ]  # fmt: skip
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    tools: list[FunctionTool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    include: list[Annotated[str, BeforeValidator(_include)]] = []
    metadata: dict[str, Any] = {}
    structured_outputs: Any = None
    """As a chat has it: a grammar beside those of text.format."""
    previous_response_id: Annotated[None, BeforeValidator(_keeps_nothing)] = None
    conversation: Annotated[None, BeforeValidator(_keeps_nothing)] = None

    @property
    def wants_summary(self) -> bool:
        """Whether thoughts are told as summaries of themselves, which is where clients look."""
        return bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def wants_sealed_thoughts(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    def chat_fields(self) -> dict[str, Any]:
        return {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "structured_outputs": self.structured_outputs,
            "reasoning_effort": self.reasoning.effort,
            "tools": [_nested(tool.model_dump(exclude_none=True)) for tool in self.tools] or None,
            "tool_choice": self._chat_tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages of a chat, behind the instructions."""
        said: list[dict[str, Any]] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case ReasoningItem(text=""):
                    pass
                case ReasoningItem():
                    _reply(said, has=("content", "tool_calls"))["reasoning_content"] = item.text
                case FunctionCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _reply(said).setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    told = {"role": "tool", "tool_call_id": item.call_id}
                    said.append(told | {"content": _text(item.output)})
                case MessageItem(role="assistant"):
                    message = item.model_dump(exclude={"type"}, exclude_none=True)
                    _reply(said, has=("content", "tool_calls")).update(message)
                case MessageItem():
                    said.append(item.model_dump(exclude={"type"}, exclude_none=True))
        return said

    def _response_format(self) -> dict[str, Any]:
        said = dict(self.text.format)
        schema = {"json_schema": said} if said["type"] == "json_schema" else {}
        return {"type": said.pop("type"), **schema}

    def _chat_tool_choice(self) -> Any:
        match self.tool_choice:
            case {"type": "function", "name": str()} as one:
                return _nested(one)
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                allowed = {"mode": mode, "tools": [_nested(tool) for tool in tools]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        return self.tool_choice


def _nested(function: Any) -> Any:
    """A function as chats have it, whose fields stand in a part of it; anything else as it is."""
    match function:
        case {"type": "function", **fields}:
            return {"type": "function", "function": fields}
    return function


def _reply(said: list[dict[str, Any]], *, has: Sequence[str] = ()) -> dict[str, Any]:
    """The message of the assistant that an item belongs to: the last of these, or a new one.

    has: fields of the last message behind which the item cannot stand.
    """
    if not said or said[-1]["role"] != "assistant" or any(name in said[-1] for name in has):
        said.append({"role": "assistant"})
    return said[-1]
