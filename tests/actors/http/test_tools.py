"""Chats with thoughts and tools over HTTP, by the openai client: whole, streamed, cut, replayed.

What a model says is planted (scripted.py): its answers as public templates teach them to models.
test_forced_calls.py shows calls that a grammar makes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.actors.http.bodies import ApiError
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.prompts import chat_text, reply_of
from outrider.actors.http.reply import parse as parse_reply
from outrider.model.text import Tokenizer
from tests.actors.http.local_server import chat, run, serving
from tests.actors.http.scripted import saying
from tests.templates import IN_JSON, IN_TAGS, folder_with

USER = {"role": "user", "content": "Weather in Paris and Rome?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"},
                "hours": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}  # fmt: skip
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]
TAGS = """I look <b>it</b> up: "Grüße".
</think>

Let me see.

<tool_call>
<function=weather>
<parameter=city>
Paris, "France"
</parameter>
<parameter=days>
3
</parameter>
<parameter=hours>
[6, 18]
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
JSON = """<think>
I look <b>it</b> up: "Grüße".
</think>

Let me see.

<tool_call>
{"name": "weather", "arguments": {"city": "Paris, \\"France\\"", "days": 3, "hours": [6, 18]}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""
THOUGHT = 'I look <b>it</b> up: "Grüße".'
CALLS = [
    ("weather", '{"city": "Paris, \\"France\\"", "days": 3, "hours": [6, 18]}'),
    ("now", "{}"),
]
FORMS = {"tags": (IN_TAGS, TAGS), "json": (IN_JSON, JSON)}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose template calls in this form, and what its model says."""
    template, text = FORMS[request.param]
    return folder_with(tmp_path_factory.mktemp(request.param), template), text


async def put_together(stream: AsyncIterator[Any]) -> tuple[dict[str, Any], str, Any]:
    """The message that the deltas of a stream add up to, its finish_reason, and the usage."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    finish, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert finish == ""
            finish = choice.finish_reason or ""
            delta = choice.delta.model_dump(exclude_none=True)
            for part in delta.pop("tool_calls", []):
                index, function = part.pop("index"), part.pop("function")
                if index == len(message["tool_calls"]):  # id, type and name come first, and once
                    assert part.keys() == {"id", "type"}
                    assert function["arguments"] == ""
                    message["tool_calls"].append({**part, "function": function})
                else:
                    assert index == len(message["tool_calls"]) - 1
                    assert not part
                    assert function.keys() == {"arguments"}
                    message["tool_calls"][index]["function"]["arguments"] += function["arguments"]
            for name, piece in delta.items():
                message[name] = (message.get(name) or "") + piece
    if message["tool_calls"]:
        message["content"] = message["content"] or None
    else:
        del message["tool_calls"]
    return message, finish, usage


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message that can be compared with that of another answer."""
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    bare = [{"type": one["type"], "function": one["function"]} for one in calls]
    return {**message, "tool_calls": bare}


def test_a_whole_answer_has_its_parts(form: tuple[Path, str]) -> None:
    folder, text = form

    async def work() -> None:
        async with saying(text, folder) as (_, client):
            answer = await client.chat.completions.create(
                model="tiny", messages=[USER], tools=TOOLS, max_tokens=500
            )
            (choice,) = answer.choices
            message = choice.message.model_dump()
            assert message.get("reasoning_content") == message.get("reasoning") == THOUGHT
            assert message["content"] == "Let me see."
            calls = choice.message.tool_calls
            assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
            assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
            assert choice.finish_reason == "tool_calls"
            tokenizer = Tokenizer(folder)
            said = tokenizer.encode(text[: text.index("</think>") + len("</think>")])
            details = answer.usage.completion_tokens_details
            assert abs(details.reasoning_tokens - len(said)) <= 1  # of a token on both sides

    run(work)


def test_deltas_add_up_to_the_whole_wherever_max_tokens_cuts(form: tuple[Path, str]) -> None:
    folder, text = form
    length = len(Tokenizer(folder).encode(text)) + 1

    async def work() -> None:
        cut_in_call = 0
        async with saying(text, folder) as (_, client):
            for most in (*range(1, length, 3), length, length + 9):
                ask: dict[str, Any] = {
                    "model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": most,
                }  # fmt: skip
                whole = await client.chat.completions.create(**ask)
                stream = await client.chat.completions.create(
                    **ask, stream=True, stream_options={"include_usage": True}
                )
                message, finish, usage = await put_together(stream)
                (choice,) = whole.choices
                assert without_ids(message) == without_ids(
                    choice.message.model_dump(exclude_none=True)
                    | {"content": choice.message.content}
                )
                assert finish == choice.finish_reason
                assert finish == ("tool_calls" if most >= length else "length")
                thoughts = [one.completion_tokens_details for one in (usage, whole.usage)]
                assert thoughts[0].reasoning_tokens == thoughts[1].reasoning_tokens
                for call, (name, arguments) in zip(message.get("tool_calls", []), CALLS):
                    assert call["function"]["name"] == name
                    assert arguments.startswith(call["function"]["arguments"])
                    cut_in_call += arguments != call["function"]["arguments"]
        assert cut_in_call > 4

    run(work)


