"""The tools of a chat: which there are, whether the model must call one, and what holds it to that.

    tools, tool_choice, parallel_tool_calls -> ToolUse -> template_tools: for the chat template
                                                       -> schemas: for ReplyParser
                                                       -> grammar: of a reply
With tool_choice none the model is told of no tools, so it calls none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from msgspec.structs import replace
from pydantic import BeforeValidator, Field, WithJsonSchema

from outrider.actors.http.arguments import Schema
from outrider.actors.http.bodies import ApiError, Body
from outrider.actors.http.call_grammar import call_grammar
from outrider.actors.http.rules import rule
from outrider.model.reply_form import ReplyForm
from outrider.model.step import Grammar

NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
"""What a tool may be called."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls a tool, and which."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The tools among which it chooses; None: all."""
    is_one: bool = False
    """Whether it makes one call, and no other."""


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools, in whatever dialect."""

    functions: Sequence[Mapping[str, Any]] = ()
    """Of each tool `name`, and where they are given `description` and `parameters`."""
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True
    """Whether an answer may hold several calls."""

    def check(self) -> None:
        """ApiError for tools and a choice that do not go together."""
        names = Counter(function["name"] for function in self.functions)
        if names and (most := names.most_common(1)[0])[1] > 1:
            raise ApiError(400, f"tools: {most[0]!r} is there {most[1]} times", param="tools")
        if self.choice.mode == "required" and not names:
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        if unknown := set(self.choice.names or ()) - names.keys():
            why = f"tool_choice: there is no tool {min(unknown)!r}"
            raise ApiError(400, why, param="tool_choice")

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice.mode == "required"

    @cached_property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the chat template is told; None: of no tools."""
        if self.choice.mode == "none" or not self.functions:
            return None
        return [{"type": "function", "function": dict(one)} for one in self.functions]

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """By name, the schema of the parameters of each tool that may be called."""
        if self.choice.mode == "none":
            return {}
        all_of_them = {one["name"]: one.get("parameters", {}) for one in self.functions}
        names = self.choice.names
        return {name: one for name, one in all_of_them.items() if names is None or name in names}

    @property
    def max_calls(self) -> int | None:
        """Calls of an answer at most; None: as many as it has."""
        return 1 if self.choice.is_one or not self.is_parallel else None

    def grammar(self, own: Grammar | None, form: ReplyForm) -> Grammar | None:
        """What holds a reply: where a call must be made, the calls alone; else `own`, of the text,
        and the calls in its place. A thought may come first.

        ApiError for tools that the chat template, or a grammar, has no words for.
        """
        if self.schemas and form.calls is None:
            raise no_calls("tools")
        if own is None and not self.is_forced:
            return None
        try:
            calls = ""
            if self.schemas and form.calls is not None:
                calls = call_grammar(self.schemas, form.calls, several=self.max_calls is None)
            if own is None or self.is_forced:
                return Grammar("grammar", calls, form.thought)
            return replace(own, thought=form.thought, calls=calls)
        except ValueError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from None


def no_calls(param: str) -> ApiError:
    """The refusal of a field that only a chat template with calls can write."""
    why = "the chat template of this checkpoint has no words for calls of tools"
    return ApiError(400, f"{param}: {why}", param=param)


def _choice(value: Any) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (name,), is_one=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
        }:
            return ToolChoice(mode, tuple(map(_allowed, tools)))
    raise rule(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": "..."}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
    )


def _allowed(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise rule('allowed_tools: each is {"type": "function", "function": {"name": "..."}}')


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema, as far as it is looked at."""
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict):
        raise rule("properties must be an object")
    if not isinstance(required, list) or not set(map(type, required)) <= {str}:
        raise rule("required must be a list of names")
    return value


Name = Annotated[str, Field(pattern=NAME)]
ChoiceField = Annotated[Any, BeforeValidator(_choice), WithJsonSchema({
    "anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}],
})]  # fmt: skip
"""A ToolChoice."""


class ToolFunction(Body):
    """A tool."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], pydantic.AfterValidator(_parameters)] | None = None

    def told(self) -> dict[str, Any]:
        """What of it the chat template gets."""
        return self.model_dump(exclude_none=True)


class ChatTool(Body):
    type: Literal["function"] = "function"
    function: ToolFunction
