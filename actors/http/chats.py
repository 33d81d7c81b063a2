"""What the body of a chat may say: its messages, and what the chat template is told beside them.

    bytes -> parse (parsing.py) -> ChatBody -> conversation, template_values -> chat template
A message may be an answer of ours or of another server that is sent again. What chats have in
common with completions stands in bodies.py.
"""

from __future__ import annotations

import reprlib
from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from outrider.actors.http.bodies import ApiError, Body, BodyLimits, Settings, Whole
from outrider.actors.http.rules import rule, unsupported
from outrider.actors.http.tools import ChatTool, ChoiceField, ToolChoice, ToolUse, no_calls
from outrider.model.reply_form import ReplyForm
from outrider.model.step import MAX_LOGPROBS, Grammar

MAX_TEMPLATE_CHARS = 1 << 16
SET_BY_SERVER = {
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("tools", "documents"),
}
"""What chat_template_kwargs may not hold."""
INSTRUCTING = ("system", "developer")
"""Roles of messages that are no turn of the conversation."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that hold a text."""


def _parts(value: Any) -> Any:
    """The content of a message as a list of parts; a text is one of them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise rule('must be a text, or a list of parts {"type": "text", "text": "..."}')
    return value


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


TemplateValues = Annotated[dict[str, Any], pydantic.AfterValidator(_template_values)]


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


def _arguments(value: Any) -> Any:
    """The arguments of a call as an object, which is what chat templates write."""
    try:
        if isinstance(value, str):
            value = from_json(value or "{}", allow_inf_nan=False)
    except ValueError as problem:
        raise rule(f"must be an object, in JSON: {problem}") from None
    if not isinstance(value, dict):
        raise rule("must be an object, in JSON")
    return value


class CalledFunction(Body):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = {}


class ToolCall(Body):
    """A call of a tool in an answer that is sent again."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


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
    tool_calls: list[ToolCall] | None = None

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("role") == "assistant":  # an empty answer has no content
            given.setdefault("content", given.get("refusal", ""))
        return given

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """What a chat template gets of this message."""
        told = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()] or None,
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
    include_reasoning: bool = True
    tools: list[ChatTool] = []
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
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
        values |= self.chat_template_kwargs or {}
        tools = self.tool_use.template_tools
        return values | ({"tools": tools} if tools else {})

    @cached_property
    def tool_use(self) -> ToolUse:
        functions = [tool.function.told() for tool in self.tools]
        return ToolUse(functions, self.tool_choice or ToolChoice(), self.parallel_tool_calls)

    @property
    def grammar_fields(self) -> list[str]:
        """A call that must be made leaves nothing of what response_format says of an answer."""
        fields = super().grammar_fields
        if not self.tool_use.is_forced:
            return fields
        return [*(name for name in fields if name != "response_format"), "tool_choice"]

    def grammar_of(self, form: ReplyForm) -> Grammar | None:
        """What holds the reply. ApiError for what the template or a grammar cannot say."""
        if form.calls is None and any(message.tool_calls for message in self.messages):
            raise no_calls("messages")
        return self.tool_use.grammar(self.grammar, form)

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        self.tool_use.check()
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
