"""Thoughts and calls of tools in /v1/responses and /v1/messages, by the clients that speak them.

What a model says is planted (scripted.py), in both forms that public templates teach to models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import BaseModel

from outrider.actors.http.chats import ChatBody
from outrider.actors.http.dialects.messages_body import MessagesBody
from outrider.actors.http.dialects.responses_body import ResponsesBody
from outrider.actors.http.parsing import parse
from outrider.model.text import Tokenizer
from tests.actors.http.local_server import run
from tests.actors.http.scripted import saying
from tests.actors.http.test_tools import CALLS, FORMS, TAGS, THOUGHT, TOOLS, USER
from tests.templates import IN_TAGS, folder_with

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
"""The tools as /v1/responses has them."""
ASK: dict[str, Any] = {"model": "tiny", "input": [USER], "tools": FLAT}
CUSTOM: list[dict[str, Any]] = [
    {"name": "weather", "description": "The weather of a city.",
     "input_schema": TOOLS[0]["function"]["parameters"]},
    {"name": "now", "input_schema": {"type": "object"}},
]  # fmt: skip
"""The tools as /v1/messages has them."""
MESSAGE: dict[str, Any] = {
    "model": "tiny", "messages": [USER], "tools": CUSTOM, "max_tokens": 500,
}  # fmt: skip


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose template calls in this form, and what its model says."""
    template, text = FORMS[request.param]
    return folder_with(tmp_path_factory.mktemp(request.param), template), text


