"""/v1/messages: a chat in other words, as Anthropic's clients write it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest

from outrider.actors.http.bodies import ApiError
from outrider.actors.http.dialects.messages_body import MessagesBody
from outrider.actors.http.parsing import validated
from tests.actors.http.local_server import run, serving, until

ROOM: dict[str, Any] = {"vocab_size": 5000, "max_model_len": 256, "num_pages": 100}
USER = {"role": "user", "content": "What is a view?"}
TEXT = {"type": "text", "text": "5"}
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "messages": [USER]}


async def events(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; asserts that each is named after its type."""
    found, name = [], ""
    async with client.stream("POST", "/v1/messages", json=fields | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                found.append(json.loads(line.removeprefix("data: ")))
                assert found[-1]["type"] == name
    return found


def test_the_answer_is_that_of_a_chat_whole_and_streamed() -> None:
    async def work() -> None:
        async with serving(step_s=0.05, **ROOM) as (client, _, _):
            chat = {
                "messages": [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER],
                "max_tokens": 30, "temperature": 0.5, "seed": 3,
            }  # fmt: skip
            right = (await client.post("/v1/chat/completions", json=chat)).json()
            text = right["choices"][0]["message"]["content"]
            assert len(set(text)) > 20
            how = SHORT | {
                "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "e"}},
                           {"type": "text", "text": "Be kind."}],
                "messages": [{"role": "user", "content": [
                    {"type": "text", "text": "What is "}, {"type": "text", "text": "a view?"},
                ]}],
                "temperature": 0.5, "seed": 3,
            }  # fmt: skip
            got = (await client.post("/v1/messages?beta=true", json=how)).json()
            counts = {
                "input_tokens": right["usage"]["prompt_tokens"], "output_tokens": 30,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            }  # fmt: skip
            assert got["usage"].pop("speculation")["drafted_tokens"] > 0
            assert got["usage"].pop("output_tokens_details") == {"thinking_tokens": 0}
            assert got == {
                "id": got["id"], "type": "message", "role": "assistant", "model": "tiny",
                "content": [{"type": "text", "text": text}], "stop_reason": "max_tokens",
                "stop_sequence": None, "usage": counts,
            }  # fmt: skip
            start, *told = await events(client, **how)
            assert start["type"] == "message_start"
            message = start["message"]
            assert message == got | {
                "id": message["id"], "content": [], "stop_reason": None,
                "usage": counts | {"output_tokens": 0},
            }  # fmt: skip
            num_deltas = sum(event["type"] == "content_block_delta" for event in told)
            assert [event["type"] for event in told] == [
                "ping", "content_block_start", *["content_block_delta"] * num_deltas,
                "content_block_stop", "message_delta", "message_stop",
            ]  # fmt: skip
            assert num_deltas >= 2
            block = {"type": "text", "text": ""}
            assert told[1] == {"type": "content_block_start", "index": 0, "content_block": block}
            assert (
                "".join(e["delta"]["text"] for e in told if "index" in e and "delta" in e) == text
            )
            assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
            assert told[-2]["usage"].items() >= counts.items()

    run(work)


def test_the_client_of_anthropic_gets_the_answer() -> None:
    anthropic: Any = pytest.importorskip("anthropic")

    async def work() -> None:
        async with serving(keys=("sk-1",), **ROOM) as (client, _, _):
            own = anthropic.AsyncAnthropic(
                base_url=str(client.base_url), api_key="sk-1", max_retries=0
            )
            how = SHORT | {"extra_body": {"temperature": 0.5, "seed": 3}}
            whole = await own.messages.create(**how)
            assert len(set(whole.content[0].text)) > 20
            async with own.messages.stream(**how) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                last = await stream.get_final_message()
            assert text == whole.content[0].text
            for message in (whole, last):
                assert [block.type for block in message.content] == ["text"]
                assert message.stop_reason == "max_tokens"
                assert message.usage.output_tokens == 30
            count = await own.messages.count_tokens(model="tiny", messages=[USER])
            assert count.input_tokens == whole.usage.input_tokens
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences: a text of 0"):
                await own.messages.create(**how, stop_sequences=[""])
            wrong = own.with_options(api_key="sk-2")
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(**how)
            await own.close()

    run(work)


