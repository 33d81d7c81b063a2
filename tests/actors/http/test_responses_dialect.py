"""/v1/responses: a chat in other words, spoken to by OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel

from outrider.actors.http.bodies import ApiError
from outrider.actors.http.dialects.responses_body import ResponsesBody
from outrider.actors.http.parsing import validated
from outrider.model.step import Grammar
from tests.actors.http.local_server import run, serving

ROOM: dict[str, Any] = {"vocab_size": 5000, "max_model_len": 256, "num_pages": 100}
USER = {"role": "user", "content": "What is a view?"}
TOLD = ("id", "created_at", "completed_at", "output")
"""What differs between two answers to the same request, or is looked at apart."""


@asynccontextmanager
async def asking(**how: Any) -> AsyncIterator[tuple[httpx.AsyncClient, openai.AsyncOpenAI]]:
    async with serving(**ROOM, **how) as (client, _, _):
        url = f"{client.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as own:
            yield client, own


async def events(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; asserts that each is named after its type, and their numbers."""
    found, name = [], ""
    async with client.stream("POST", "/v1/responses", json=fields | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                found.append(httpx.Response(200, text=line.removeprefix("data: ")).json())
                assert found[-1]["type"] == name
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_the_answer_is_that_of_a_chat_whole_and_streamed() -> None:
    async def work() -> None:
        async with asking() as (client, own):
            chat = {
                "messages": [{"role": "system", "content": "Be brief."}, USER], "max_tokens": 30,
                "temperature": 0.5, "seed": 3,
            }  # fmt: skip
            right = (await client.post("/v1/chat/completions", json=chat)).json()
            how: dict[str, Any] = {
                "model": "tiny", "input": [USER], "instructions": "Be brief.", "temperature": 0.5,
                "max_output_tokens": 30, "metadata": {"run": "1"}, "extra_body": {"seed": 3},
            }  # fmt: skip
            whole = await own.responses.create(**how)
            assert whole.output_text == right["choices"][0]["message"]["content"]
            assert len(set(whole.output_text)) > 20
            assert (whole.status, whole.model) == ("incomplete", "tiny")
            assert whole.incomplete_details is not None
            assert whole.incomplete_details.reason == "max_output_tokens"
            assert (whole.instructions, whole.metadata) == ("Be brief.", {"run": "1"})
            assert (whole.temperature, whole.top_p) == (0.5, 1.0)
            assert whole.usage is not None
            usage = whole.usage.model_dump()
            count = right["usage"]["prompt_tokens"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (count, 30)
            assert usage["total_tokens"] == count + 30
            assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
            assert usage["speculation"]["drafted_tokens"] > 0
            async with own.responses.stream(**how) as stream:
                text = "".join(
                    [e.delta async for e in stream if e.type == "response.output_text.delta"]
                )
            assert text == whole.output_text
            told = await events(client, **(how | {"extra_body": None}), seed=3)
            last = told[-1]["response"]
            assert told[-1]["type"] == "response.incomplete"
            assert {**last, **dict.fromkeys(TOLD)} == {
                **whole.model_dump(mode="json", exclude_unset=True), **dict.fromkeys(TOLD),
                "usage": last["usage"],
            }  # fmt: skip
            (item,) = last["output"]
            assert item["content"][0]["text"] == whole.output_text

    run(work)


def test_a_stream_tells_each_item_from_its_beginning_to_its_end() -> None:
    async def work() -> None:
        async with asking(step_s=0.05) as (client, _):
            told = await events(client, input="hi", max_output_tokens=20, store=True)
        kinds = [event["type"].removeprefix("response.") for event in told]
        deltas = kinds.count("output_text.delta")
        assert deltas >= 2
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added",
            *["output_text.delta"] * deltas, "output_text.done", "content_part.done",
            "output_item.done", "incomplete",
        ]  # fmt: skip
        for event in told[:2]:
            assert event["response"]["status"] == "in_progress"
            assert event["response"]["output"] == []
        added, done = told[2]["item"], told[-2]["item"]
        assert (added["status"], added["content"]) == ("in_progress", [])
        assert done["status"] == "incomplete"
        text = "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta")
        assert told[-4]["text"] == told[-3]["part"]["text"] == done["content"][0]["text"] == text
        assert {event["item_id"] for event in told[3:-2]} == {added["id"]} == {done["id"]}
        assert told[-1]["response"]["output"] == [done]
        assert told[-1]["response"]["store"] is False

    run(work)


def test_an_answer_that_ends_by_itself_is_completed() -> None:
    async def work() -> None:
        async with asking() as (client, own):
            how = {"input": "hi", "temperature": 0, "max_output_tokens": 20}
            text = (await client.post("/v1/responses", json=how)).json()["output"][0]["content"]
            stop = text[0]["text"][5]
            whole = await own.responses.create(
                model="tiny", input="hi", temperature=0, extra_body={"stop": [stop]}
            )
            assert whole.output_text == text[0]["text"][:5]
            assert (whole.status, whole.incomplete_details) == ("completed", None)
            assert whole.completed_at is not None
            told = await events(client, input="hi", temperature=0, stop=[stop])
            assert told[-1]["type"] == "response.completed"
            first = await own.responses.create(
                model="tiny", input="hi", temperature=0, extra_body={"stop": [text[0]["text"][0]]}
            )
            assert first.output_text == ""
            assert [item.type for item in first.output] == ["message"]

    run(work)


def conversation(**fields: Any) -> list[dict[str, Any]]:
    """The messages of the chat that a body means."""
    body = validated(ResponsesBody, {"input": [USER], **fields}, None)
    return body.chat_fields()["messages"]