def length_of(folder: Path, text: str) -> int:
    """Tokens of an answer that says this and ends."""
    return len(Tokenizer(folder).encode(text)) + 1


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items, or blocks, that can be compared with those of another answer."""
    keys = [(one.get("id"), one.get("call_id")) for one in items if one["type"] != "text"]
    assert len(set(keys)) == len(keys)
    return [{**one, "id": None, "call_id": None} for one in items]


async def streamed(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    async with client.stream("POST", path, json=fields | {"stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_response_has_an_item_for_each_part(form: tuple[Path, str]) -> None:
    folder, text = form

    async def work() -> None:
        async with saying(text, folder) as (_, client):
            whole = await client.responses.create(**ASK)
            thought, message, *calls = whole.output
            assert (thought.type, message.type) == ("reasoning", "message")
            assert [part.text for part in thought.content] == [THOUGHT]
            assert whole.output_text == "Let me see."
            assert [(call.type, call.name, call.arguments) for call in calls] == [
                ("function_call", *call) for call in CALLS
            ]
            assert all(call.call_id.startswith("call_") for call in calls)
            assert {item.status for item in whole.output} == {whole.status} == {"completed"}
            assert [tool.name for tool in whole.tools] == ["weather", "now"]
            said = Tokenizer(folder).encode(text[: text.index("</think>") + len("</think>")])
            assert abs(whole.usage.output_tokens_details.reasoning_tokens - len(said)) <= 1
            async with client.responses.stream(**ASK) as stream:
                done = [e async for e in stream if e.type == "response.output_item.done"]
                last = await stream.get_final_response()
            dumped = [item.model_dump() for item in whole.output]
            assert without_ids([e.item.model_dump() for e in done]) == without_ids(dumped)
            final = [item.model_dump(exclude={"parsed_arguments"}) for item in last.output]
            for item in final:
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            assert without_ids(final) == without_ids(dumped)
            assert last.usage.output_tokens_details == whole.usage.output_tokens_details

    run(work)


def test_a_thought_is_a_summary_of_itself_where_one_is_asked_for(form: tuple[Path, str]) -> None:
    folder, text = form
    ask = ASK | {"reasoning": {"summary": "auto"}}

    async def work() -> None:
        async with saying(text, folder) as (http, client):
            whole = await client.responses.create(**ask)
            thought = whole.output[0]
            assert [(part.type, part.text) for part in thought.summary] == [
                ("summary_text", THOUGHT)
            ]
            assert thought.content == []
            told = await streamed(http, "/v1/responses", **ask)
            kinds = [e["type"] for e in told if e.get("output_index") == 0]
            num_deltas = kinds.count("response.reasoning_summary_text.delta")
            assert kinds == [
                "response.output_item.added", "response.reasoning_summary_part.added",
                *["response.reasoning_summary_text.delta"] * num_deltas,
                "response.reasoning_summary_text.done", "response.reasoning_summary_part.done",
                "response.output_item.done",
            ]  # fmt: skip
            assert {e["summary_index"] for e in told if "summary_index" in e} == {0}
            assert "".join(e["delta"] for e in told if "summary_index" in e and "delta" in e) == (
                THOUGHT
            )
            async with client.responses.stream(**ask) as stream:
                last = await stream.get_final_response()
            assert last.output[0].summary == thought.summary

    run(work)


def test_a_thought_that_clients_keep_unseen_comes_back(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, IN_TAGS)
    ask = ASK | {"include": ["reasoning.encrypted_content"], "store": False}

    def thought_of(item: dict[str, Any]) -> str | None:
        body = parse(ResponsesBody, json.dumps(ASK | {"input": [USER, item]}).encode())
        return body.chat.conversation()[-1].get("reasoning_content")

    async def work() -> None:
        async with saying(TAGS, folder) as (http, client):
            whole = await client.responses.create(**ask)
            item = whole.output[0].model_dump()
            told = await streamed(http, "/v1/responses", **ask)
            done = next(e["item"] for e in told if e["type"] == "response.output_item.done")
            assert done["encrypted_content"] == item["encrypted_content"]
            kept = item | {"content": None, "summary": []}
            assert thought_of(kept) == THOUGHT
            assert thought_of(kept | {"encrypted_content": "gAAAAB"}) is None
            plain = await client.responses.create(**ASK)
            assert plain.output[0].encrypted_content is None

    run(work)


def test_events_of_a_response_add_up_wherever_its_limit_cuts(form: tuple[Path, str]) -> None:
    folder, text = form
    length = length_of(folder, text)

    async def work() -> None:
        cut_in_call = 0
        async with saying(text, folder) as (client, _):
            for most in (*range(1, length, 7), length):
                ask = ASK | {"max_output_tokens": most}
                whole = (await client.post("/v1/responses", json=ask)).json()
                told = await streamed(client, "/v1/responses", **ask)
                assert [event["sequence_number"] for event in told] == list(range(len(told)))
                built: dict[str, str] = {}
                for event in told:
                    if event["type"].endswith(".delta"):
                        key = event["item_id"]
                        built[key] = built.get(key, "") + event["delta"]
                items = [e["item"] for e in told if e["type"] == "response.output_item.done"]
                assert told[-1]["response"]["output"] == items
                assert without_ids(items) == without_ids(whole["output"])
                for item in items:
                    parts = item.get("content") or [{"text": item.get("arguments")}]
                    assert built.get(item["id"], "") == parts[0]["text"]
                states = [item["status"] for item in items]
                assert set(states[:-1]) <= {"completed"}
                is_cut = most < length
                assert told[-1]["response"]["status"] == ("incomplete" if is_cut else "completed")
                calls = [item for item in items if item["type"] == "function_call"]
                for call, (name, arguments) in zip(calls, CALLS):
                    assert call["name"] == name
                    assert arguments.startswith(call["arguments"])
                    cut_in_call += arguments != call["arguments"]
                    assert (arguments != call["arguments"]) <= (call["status"] == "incomplete")
        assert cut_in_call > 2

    run(work)


class City(BaseModel):
    name: str
    people: int


def test_parse_of_the_client_reads_a_format(tmp_path: Path) -> None:
    folder, text = folder_with(tmp_path, IN_TAGS), '{"name": "Paris", "people": 3}'
    off = {"chat_template_kwargs": {"enable_thinking": False}}

    async def work() -> None:
        async with saying(text, folder) as (_, client):
            how: dict[str, Any] = {"model": "tiny", "input": "a city", "extra_body": off}
            whole = await client.responses.parse(**how, text_format=City)
            assert whole.output_parsed == City(name="Paris", people=3)
            async with client.responses.stream(**how, text_format=City) as stream:
                last = await stream.get_final_response()
            assert last.output_parsed == whole.output_parsed

    run(work)


def put_together(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events of a message add up to, the input of calls as text."""
    blocks: list[dict[str, Any]] = []
    opened = False
    for event in told:
        if event["type"] == "content_block_start":
            assert not opened
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            assert opened
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind, name, field = {
                "text_delta": ("text", "text", "text"),
                "thinking_delta": ("thinking", "thinking", "thinking"),
                "input_json_delta": ("tool_use", "partial_json", "input"),
            }[delta["type"]]
            assert blocks[-1]["type"] == kind
            blocks[-1][field] += delta[name]
        opened = event["type"] in ("content_block_start", "content_block_delta")
    return blocks


def test_a_message_has_a_block_for_each_part(form: tuple[Path, str]) -> None:
    folder, text = form
    length = length_of(folder, text)

    async def work() -> None:
        cut_in_call = 0
        async with saying(text, folder) as (http, _):
            for most in (*range(1, length, 9), length):
                ask = MESSAGE | {"max_tokens": most}
                whole = (await http.post("/v1/messages", json=ask)).json()
                told = await streamed(http, "/v1/messages", **ask)
                assert told[-2]["delta"]["stop_reason"] == whole["stop_reason"]
                assert whole["stop_reason"] == ("max_tokens" if most < length else "tool_use")
                assert told[-2]["usage"] == whole["usage"] | {
                    "speculation": told[-2]["usage"]["speculation"]
                }
                blocks = put_together(told)
                for block, other in zip(blocks, whole["content"], strict=True):
                    if block["type"] == "tool_use":
                        is_whole = block["input"].endswith("}") and other["input"] != {}
                        is_whole = is_whole or block["input"] == "{}"
                        block["input"] = json.loads(block["input"]) if is_whole else {}
                        assert is_whole or block is blocks[-1]
                        cut_in_call += not is_whole
                assert without_ids(blocks) == without_ids(whole["content"])
            assert cut_in_call > 0
            said = Tokenizer(folder).encode(text[: text.index("</think>") + len("</think>")])
            count = whole["usage"]["output_tokens_details"]["thinking_tokens"]
            assert abs(count - len(said)) <= 1
            thought, content, *calls = whole["content"]
            assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
            assert content == {"type": "text", "text": "Let me see."}
            assert [(call["type"], call["name"], call["input"]) for call in calls] == [
                ("tool_use", name, json.loads(arguments)) for name, arguments in CALLS
            ]

    run(work)