def test_the_stream_helper_of_the_client_reads_it(form: tuple[Path, str]) -> None:
    folder, text = form

    async def work() -> None:
        async with saying(text, folder) as (_, client):
            async with client.chat.completions.stream(
                model="tiny", messages=[USER], tools=TOOLS, max_tokens=500
            ) as stream:
                done = [event async for event in stream if event.type.endswith(".done")]
            final = await stream.get_final_completion()
            calls = final.choices[0].message.tool_calls
            assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
            named = [event.name for event in done if "tool_calls" in event.type]
            assert named == ["weather", "now"]

    run(work)


class Weather(pydantic.BaseModel):
    """The weather of a city, as a client declares its tool."""

    city: str
    days: int
    hours: list[int]


def test_the_client_parses_arguments_as_its_own_types(form: tuple[Path, str]) -> None:
    folder, text = form
    tool = openai.pydantic_function_tool(Weather, name="weather")

    async def work() -> None:
        async with saying(text, folder) as (_, client):
            answer = await client.chat.completions.parse(
                model="tiny", messages=[USER], tools=[tool], parallel_tool_calls=False,
                max_tokens=500,
            )  # fmt: skip
            (call,) = answer.choices[0].message.tool_calls
            arguments = call.function.parsed_arguments
            assert arguments == Weather(city='Paris, "France"', days=3, hours=[6, 18])

    run(work)


def test_fields_that_leave_something_out(form: tuple[Path, str]) -> None:
    folder, text = form

    async def work() -> None:
        async with saying(text, folder) as (http, _):

            async def ask(**fields: Any) -> dict[str, Any]:
                what = {"messages": [USER], "tools": TOOLS, "max_tokens": 500, **fields}
                got = await http.post("/v1/chat/completions", json=what)
                assert got.status_code == 200, got.text
                return got.json()["choices"][0]

            one = await ask(parallel_tool_calls=False)
            assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == [
                "weather"
            ]
            assert one["finish_reason"] == "tool_calls"
            silent = (await ask(include_reasoning=False))["message"]
            assert silent.keys() == {"role", "content", "tool_calls"}
            for fields in ({"tool_choice": "none"}, {"tools": []}):
                none = await ask(**fields)
                assert none["finish_reason"] == "stop"
                assert none["message"]["content"] == text[text.index("Let me") :]
                assert none["message"]["reasoning"] == THOUGHT
                assert "tool_calls" not in none["message"]
            allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
            some = await ask(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
            assert [call["function"]["name"] for call in some["message"]["tool_calls"]] == ["now"]
            assert "weather" in some["message"]["content"]

    run(work)


def test_with_tool_choice_none_the_model_is_told_of_no_tools(form: tuple[Path, str]) -> None:
    folder, _ = form
    for choice, is_told in (("auto", True), ("required", True), (None, True), ("none", False)):
        said = {"messages": [USER], "tools": TOOLS, "tool_choice": choice}
        body = parse(ChatBody, json.dumps(said).encode())
        assert ("<tools>" in chat_text(Tokenizer(folder), body)) == is_told


def test_thinking_is_off_where_the_prompt_says_so(form: tuple[Path, str]) -> None:
    folder, _ = form

    async def work() -> None:
        text = "<think> is a tag, </think> another."
        async with saying(text, folder) as (http, _):
            for fields, thinks in (
                ({"reasoning_effort": "none"}, False), ({"thinking": False}, False),
                ({"chat_template_kwargs": {"enable_thinking": False}}, False), ({}, True),
            ):  # fmt: skip
                what = {"messages": [USER], "max_tokens": 500, **fields}
                got = (await http.post("/v1/chat/completions", json=what)).json()
                message = got["choices"][0]["message"]
                if thinks:
                    assert message["reasoning_content"] == " is a tag,"
                    assert message["content"] == " another."
                else:
                    assert message == {"role": "assistant", "content": text}
                reasoning = got["usage"]["completion_tokens_details"]["reasoning_tokens"]
                assert (reasoning > 0) == thinks

    run(work)


def test_a_thought_that_never_ends_is_no_content(form: tuple[Path, str]) -> None:
    folder, _ = form

    async def work() -> None:
        async with saying("<think>\nOn and on", folder) as (http, client):
            what = {"messages": [USER], "max_tokens": 500}
            got = (await http.post("/v1/chat/completions", json=what)).json()
            (choice,), usage = got["choices"], got["usage"]
            assert choice["message"]["reasoning_content"] == "On and on"
            assert choice["message"]["content"] == ""
            assert choice["finish_reason"] == "stop"
            count = usage["completion_tokens_details"]["reasoning_tokens"]
            assert usage["completion_tokens"] == count > 3
            stream = await client.chat.completions.create(
                model="tiny", messages=[USER], stream=True, max_tokens=500
            )
            message, finish, _ = await put_together(stream)
            assert message == {"role": "assistant"} | choice["message"]
            assert finish == "stop"

    run(work)


def test_a_chat_is_replayed_through_the_template(form: tuple[Path, str]) -> None:
    """The answer with its calls as the model wrote it, then what the tools said."""
    folder, text = form
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": said}}
        for i, (name, said) in enumerate(CALLS)
    ]
    replayed = {
        "role": "assistant", "content": "Let me see.", "reasoning_content": THOUGHT,
        "tool_calls": calls, "refusal": None, "audio": None, "function_call": None,
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "19"}]}
    said = {"messages": [USER, replayed, result], "tools": TOOLS}
    body = parse(ChatBody, json.dumps(said).encode())
    prompt = chat_text(Tokenizer(folder, special_in_messages=True), body)
    written = text[text.index("Let me") :].replace(".\n\n<tool_call>", ".\n<tool_call>")
    assert f"</think>\n\n{written}<|im_end|>" in prompt
    assert f"<think>\n{THOUGHT}\n</think>" in prompt
    assert "<tool_response>\n19\n</tool_response>" in prompt
    for tool in TOOLS:
        assert json.dumps(tool) in prompt


