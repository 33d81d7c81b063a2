"""What a body may say: each wrong field is refused by name, and no body makes the server fail."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.actors.http.bodies import (
    DEFAULTS,
    ApiError,
    BodyLimits,
    CompletionBody,
    Settings,
)
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.model.step import Sampling
from tests.actors.conftest import VOCAB
from tests.actors.http.local_server import body, chat, run, serving

WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": 5}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [[1], "a"]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [VOCAB]}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"max_tokens": -1}, "max_tokens"),
    ("completions", {"n": 2, "best_of": 1}, "best_of"),
    ("completions", {"best_of": 2, "stream": True}, "best_of"),
    ("completions", {"best_of": 200}, "n"),
    ("completions", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("completions", {"allowed_token_ids": [5] * 1025}, "allowed_token_ids"),
    ("completions", {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    (
        "completions",
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
        "allowed_token_ids",
    ),
    ("completions", {"bad_words": ["two words of many"]}, "bad_words"),
    ("completions", {"bad_words": [""]}, "bad_words"),
    ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("completions", {"truncate_prompt_tokens": 64, "prompt": [1] * 70}, "prompt"),
    ("completions", {"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ("chat/completions", {"reasoning_effort": "hard"}, "reasoning_effort"),
    ("chat/completions", {"thinking": {"type": "some"}}, "thinking"),
    ("chat/completions", {"chat_template": "x"}, "chat_template"),
    ("chat/completions", {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    (
        "chat/completions",
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ("completions", {"max_tokens": "5"}, "max_tokens"),
    ("completions", {"temperature": -0.1}, "temperature"),
    ("completions", {"temperature": True}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"top_k": -2}, "top_k"),
    ("completions", {"min_p": 1.5}, "min_p"),
    ("completions", {"seed": 1 << 63}, "seed"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"stop": [""]}, "stop"),
    ("completions", {"stop": ["a"] * 17}, "stop"),
    ("completions", {"stop": "a" * 257}, "stop"),
    ("completions", {"stop_token_ids": [VOCAB]}, "stop"),
    ("completions", {"presence_penalty": 2.5}, "presence_penalty"),
    ("completions", {"frequency_penalty": -3}, "frequency_penalty"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
    ("completions", {"logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("completions", {"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ("completions", {"min_tokens": 6}, "min_tokens"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"speculation": {"draft_tokens": 17}}, "speculation.draft_tokens"),
    ("completions", {"speculation": {"depth": 1}}, "speculation.depth"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "a", "str": 1}]}, "messages.0."),
    ("completions", {"logit_bias": {"05": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"[key]": 1}}, "logit_bias"),
    ("completions", {"stop": {"str": 1}}, "stop"),
    ("chat/completions", {"tools": [{}]}, "tools"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format"),
    ("chat/completions", {"response_format": "json_object"}, "response_format"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": 3}}}},
        "response_format",
    ),
    ("completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("completions", {"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    ("completions", {"guided_regex": "(a"}, "guided_regex"),
    ("completions", {"guided_choice": []}, "guided_choice"),
    ("completions", {"guided_grammar": ["a"]}, "guided_grammar"),
    ("completions", {"guided_json": '{"type": "array", "contains": {}}'}, "guided_json"),
    ("completions", {"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ("completions", {"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
    ("completions", {"guided_json": {}, "min_tokens": 2}, "min_tokens"),
    ("chat/completions", {"logprobs": 3}, "logprobs"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat/completions", {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
)  # fmt: skip


def test_malformed_bodies_are_400_and_name_the_field() -> None:
    async def work() -> None:
        async with serving() as (client, driver, _):
            for path, change, param in WRONG:
                valid = body() if path == "completions" else chat()
                got = await client.post(f"/v1/{path}", json={**valid, **change})
                error = got.json()["error"]
                assert got.status_code == 400, (change, error)
                assert error["param"].startswith(param), (change, error)
                assert error["type"] == "invalid_request_error"
            for content in (b"", b"{", b"[]", b'{"prompt": NaN}', b"\xff", b"[" * 5000):
                got = await client.post("/v1/completions", content=content)
                assert got.status_code == 400
            wrong_model = await client.post("/v1/completions", json=body(model="gpt"))
            assert wrong_model.status_code == 404
            assert wrong_model.json()["error"]["code"] == "model_not_found"
            assert (await client.get("/v1/models/gpt")).status_code == 404
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get("/v1/completions")).status_code == 405
            assert driver.stats()["requests_finished"] == 0

    run(work)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
plausible = st.one_of(
    json_values,
    st.integers(-2, 40),
    st.floats(0, 2),
    st.lists(st.integers(-1, VOCAB), max_size=5),
    st.text("ab\u00e9\ud800 ", max_size=5),
    st.dictionaries(st.integers(0, VOCAB).map(str), st.floats(-100, 100), max_size=3),
    st.dictionaries(st.sampled_from(["self", "tools", "bos_token"]), st.text(max_size=3)),
)
fields = sorted({*CompletionBody.model_fields, *ChatBody.model_fields} - {"stream"})


UNION_WORDS = ["int", "str", "float", "bool", "list[int]", "dict[str,any]", "function-x", "[key]"]
"""Names that were taken for pydantic's own: a field called so was a 500."""
names = st.sampled_from(fields) | st.sampled_from(UNION_WORDS) | st.text(max_size=6)