def test_the_client_of_anthropic_reads_thoughts_and_calls(form: tuple[Path, str]) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    folder, text = form

    async def work() -> None:
        async with saying(text, folder) as (http, _):
            client = anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="none")
            whole = await client.messages.create(**MESSAGE)
            async with client.messages.stream(**MESSAGE) as stream:
                last = await stream.get_final_message()
            assert last.stop_reason == whole.stop_reason == "tool_use"
            assert whole.content[0].thinking == THOUGHT
            assert [block.input for block in whole.content[2:]] == [
                json.loads(arguments) for _, arguments in CALLS
            ]
            blocks = [block.model_dump() for block in whole.content]
            final = [block.model_dump(exclude={"parsed_output"}) for block in last.content]
            assert without_ids(final) == without_ids(blocks)
            await client.close()

    run(work)


def test_a_thought_that_is_never_closed_is_all_there_is(tmp_path: Path) -> None:
    folder, text = folder_with(tmp_path, IN_TAGS), TAGS[: TAGS.index("</think>")]

    async def work() -> None:
        async with saying(text, folder) as (http, client):
            whole = await client.responses.create(**ASK)
            assert [item.type for item in whole.output] == ["reasoning"]
            assert whole.output[0].content[0].text.rstrip() == THOUGHT
            message = (await http.post("/v1/messages", json=MESSAGE)).json()
            (block,) = message["content"]
            assert (block["type"], block["thinking"].rstrip()) == ("thinking", THOUGHT)
            assert message["stop_reason"] == "end_turn"

    run(work)


def test_answers_that_are_sent_again_are_those_of_a_chat(tmp_path: Path) -> None:
    """What each client keeps of an answer makes the same prompt as a chat's does."""
    folder = folder_with(tmp_path, IN_TAGS)
    results = [{"city": "Paris"}, {"time": 5}]

    async def work() -> None:
        async with saying(TAGS, folder) as (http, client):
            chat = await client.chat.completions.create(
                model="tiny", messages=[USER], tools=TOOLS, max_tokens=500
            )
            told = chat.choices[0].message.model_dump(exclude_none=True)
            ids = [call["id"] for call in told["tool_calls"]]
            returned = [
                {"role": "tool", "tool_call_id": key, "content": json.dumps(one)}
                for key, one in zip(ids, results)
            ]
            messages = [USER, told, *returned]
            body = parse(ChatBody, json.dumps({"messages": messages, "tools": TOOLS}).encode())
            right = _told(body)
            whole = await client.responses.create(**ASK)
            items = [item.model_dump(exclude_none=True) for item in whole.output]
            outputs = [
                {"type": "function_call_output", "call_id": item["call_id"],
                 "output": json.dumps(one)}
                for item, one in zip(items[2:], results)
            ]  # fmt: skip
            data = json.dumps(ASK | {"input": [USER, *items, *outputs]}).encode()
            assert _told(parse(ResponsesBody, data).chat) == right
            blocks = (await http.post("/v1/messages", json=MESSAGE)).json()["content"]
            results_of = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": json.dumps(one)}
                for block, one in zip(blocks[2:], results)
            ]
            turns = [
                USER, {"role": "assistant", "content": blocks},
                {"role": "user", "content": results_of},
            ]  # fmt: skip
            data = json.dumps(MESSAGE | {"messages": turns}).encode()
            assert _told(parse(MessagesBody, data).chat) == right

    run(work)


def _told(body: ChatBody) -> list[dict[str, Any]]:
    """The conversation as the chat template gets it, without the names of calls."""
    said = json.loads(json.dumps(body.conversation()))
    for message in said:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", []):
            call.pop("id")
    return said


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("required", "required", None),
        ("none", "none", None),
        ({"type": "function", "name": "now"}, "required", ("now",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [FLAT[1] | {"parameters": None}]},
            "auto", ("now",),
        ),
    ],
)  # fmt: skip
def test_a_choice_of_tools_is_that_of_a_chat(choice: Any, mode: str, names: Any) -> None:
    body = parse(ResponsesBody, json.dumps(ASK | {"tool_choice": choice}).encode())
    assert (body.chat.tool_use.choice.mode, body.chat.tool_use.choice.names) == (mode, names)
    anthropic = {"none": {"type": "none"}, "required": {"type": "any"}, "auto": {"type": "auto"}}
    how = {"type": "tool", "name": "now"} if names and mode == "required" else anthropic[mode]
    data = json.dumps(MESSAGE | {"tool_choice": how}).encode()
    use = parse(MessagesBody, data).chat.tool_use
    assert use.choice.mode == mode
    if mode == "required":
        assert use.choice.names == names
    assert use.is_parallel
    assert [one["name"] for one in use.functions] == ["weather", "now"]