def test_items_become_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc"}
    thought = {
        "type": "reasoning", "id": "rs", "summary": [], "status": "completed",
        "content": [{"type": "reasoning_text", "text": text} for text in ("Hm", ".")],
    }  # fmt: skip
    said = {
        "type": "message", "role": "assistant", "id": "msg", "status": "completed",
        "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
    }  # fmt: skip
    items = [
        {"role": "developer", "content": "Answer."}, USER, thought, said, call,
        call | {"call_id": "c2", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "5"}, {"type": "input_text", "text": "6"}]},
        said, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}, call,
        {"role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]  # fmt: skip
    function = {"name": "f", "arguments": "{}"}
    text = {"type": "output_text", "text": "Wait."}
    assert conversation(input=items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Answer."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is a view?"}]},
        {"role": "assistant", "reasoning_content": "Hm.", "content": [text], "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "56"},
        {"role": "assistant", "content": [text]},
        {"role": "assistant", "reasoning_content": "So.", "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
        ]},
        {"role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]  # fmt: skip
    assert conversation(input="hi") == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    ]
    empty = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": None}
    assert conversation(input=[USER, empty]) == conversation(input=[USER])


class City(BaseModel):
    name: str
    people: int


def test_a_format_of_the_text_is_a_grammar_of_the_answer() -> None:
    schema = City.model_json_schema()
    for given, right in (
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "City", "schema": schema, "strict": True},
            {"type": "json_schema",
             "json_schema": {"name": "City", "schema": schema, "strict": True}},
        ),
    ):  # fmt: skip
        body = validated(ResponsesBody, {"input": "a", "text": {"format": given}}, None)
        assert body.chat_fields()["response_format"] == right
        body.check(None)
        assert (body.chat.grammar is None) == (given["type"] == "text")
    own = {"input": "a", "structured_outputs": {"regex": "a+"}}
    body = validated(ResponsesBody, own, None)
    body.check(None)
    assert body.chat.grammar == Grammar("regex", "a+")
    both = validated(ResponsesBody, own | {"text": {"format": {"type": "json_object"}}}, None)
    with pytest.raises(ApiError, match=r"response_format and structured_outputs: .* give one"):
        both.check(None)


def test_a_prompt_is_counted_without_an_answer() -> None:
    async def work() -> None:
        async with asking() as (client, own):
            how: dict[str, Any] = {"model": "tiny", "input": [USER], "instructions": "Be brief."}
            whole = await own.responses.create(**how, max_output_tokens=2)
            count = await own.responses.input_tokens.count(**how)
            assert whole.usage is not None
            assert count.input_tokens == whole.usage.input_tokens
            assert count.object == "response.input_tokens"
            stats = (await client.get("/v1/stats")).json()
            assert stats["requests_submitted"] == 1

    run(work)


ACCEPTED: dict[str, Any] = {
    "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "s", "user": "u", "max_tool_calls": 3,
    "client_metadata": {"a": "b"}, "truncation": "disabled",
    "parallel_tool_calls": False, "background": False, "top_logprobs": 0,
    "stream_options": {"include_obfuscation": False}, "tools": [], "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"}, "previous_response_id": None,
    "conversation": None, "top_k": 5, "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip

REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
    ({"background": True}, "background", "only false is accepted"),
    ({"truncation": "auto"}, "truncation", 'only "disabled" is accepted'),
    ({"top_logprobs": 2}, "top_logprobs", "only 0 is accepted"),
    ({"include": ["message.output_text.logprobs"]}, "include.0", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported by this server"),
    ({"messages": [USER]}, "messages", "not supported by this server"),
    ({"max_tokens": 5}, "max_tokens", "not supported by this server"),
    ({"n": 2}, "n", "not supported by this server"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "send the item itself"),
    ({"input": [USER, {"type": "web_search_call"}]}, "input.1", "an item of type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0", "a part of type 'input_image'",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "a tool of type 'web_search'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "must be"),
    ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "wild"),
    ({"input": []}, "input", "at least 1"),
    ({"input": 5}, "input", "list"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_what_this_server_does_not_do_is_refused_by_name(
    fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(ApiError) as caught:
        validated(ResponsesBody, {"input": "a", **fields}, None).check(None)
    assert caught.value.error["param"] == param
    assert why in str(caught.value)


def test_what_changes_no_text_is_accepted_and_errors_have_names_of_this_api() -> None:
    async def work() -> None:
        async with asking() as (client, own):
            fields = {"model": "tiny", "input": "hi", "max_output_tokens": 5}
            got = await client.post("/v1/responses", json=fields | ACCEPTED)
            assert got.status_code == 200, got.text
            assert got.json()["parallel_tool_calls"] is False
            with pytest.raises(openai.NotFoundError, match="not served here"):
                await own.responses.create(model="gpt", input="a")
            with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
                await own.responses.create(model="tiny", input="view " * 1000)
            assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
            bad = {"type": "json_schema", "name": "a", "schema": {"type": "object", "if": {}}}
            got = await client.post("/v1/responses", json=fields | {"text": {"format": bad}})
            assert got.json()["error"]["param"] == "text.format"
            assert got.json()["error"]["message"].startswith("text.format (json_schema): Unimpl")

    run(work)


def test_a_stream_that_cannot_go_on_ends_with_a_failed_response() -> None:
    async def work() -> None:
        async with serving(step_s=0.02, **ROOM) as (client, _, endpoints):
            told: list[str] = []
            fields = {"input": "hi", "stream": True, "max_output_tokens": 200}
            async with client.stream("POST", "/v1/responses", json=fields) as response:
                async for line in response.aiter_lines():
                    if line.startswith("event: "):
                        told.append(line.removeprefix("event: "))
                    if told[-1:] == ["response.output_text.delta"]:
                        endpoints.drain(cut=True)
            assert told[-2:] == ["error", "response.failed"]
            assert "response.completed" not in told

    run(work)