@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    changes=st.dictionaries(names, plausible | st.dictionaries(names, plausible), max_size=4),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_makes_the_server_fail(path: str, changes: dict[str, Any]) -> None:
    async def work() -> None:
        valid = body() if path == "completions" else chat()
        got = await fuzzing.client.post(
            f"/v1/{path}", content=json.dumps({**valid, **changes}).encode()
        )
        assert got.status_code in (200, 400, 404), got.text
        if got.status_code != 200:
            assert got.json()["error"]["message"]

    fuzzing.loop.run_until_complete(asyncio.wait_for(work(), 10))


class Fuzzing:
    """One server for all examples."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient


fuzzing = Fuzzing()


@pytest.fixture(autouse=True, scope="module")
def _one_server_for_all_examples():
    fuzzing.loop = asyncio.new_event_loop()
    manager = serving(vocab_size=VOCAB, max_model_len=64)
    fuzzing.client, driver, _ = fuzzing.loop.run_until_complete(manager.__aenter__())
    yield
    assert driver.stats()["active"] == driver.stats()["queued"] == 0
    fuzzing.loop.run_until_complete(manager.__aexit__(None, None, None))
    fuzzing.loop.close()


@pytest.mark.parametrize("name", [*UNION_WORDS, "", "a.b", "x" * 100_000])
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_an_unknown_field_is_refused_whatever_its_name(kind: type[Settings], name: str) -> None:
    data = {"prompt": "a"} if kind is CompletionBody else {"messages": chat()["messages"]}
    for fields, path in (({name: 1}, ""), ({"speculation": {name: 1}}, "speculation.")):
        with pytest.raises(ApiError, match="not supported by this server") as caught:
            parse(kind, json.dumps({**data, **fields}).encode())
        assert caught.value.error["code"] == "unsupported"
        assert caught.value.error["param"].removesuffix("...") == path + name[:64]


RULES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stop": ["a"] * 17}, "stop: 17 texts: at most 16 are allowed"),
    ({"stop": "a" * 257}, "stop: a text of 257 characters: each may have 1 to 256"),
    ({"stop": ["a", ""]}, "stop: a text of 0 characters: each may have 1 to 256"),
    ({"stop": 5}, "stop: must be a text or a list of texts"),
    ({"prompt": [-1]}, "prompt: token id -1: ids lie in [0, 2147483647]"),
    ({"prompt": [[3, -7]]}, "prompt: token id -7: ids lie in [0, 2147483647]"),
    ({"prompt": [[3], [True]]}, "prompt: token ids must be whole numbers"),
    ({"prompt": ["a", ""]}, "prompt: empty: it needs at least 1 token"),
    ({"stop_token_ids": [4, -1]}, "stop_token_ids.1 = -1: Input should be greater than or equal"),
    ({"temperature": 101}, "temperature = 101: Input should be less than or equal to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is no token id"),
    ({"temprature": 1}, "temprature: not supported by this server; did you mean temperature?"),
    ({"min_tokens": 17}, "min_tokens = 17: more than max_tokens = 16"),
)


@pytest.mark.parametrize(("fields", "message"), RULES)
def test_an_error_names_value_and_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())
    assert caught.value.error["param"].split(".")[0] == next(iter(fields))


def test_what_a_body_leaves_open_is_the_models_default_else_the_apis() -> None:
    data = json.dumps({"prompt": [1], "top_p": None, "min_p": 0.1}).encode()
    body = parse(CompletionBody, data)
    (alone,) = body.samplings(9, {}, grammar=None)
    assert alone == Sampling(
        max_tokens=9, min_p=0.1, **{k: DEFAULTS[k] for k in DEFAULTS if k != "min_p"}
    )
    assert (alone.temperature, alone.top_k, alone.top_p) == (1.0, 0, 1.0)
    (model,) = body.samplings(9, {"temperature": 0.0, "top_p": 0.8, "min_p": 0.5}, grammar=None)
    assert (model.temperature, model.top_p, model.min_p) == (0.0, 0.8, 0.1)


def test_a_prompt_has_four_forms() -> None:
    for given_form, prompts in (
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])
    ):  # fmt: skip
        body = parse(CompletionBody, json.dumps({"prompt": given_form}).encode())
        assert body.prompt == prompts


def test_choices_and_ids_are_counted_before_any_work() -> None:
    limits = BodyLimits(max_choices=4, max_prompt_tokens=10)
    for fields, why in (
        ({"prompt": ["a"] * 5}, "5 prompts x n = 1: 5 answers; serve.max_choices = 4"),
        ({"prompt": ["a"] * 2, "n": 3}, "2 prompts x n = 3: 6 answers"),
        ({"prompt": [[1], [1] * 11]}, "the prompt has 11 tokens, 1 too many"),
    ):
        with pytest.raises(ApiError, match=re.escape(why)):
            parse(CompletionBody, json.dumps(fields).encode(), limits)
    exact = json.dumps({"prompt": [[1] * 10] * 2, "n": 2}).encode()
    assert parse(CompletionBody, exact, limits).n == 2


def test_all_instructions_are_one_system_message() -> None:
    """A Qwen template refuses a second one, wherever it stands, and knows no developer."""
    said = [
        ("system", "Answer."), ("developer", [{"type": "text", "text": "In "},
                                              {"type": "text", "text": "verse."}]),
        ("user", "hi"), ("developer", "Stop."),
    ]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in said]
    body = parse(ChatBody, json.dumps({"messages": messages}).encode())
    assert [(m["role"], m["content"]) for m in body.conversation()] == [
        ("system", "Answer.\n\nIn verse.\n\nStop."), ("user", "hi")
    ]  # fmt: skip


def test_an_error_of_another_process_arrives_whole() -> None:
    error = ApiError(429, "full", kind="k", param="p", code="c", retry_after_s=3)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.error, copy.retry_after_s) == (429, error.error, 3)
    assert str(copy) == "full"