def test_the_reason_of_an_end_is_told() -> None:
    async def work() -> None:
        async with serving(**ROOM) as (client, _, _):
            how = SHORT | {"temperature": 0}
            text = (await client.post("/v1/messages", json=how)).json()["content"][0]["text"]
            stops = ["never", text[7:9]]
            for fields in (how | {"stop_sequences": stops}, how | {"max_tokens": 7}):
                got = (await client.post("/v1/messages", json=fields)).json()
                assert got["content"] == [{"type": "text", "text": text[:7]}]
                ended = (got["stop_reason"], got["stop_sequence"])
                has_stop = "stop_sequences" in fields
                assert ended == (("stop_sequence", stops[1]) if has_stop else ("max_tokens", None))
                *_, delta, _ = await events(client, **fields)
                assert tuple(delta["delta"].values()) == ended
            token = (await client.post("/tokenize", json={"prompt": text[7]})).json()["tokens"]
            got = await client.post("/v1/messages", json=how | {"stop_token_ids": token})
            assert (got.json()["stop_reason"], got.json()["stop_sequence"]) == ("end_turn", None)

    run(work)


def test_an_answer_goes_on_with_the_assistants_last_message() -> None:
    begun = {"role": "assistant", "content": "Once upon"}

    async def work() -> None:
        async with serving(**ROOM) as (client, _, _):
            chat = {"messages": [USER, begun], "continue_final_message": True, "max_tokens": 5}
            right = (await client.post("/v1/chat/completions", json=chat)).json()
            got = await client.post("/v1/messages", json=SHORT | {"messages": [USER, begun]})
            assert got.json()["usage"]["input_tokens"] == right["usage"]["prompt_tokens"]
            text = got.json()["content"][0]["text"]
            assert text.startswith(right["choices"][0]["message"]["content"])

    run(work)


def meant(**fields: Any) -> dict[str, Any]:
    """The fields of the chat that a body means."""
    body = validated(MessagesBody, SHORT | fields, None)
    return {name: one for name, one in body.chat_fields().items() if one is not None}