values = {
    "city": st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="\r<"), min_size=1
    ),
    "days": st.integers(-(10**20), 10**20),
    "hours": st.lists(st.integers(0, 23), max_size=4),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    arguments=st.fixed_dictionaries({}, optional=values),
    other=st.dictionaries(st.sampled_from(["a", "b"]), st.text("ab\n\"\\</p", max_size=9)),
)  # fmt: skip
def test_what_the_template_writes_is_read_as_it_was(
    form: tuple[Path, str], arguments: dict[str, Any], other: dict[str, str]
) -> None:
    folder, _ = form
    tokenizer = Tokenizer(folder, special_in_messages=True)
    meant = arguments | other
    call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps(meant)}}
    said = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": TOOLS}
    body = parse(ChatBody, json.dumps(said).encode())
    prompt = chat_text(tokenizer, body)
    reply, _ = reply_of(tokenizer, body, prompt)
    written = prompt.split("<|im_start|>assistant\n")[-2].removesuffix("<|im_end|>\n")
    (read,) = parse_reply("</think>" + written, reply, body.tool_use.schemas).calls
    assert read.name == "weather"
    assert json.loads(read.arguments) == meant


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "'weather' is there 2 times"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto"'),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice", "there is no tool 'f'",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens",
        "not together with tool_choice",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice",
        "guided_regex and tool_choice",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"required": 5}}}]},
        "tools.0.function.parameters", "required must be a list of names",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": '{"a": '}},
        ]}]},
        "messages.1.tool_calls.0.function.arguments", "must be an object, in JSON",
    ),
)  # fmt: skip


@pytest.mark.parametrize("depth", [150, 199, 100_000])
def test_deep_arguments_are_replayed_or_refused(form: tuple[Path, str], depth: int) -> None:
    folder, _ = form
    said = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = {"type": "function", "function": {"name": "now", "arguments": said}}
    data = json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}).encode()
    if depth > 199:
        with pytest.raises(ApiError, match=r"arguments: must be an object, in JSON: recursion"):
            parse(ChatBody, data)
    else:
        assert "[" * depth in chat_text(Tokenizer(folder), parse(ChatBody, data))


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode())
    assert caught.value.error["param"] == param
    assert why in str(caught.value)


def test_a_template_without_words_for_calls_is_told_so() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    replayed = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    async def work() -> None:
        async with serving(vocab_size=5000, max_model_len=128, num_pages=64) as (client, _, _):
            for fields, param in (
                ({"tools": TOOLS}, "tools"), ({"messages": replayed}, "messages"),
                ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
            ):  # fmt: skip
                got = await client.post("/v1/chat/completions", json=chat(**fields))
                assert got.status_code == 400
                assert got.json()["error"]["param"] == param
                assert "has no words for calls of tools" in got.json()["error"]["message"]
            none = chat(tools=TOOLS, tool_choice="none")
            assert (await client.post("/v1/chat/completions", json=none)).status_code == 200

    run(work)
