"""What public clients send: bodies as their sources write them, all of which must be answered.

Beside each list of what is answered stands what is refused, with the words that say why.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.actors.http.bodies import ApiError, CompletionBody, Settings
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.fields import NEUTRAL, UNUSED
from outrider.actors.http.parsing import parse
from tests.actors.driver.test_driver import answer
from tests.actors.http.local_server import body, chat, events, run, serving

USER = {"role": "user", "content": "hi"}
REPLAYED = {
    "role": "assistant", "content": "Hello.", "refusal": None, "annotations": [], "audio": None,
    "function_call": None, "tool_calls": None,
}  # fmt: skip
"""An answer as openai-python dumps it, to be sent again."""
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

CHATS: dict[str, dict[str, Any]] = {
    "openai-python": {
        "messages": [USER, REPLAYED, {"role": "developer", "content": "Be brief."}, USER],
        "model": "tiny", "store": False, "metadata": {"run": "1"}, "service_tier": "auto",
        "safety_identifier": "abc", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "parallel_tool_calls": True, "modalities": ["text"], "verbosity": "low",
        "response_format": {"type": "text"}, "logit_bias": {}, "top_logprobs": 0, "user": "u" * 999,
        "prediction": {"type": "content", "content": "Hello."},
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    },
    "langchain-openai": {
        "messages": [
            {"content": "Answer.", "role": "system"}, {"content": "hi", "role": "user"},
            {"content": None, "role": "assistant", "refusal": "No."},
            {"content": [{"type": "text", "text": "why?"}], "role": "user", "name": "ann"},
        ],
        "model": "tiny", "stream": False, "temperature": 0.7, "n": 1, "max_completion_tokens": 5,
        "stop": None, "seed": None, "logprobs": False, "frequency_penalty": 0.0,
    },
    "litellm": {
        "model": "tiny", "temperature": 0.2, "max_tokens": 5, "user": "", "tools": None,
        "messages": [
            {"role": "system", "content": [
                {"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}},
            ]},
            USER,
            REPLAYED | {"provider_specific_fields": {"refusal": None}, "thinking_blocks": []},
            USER | {"cache_control": {"type": "ephemeral"}},
        ],
    },
    "autogen": {
        "messages": [
            {"content": "Answer.", "role": "system"},
            {"content": "hi", "role": "user", "name": "user"},
            {"content": "Hello.", "role": "assistant", "name": "writer"},
            {"content": "more", "role": "user", "name": "critic"},
        ],
        "model": "tiny", "stream": False,
    },
    "strands": {
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": [{"text": "hi", "type": "text"}]},
        ],
        "model": "tiny", **STREAMED, "tools": [],
    },
    "guidellm": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "model": "tiny", "stream": True, "max_completion_tokens": 5, "stop": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    },
    "AI SDK": {
        "model": "tiny", **STREAMED, "max_tokens": 5, "temperature": 0,
        "messages": [{"role": "system", "content": "Answer."},
                     {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tool_choice": "auto",
    },
    "lm-eval": {
        "messages": [USER | {"type": None}], "model": "tiny", "max_tokens": 5, "temperature": 0,
        "stop": ["\n\n"], "seed": 1234,
    },
    "vLLM's own": {
        "messages": [USER], "model": "tiny", "request_id": "r", "cache_salt": "s",
        "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True,
        "add_generation_prompt": True,
        "spaces_between_special_tokens": True, "mm_processor_kwargs": {}, "documents": [],
        "include_reasoning": True, "add_special_tokens": False, "tool_choice": "none",
        "functions": [], "function_call": "none", "max_tokens": 5.0, "vllm_xargs": {},
        "chat_template_kwargs": {"enable_thinking": False, "tools": None},
    },
}  # fmt: skip

COMPLETIONS: dict[str, dict[str, Any]] = {
    "openai-python": {"model": "tiny", "prompt": "hi", "suffix": "", "max_completion_tokens": 5},
    "langchain-openai": {
        "model": "tiny", "prompt": ["hi"], "temperature": 0.7, "max_tokens": 5, "top_p": 1,
        "frequency_penalty": 0, "presence_penalty": 0, "n": 1, "logit_bias": {}, "seed": None,
        "logprobs": None,
    },
    "lm-eval": {
        "prompt": [[5, 6, 7]], "model": "tiny", "max_tokens": 5, "temperature": 0,
        "stop": ["\n"], "seed": 1234,
    },
    "vLLM's benchmark": {
        "model": "tiny", "prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 5,
        "temperature": 0, "logprobs": None, "ignore_eos": True, **STREAMED,
    },
    "SGLang's benchmark": {
        "model": "tiny", "prompt": "hi", "temperature": 0.0, "best_of": 1, "max_tokens": 5,
        "stream": True, "ignore_eos": True,
    },
    "guidellm": {
        "model": "tiny", "prompt": "hi", "max_tokens": 5, "stop": None, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"functions": [{"name": "f"}]}, "functions", "only [] is accepted"),
    ({"modalities": ["text", "audio"]}, "modalities", 'only ["text"] is accepted'),
    ({"use_beam_search": True}, "use_beam_search", "only false is accepted"),
    ({"length_penalty": True}, "length_penalty", "only 1 is accepted"),
    ({"audio": {"voice": "alloy"}}, "audio", "not supported by this server"),
    ({"web_search_options": {}}, "web_search_options", "not supported by this server"),
    (
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0", "a part of type 'image_url': not supported; this server reads text",
    ),
    (
        {"messages": [USER, {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}},
        ]}]},
        "messages.1.content.1", "a part of type 'input_audio'",
    ),
    (
        {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]},
        "messages.1.audio", "not supported by this server",
    ),
)  # fmt: skip


def test_what_clients_send_is_answered() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000, max_model_len=128, num_pages=64) as (client, _, _):
            for path, sent in (("chat/completions", CHATS), ("completions", COMPLETIONS)):
                for name, fields in sent.items():
                    bound = {} if "max_tokens" in fields else {"max_completion_tokens": 5}
                    got = await client.post(f"/v1/{path}", json=bound | fields)
                    assert got.status_code == 200, (name, got.text)
                    assert "error" not in got.text, name

    run(work)


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_what_would_need_more_than_text_is_refused_by_name(
    fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode())
    assert caught.value.error["param"] == param
    assert caught.value.error["code"] == "unsupported"
    assert why in str(caught.value)


def test_all_unsupported_fields_are_named_at_once() -> None:
    data = {
        "messages": [USER | {"mood": "good"}], "functions": [TOOL], "audio": {}, "temprature": 1,
        "top_p": 7,
    }  # fmt: skip
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps(data).encode())
    message = str(caught.value)
    assert caught.value.error["code"] == "unsupported"
    for words in (
        "messages.0.mood: not",
        "functions = [{",
        "audio: not",
        "did you mean temperature?",
    ):
        assert words in message
    many = {f"field{i}": i for i in range(5000)}
    with pytest.raises(ApiError, match=r"field19: .* and 4980 more$"):
        parse(ChatBody, json.dumps({"messages": [USER], **many}).encode())


def parsed_or_none(kind: type[Settings], data: bytes) -> Settings | None:
    """The body, None where it is refused."""
    try:
        return parse(kind, data)
    except ApiError:
        return None


def test_null_is_absent_everywhere() -> None:
    """Null in any field, known or not, means the same as a body without it."""
    nulls = dict.fromkeys((*NEUTRAL["Settings"], *UNUSED["Settings"], "whatever"))
    for kind, data in ((ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "a"})):
        kept = kind.model_fields.keys() - data.keys()
        full: dict[str, Any] = {**nulls, **dict.fromkeys(kept), **data}
        plain = json.dumps(data).encode()
        assert parsed_or_none(kind, json.dumps(full).encode()) == parse(kind, plain)
    inner = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "x": None}], "name": None},
            REPLAYED,
        ],
        "stream_options": {"include_usage": None}, "speculation": {"draft_tokens": None},
        "chat_template_kwargs": {"enable_thinking": None},
    }  # fmt: skip
    said = parse(ChatBody, json.dumps(inner).encode()).conversation()
    assert said == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hello."}]
    for name in ("prompt", "messages"):
        kind = CompletionBody if name == "prompt" else ChatBody
        with pytest.raises(ApiError, match=f"{name}: Field required"):
            parse(kind, json.dumps({name: None}).encode())


def test_a_replayed_answer_keeps_what_it_said() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [], "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No, "},
                                          {"type": "output_text", "text": "no."}]},
        {"role": "assistant", "reasoning": "So."},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]  # fmt: skip
    body = parse(ChatBody, json.dumps({"messages": messages}).encode())
    assert body.conversation() == [
        {"role": "user", "content": "", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "No, no."},
        {"role": "assistant", "content": "", "reasoning_content": "So."},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    with pytest.raises(ApiError, match=r"messages\.0\.content: Field required"):
        parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": None}]}).encode())


@pytest.mark.parametrize(("value", "number"), [(5.0, 5), (5, 5), (5.5, None), ("5", None)])
def test_a_whole_number_may_be_written_with_a_point(value: object, number: int | None) -> None:
    kinds: tuple[tuple[type[Settings], dict[str, Any]], ...] = (
        (ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "a"})
    )  # fmt: skip
    for kind, data in kinds:
        fields = json.dumps({**data, "max_tokens": value, "seed": 1.0}).encode()
        if number is None:
            with pytest.raises(ApiError, match="max_tokens"):
                parse(kind, fields)
        else:
            assert parse(kind, fields).max_answer_tokens == number


def test_unknown_fields_are_dropped_where_the_server_says_so() -> None:
    """What is known and not done stays refused, and so does what is wrong."""

    async def work() -> None:
        async with serving(serve={"unknown_fields": "ignore"}) as (client, _, _):
            strange = {"mood": 1, "messages": [USER | {"mood": 2}], "speculation": {"mood": 3}}
            got = await client.post("/v1/chat/completions", json=chat(**strange))
            assert got.status_code == 200, got.text
            parts = [{"type": "text", "text": "hi", "mood": 4}]
            strange = {"messages": [{"role": "user", "content": parts}], "prompt": "x"}
            assert (await client.post("/v1/chat/completions", json=chat(**strange))).is_success
            for fields, param in (({"functions": [TOOL]}, "functions"), ({"top_p": 7}, "top_p")):
                wrong = await client.post("/v1/chat/completions", json=chat(mood=1, **fields))
                assert wrong.status_code == 400
                assert wrong.json()["error"]["param"] == param

    run(work)


def test_a_stream_tells_its_usage_so_far_where_asked() -> None:
    async def work() -> None:
        async with serving(step_s=0.001) as (client, _, _):
            options = {"include_usage": True, "continuous_usage_stats": True}
            what = body(n=2, max_tokens=12, stream_options=options)
            *chunks, last, _ = await events(client, "/v1/completions", **what)
            seen = {0: 0, 1: 0}
            for chunk in chunks:
                (choice,), usage = chunk["choices"], chunk["usage"]
                seen[choice["index"]] += len(choice["token_ids"])
                count = seen[choice["index"]]
                assert usage == {
                    "prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count
                }  # fmt: skip
            assert seen == {0: 12, 1: 12} == dict.fromkeys((0, 1), len(answer([2], 12)))
            assert last["usage"]["completion_tokens"] == 24

    run(work)