def test_blocks_become_the_messages_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Wait.", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": False},
            {"type": "tool_result", "tool_use_id": "t2", "content": [TEXT]},
            {"type": "text", "text": "Go on."},
        ]},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t3", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]  # fmt: skip

    def text(words: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": words}]

    def call(key: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert meant(messages=messages)["messages"] == [
        {"role": "user", "content": text("Add.")},
        {"role": "assistant", "content": text("Wait."), "reasoning_content": "Hm.",
         "tool_calls": [call("t1", "add", '{"a": 1}'), call("t2", "add", "{}")]},
        {"role": "tool", "tool_call_id": "t1", "content": text("4")},
        {"role": "tool", "tool_call_id": "t2", "content": text("5")},
        {"role": "user", "content": text("Go on.")},
        {"role": "assistant", "content": [], "tool_calls": [call("t3", "f", "{}")]},
        {"role": "tool", "tool_call_id": "t3", "content": []},
    ]  # fmt: skip


def test_settings_become_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"name": "f", "description": "Does.", "input_schema": schema}
    told = {"name": "f", "description": "Does.", "parameters": schema}
    named = {"type": "function", "function": {"name": "f"}}
    for given, right in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ),
        (
            {"tools": [tool | {"type": "custom"}]},
            {"tools": [{"type": "function", "function": told}]},
        ),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": named}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
    ):  # fmt: skip
        assert meant(**given).items() >= right.items()
    assert "thinking" not in meant()


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"max_tokens": None}, "max_tokens", "Field required"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"messages": []}, "messages", "at least 1"),
    ({"n": 2}, "n", "not supported by this server"),
    ({"container": "c"}, "container", "not supported by this server"),
    ({"stop_sequences": [""]}, "stop_sequences", "a text of 0 characters"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"system": [{"type": "image"}]}, "system.0", "a block of type 'image'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages.0.content.0", "a block of type 'document': not supported here",
    ),
    (
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
        ]}]},
        "messages.0.content.0.content.0", "a block of type 'image'",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools.0", "a tool of type 'bash_2025"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management", 'only {"edits": []} or ',
    ),
    ({"output_config": {"effort": "wild"}}, "output_config.effort", "wild"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "summarized"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_what_this_server_does_not_do_is_refused_by_name(
    fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(ApiError) as caught:
        validated(MessagesBody, SHORT | fields, None).check(None)
    assert caught.value.error["param"] == param
    assert why in str(caught.value)


def test_what_changes_no_text_is_accepted() -> None:
    fields = {
        "service_tier": "auto", "inference_geo": None, "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"}, "thinking": {"type": "adaptive"}, "tools": [],
        "tool_choice": {"type": "auto"}, "stop_sequences": [], "top_k": 5, "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    body = validated(MessagesBody, SHORT | fields, None)
    body.check(None)
    assert body.chat.user == "u"
    assert body.chat.top_k == 5
    assert body.chat.template_values() == {"enable_thinking": False}


def test_prompts_are_counted_without_an_answer() -> None:
    async def work() -> None:
        async with serving(**ROOM) as (client, driver, _):
            asked = (await client.post("/v1/messages", json=SHORT)).json()
            count = "/v1/messages/count_tokens"
            fields = {"model": "tiny", "messages": [USER]}
            got = await client.post(count, json=fields)
            assert got.json() == {"input_tokens": asked["usage"]["input_tokens"]}
            long = {"messages": [USER | {"content": "view " * 1000}]}
            assert (await client.post(count, json=long)).json()["input_tokens"] > 1000
            assert driver.stats()["requests_submitted"] == 1
            refused = await client.post(count, json=SHORT)
            assert refused.json()["error"]["message"].startswith("max_tokens: not supported")

    run(work)


def test_errors_have_the_form_of_this_api() -> None:
    async def work() -> None:
        keys, key = ("sk-1",), {"x-api-key": "sk-1"}
        async with serving(keys=keys, serve={"max_body_bytes": 9000}, **ROOM) as (client, _, end):
            long = {"messages": [USER | {"content": "view " * 1000}]}

            async def refusal(
                fields: dict[str, Any], headers: dict[str, str], path: str = ""
            ) -> tuple[int, str, str]:
                got = await client.post("/v1/messages" + path, json=SHORT | fields, headers=headers)
                told = got.json()
                assert told.keys() == {"type", "error"}
                assert told["type"] == "error"
                return got.status_code, told["error"]["type"], told["error"]["message"]

            for fields, headers, path, status, kind, why in (
                ({}, {}, "", 401, "authentication_error", "x-api-key"),
                ({}, {"x-api-key": "sk-2"}, "", 401, "authentication_error", "wrong"),
                ({"colour": 1}, key, "", 400, "invalid_request_error", "colour"),
                (long, key, "", 400, "invalid_request_error", "prompt is too long: "),
                ({"model": "gpt"}, key, "", 404, "not_found_error", "not served here"),
                ({}, key, "/batches", 404, "not_found_error", "Not Found"),
                ({"system": "a" * 9000}, key, "", 413, "request_too_large", "max_body_bytes"),
            ):  # fmt: skip
                told = await refusal(fields, headers, path)
                assert told[:2] == (status, kind)
                assert why in told[2]
            bearer = {"authorization": "Bearer sk-1"}
            for headers in (key, bearer, bearer | {"x-api-key": "none"}):
                got = await client.post("/v1/messages", json=SHORT, headers=headers)
                assert got.status_code == 200
                got = await client.get("/v1/models", headers=headers)
                assert got.status_code == 200
            end.drain()
            assert (await refusal({}, key))[:2] == (503, "overloaded_error")

    run(work)


def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    async def work() -> None:
        async with serving(step_s=0.02, **ROOM) as (client, _, endpoints):
            told: list[str] = []
            fields = SHORT | {"max_tokens": 200, "stream": True}
            async with client.stream("POST", "/v1/messages", json=fields) as response:
                async for line in response.aiter_lines():
                    if line:
                        told.append(line)
                    if told[-1:] == ["event: content_block_delta"]:
                        endpoints.drain(cut=True)
            assert told[-2] == "event: error"
            error = json.loads(told[-1].removeprefix("data: "))["error"]
            assert error["type"] == "overloaded_error"
            assert "drain_timeout_s" in error["message"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    async def work() -> None:
        async with serving(step_s=0.02, **ROOM) as (client, driver, _):
            fields = SHORT | {"max_tokens": 200} if path == "/v1/messages" else {"input": "hi"}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post(path, json=fields | {"stream": stream})
            await until(lambda: not driver.stats()["active"])
            assert driver.stats()["requests_aborted"] == 1

    run(work)
