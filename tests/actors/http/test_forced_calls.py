"""Calls that must be made, of a model that knows nothing of them: a grammar makes them valid.

The bundled checkpoint answers, with drafts and without; jsonschema says what is valid.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider.actors.http.bodies import ApiError
from outrider.actors.http.call_grammar import call_grammar
from outrider.actors.http.tools import ToolChoice, ToolUse
from outrider.model.grammar import GrammarError, compiled
from outrider.model.reply_form import ReplyForm
from outrider.model.step import Grammar
from tests.actors.http.local_server import run
from tests.actors.http.test_parameters import server
from tests.templates import IN_JSON, IN_TAGS, folder_with

USER = {"role": "user", "content": "Weather in Paris and Rome?"}
OFF = {"speculation": {"draft_tokens": 0}}
NO_THOUGHT = {"enable_thinking": False}


def tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False, "required": list(properties)}
    parameters = {**closed, "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PLACE = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
         "required": ["x"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    tool(
        "move",
        {
            "mode": {"enum": ["walk", "run"]}, "to": {"$ref": "#/$defs/place"},
            "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]{2}$"},
            "name": {"type": "string", "minLength": 1, "maxLength": 4},
            "fast": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "路": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        },
        required=["mode", "to", "code", "name"],
        **{"$defs": {"place": PLACE}},
    ),
    tool("count", {"to": {"type": "integer", "minimum": 10, "maximum": 99}}),
]  # fmt: skip
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


@pytest.fixture(scope="module", params=["xml", "json"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = {"xml": IN_TAGS, "json": IN_JSON}[request.param]
    return folder_with(tmp_path_factory.mktemp(request.param), template)


def valid_calls(message: dict[str, Any]) -> list[str]:
    """The names of the calls, which are valid."""
    for call in message["tool_calls"]:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return [call["function"]["name"] for call in message["tool_calls"]]


def test_calls_are_valid_and_the_same_with_drafts(folder: Path) -> None:
    named = {"type": "function", "function": {"name": "count"}}

    async def work() -> None:
        called, accepted = list[list[str]](), 0
        async with server(folder) as ask:
            for number in range(1, 6):
                choice = named if number == 5 else "required"
                tools = {1: TOOLS[:1], 2: TOOLS[:1], 3: TOOLS[1:]}.get(number, TOOLS)
                what: dict[str, Any] = {
                    "messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 400,
                    "temperature": number % 2, "seed": number, **NO_THOUGHT,
                    "parallel_tool_calls": number in (3, 5),
                }  # fmt: skip
                if (
                    number == 3
                ):  # EOS is unlikely: one call after the other, of which the last is cut
                    what |= {"logit_bias": {"0": -100, "2": -100}, "max_tokens": 120}
                on = await ask("chat/completions", **what)
                off = await ask("chat/completions", **what, **OFF)
                (choice,), (plain,) = on["choices"], off["choices"]
                assert choice["token_ids"] == plain["token_ids"]
                assert off["usage"]["speculation"]["drafted_tokens"] == 0
                accepted += on["usage"]["speculation"]["accepted_tokens"]
                assert choice["finish_reason"] == ("length" if number == 3 else "tool_calls")
                if number == 3:
                    choice["message"]["tool_calls"].pop()
                else:
                    assert choice["message"]["content"] is None
                called.append(valid_calls(choice["message"]))
            several = called.pop(2)
            assert called == [["move"], ["move"], ["count"], ["count"]]
            assert len(several) > 1
            assert set(several) == {"count"}
            assert accepted > 100

    run(work, limit_s=120)


def test_a_thought_comes_before_the_call_it_must_make(folder: Path) -> None:
    """Tokens that spell </think> are made likely, so that the model closes its thought soon."""
    from outrider.model.text import Tokenizer

    tokenizer = Tokenizer(folder)
    spelling = tokenizer.encode("<think>") + tokenizer.encode("</think>")
    bias = {str(token): 12 for token in spelling}

    async def work() -> None:
        async with server(folder) as ask:
            for seed in (2, 4):
                what: dict[str, Any] = {
                    "messages": [USER], "tools": TOOLS[1:], "tool_choice": "required",
                    "parallel_tool_calls": False, "logit_bias": bias, "seed": seed,
                    "max_tokens": 200, "temperature": 1,
                }  # fmt: skip
                on = await ask("chat/completions", **what)
                off = await ask("chat/completions", **what, **OFF)
                (choice,), (plain,) = on["choices"], off["choices"]
                assert choice["token_ids"] == plain["token_ids"]
                reasoning = on["usage"]["completion_tokens_details"]["reasoning_tokens"]
                assert 0 < reasoning < on["usage"]["completion_tokens"]
                assert choice["message"]["reasoning"]
                assert choice["finish_reason"] == "tool_calls"
                assert valid_calls(choice["message"]) == ["count"]

    run(work, limit_s=120)


def test_an_answer_in_json_comes_behind_the_thought_or_calls_come_instead(folder: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1,
              "maximum": 9}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    async def work() -> None:
        said = set[str]()
        async with server(folder) as ask:
            for seed in range(12):
                got = await ask(
                    "chat/completions", messages=[USER], tools=TOOLS[1:], response_format=form,
                    seed=seed, temperature=3, parallel_tool_calls=False, max_tokens=90,
                    **NO_THOUGHT,
                )  # fmt: skip
                (choice,) = got["choices"]
                said.add(choice["finish_reason"])
                if choice["finish_reason"] == "tool_calls":
                    assert valid_calls(choice["message"]) == ["count"]
                else:
                    assert 1 <= json.loads(choice["message"]["content"])["n"] <= 9
        assert said == {"stop", "tool_calls"}

    run(work, limit_s=120)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a>b": {}}}, "a parameter cannot be called 'a>b'"),
        ({"properties": {"a": {"type": "string", "minLength": -1}}}, "-1 is no number of char"),
        (
            {"properties": {"a": {"type": "string", "pattern": "a", "maxLength": 2}}},
            "not together with minLength or maxLength",
        ),
        ({"properties": {str(n): {} for n in range(1001)}}, "at most 1000"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/0"}},
                "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 9} for n in range(99)},
            },
            "16 references to one of them",
        ),
    ],
)
def test_schemas_that_no_grammar_says_are_refused(schema: dict[str, Any], why: str) -> None:
    use = ToolUse([{"name": "f", "parameters": schema}], ToolChoice("required"))
    with pytest.raises(ApiError) as caught:
        use.grammar(None, ReplyForm("none", "xml"))
    assert caught.value.error["param"] == "tools"
    assert why in str(caught.value)


def test_hostile_tools_are_refused_in_time() -> None:
    """Definitions that each of many values would hold again, and names that all are looked for."""
    values = {str(n): {"type": "array", "items": {"$ref": "#/$defs/a"}} for n in range(900)}
    schema = {"properties": values, "$defs": {"a": {"enum": ["x" * 50] * 50_000}}}
    tools = [{"name": f"tool{n}", "parameters": schema} for n in range(100_000)]
    started = time.process_time()
    with pytest.raises(ApiError, match="too many schemas of values"):
        ToolUse(tools[:1], ToolChoice("required")).grammar(None, ReplyForm("none", "xml"))
    ToolUse(tools).check()
    with pytest.raises(ApiError, match="'tool5' is there 2 times"):
        ToolUse([*tools, tools[5]]).check()
    assert time.process_time() - started < 2.0


def test_a_pattern_holds_as_it_would_in_json_schema() -> None:
    """Anywhere in the text, unless it is anchored; slashes and escapes as they are."""
    import llguidance

    trie = llguidance.LLTokenizer("byte")
    cases = {
        "b+": ("abba", "xay"), "^b": ("ba", "ab"), "b$": ("ab", "ba"), "^[ab]$": ("a", "ab"),
        r"^a/\d$": ("a/5", "a/x"), r"^a\/b$": ("a/b", "ab"), r"\$$": ("a$", "a"),
    }  # fmt: skip
    for pattern, (right, wrong) in cases.items():
        schema = {"properties": {"p": {"type": "string", "pattern": pattern}}, "required": ["p"]}
        grammar = Grammar("grammar", call_grammar({"f": schema}, "xml", several=False))
        for text, is_right in ((right, True), (wrong, False)):
            call = "<tool_call>\n<function=f>\n<parameter=p>\n"
            call += f"{text}\n</parameter>\n</function>\n</tool_call>"
            matcher = compiled(grammar, trie)
            length = len(call.encode())
            accepted = matcher.try_consume_tokens(list(call.encode())) == length
            assert (accepted and matcher.is_accepting()) == is_right, (pattern, text)
    bad = {"properties": {"p": {"type": "string", "pattern": "(?=a)"}}}
    with pytest.raises(GrammarError):
        compiled(Grammar("grammar", call_grammar({"f": bad}, "xml", several=False)), trie)
