"""What a request to /v1/messages may say: Anthropic's Messages API.

    system, messages of content blocks, tools -> MessagesBody.chat_fields -> a chat
Blocks of text are the content of a message of the chat, thoughts and calls of tools belong to the
assistant's, and what a tool returned, which stands in a message of the user, is a message of its
own.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from outrider.actors.http.bodies import Body, StopTexts, Whole
from outrider.actors.http.dialects.body import DialectBody
from outrider.actors.http.rules import rule, unsupported


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A thought that an answer held."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """A thought of another server, which only that can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call that an answer held."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _block(value: Any, kinds: Mapping[str, type[Block]]) -> Block:
    if not isinstance(value, dict):
        raise rule("must be an object")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        shown = reprlib.repr(kind)
        raise unsupported(f"a block of type {shown}: not supported here; this server reads text")
    return kinds[kind].model_validate(value)


def _any_block(value: Any) -> Block:
    return _block(value, BLOCKS)


def _text_block(value: Any) -> Block:
    return _block(value, {"text": TextBlock})


TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
"""How /openapi.json writes a list of blocks, for which a text may stand."""
TextBlocks = Annotated[
    list[Annotated[Any, BeforeValidator(_text_block)]],
    BeforeValidator(_blocks),
    WithJsonSchema(TEXT_OR_LIST),
]
Blocks = Annotated[
    list[Annotated[Any, BeforeValidator(_any_block)]],
    BeforeValidator(_blocks),
    WithJsonSchema(TEXT_OR_LIST),
]


class ToolResultBlock(Body):
    """What the client's tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = []


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock, "thinking": ThinkingBlock, "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock, "tool_result": ToolResultBlock,
}  # fmt: skip


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @property
    def is_begun_reply(self) -> bool:
        """Whether the answer is to go on with this message, where it is the last one."""
        return self.role == "assistant" and any(block.type == "text" for block in self.content)


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputSettings(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class Tool(Body):
    """A tool that the client can call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.pop("type", "custom")
        if kind != "custom":
            why = "not supported; this server knows custom tools, which the client calls"
            raise unsupported(f"a tool of type {reprlib.repr(kind)}: {why}")
        return given


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Body):
    user_id: str | None = None


class CountTokensBody(DialectBody):
    """What makes the prompt of a message."""

    names = {"response_format": "output_config.format", "reasoning_effort": "output_config.effort"}
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    system: TextBlocks = []
    thinking: Thinking | None = None
    output_config: OutputSettings = OutputSettings()
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")

    def chat_fields(self) -> dict[str, Any]:
        schema = self.output_config.format and {"schema": self.output_config.format.schema_}
        tool = {"type": "function", "function": {"name": self.tool_choice.name}}
        choices = {"auto": "auto", "any": "required", "none": "none", "tool": tool}
        return {
            "messages": self._messages(),
            "continue_final_message": self.messages[-1].is_begun_reply,
            "thinking": self.thinking and self.thinking.type != "disabled",
            "reasoning_effort": self.output_config.effort,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": choices[self.tool_choice.type],
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
        }

    def _messages(self) -> list[dict[str, Any]]:
        said = [{"role": "system", "content": block.text} for block in self.system]
        for message in self.messages:
            said += _chat_messages(message)
        return said


class MessagesBody(CountTokensBody):
    names = {**CountTokensBody.names, "stop": "stop_sequences"}
    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: StopTexts = []
    metadata: Metadata = Metadata()

    def chat_fields(self) -> dict[str, Any]:
        own = {
            "max_tokens": self.max_tokens, "stop": self.stop_sequences,
            "user": self.metadata.user_id,
        }  # fmt: skip
        return super().chat_fields() | own


def _chat_messages(message: Turn) -> list[dict[str, Any]]:
    """A message as those of a chat: what tools returned comes before what the user says."""
    returned: list[dict[str, Any]] = []
    told: dict[str, Any] = {"role": message.role, "content": []}
    for block in message.content:
        match block:
            case TextBlock():
                told["content"].append({"type": "text", "text": block.text})
            case ThinkingBlock():
                told["reasoning_content"] = told.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                told.setdefault("tool_calls", []).append(call)
            case ToolResultBlock():
                texts = [{"type": "text", "text": one.text} for one in block.content]
                returned.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": texts}
                )
    return [*returned, told] if told["content"] or not returned else returned


def _chat_tool(tool: Tool) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    said = {name: value for name, value in about.items() if value is not None}
    return {"type": "function", "function": said}
