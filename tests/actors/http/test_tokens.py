"""/tokenize and /detokenize, and the doors that only say how the server is."""

from __future__ import annotations

from typing import Any

import pytest

import outrider
from outrider.model.text import Tokenizer
from tests.actors.http.local_server import run, serving
from tests.test_end_to_end import TINY

USER = {"role": "user", "content": "What is a view?"}
WORDS = "To create a new project, naïve: \N{OWL}<|im_end|>"


def test_a_prompt_becomes_the_ids_that_completions_make_of_it() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000) as (client, driver, _):
            asked = {"prompt": WORDS, "max_tokens": 1, "return_token_ids": True}
            answered = (await client.post("/v1/completions", json=asked)).json()
            right = answered["choices"][0]["prompt_token_ids"]
            for prompt, ids in ((WORDS, right), ("", [])):
                for special in (False, True, None):
                    fields = {"model": "tiny", "prompt": prompt, "add_special_tokens": special}
                    got = (await client.post("/tokenize", json=fields)).json()
                    assert got == {
                        "count": len(ids), "max_model_len": driver.limits.max_model_len,
                        "tokens": ids, "token_strs": None,
                    }  # fmt: skip
            fields = {"prompt": WORDS, "return_token_strs": True}
            got = (await client.post("/tokenize", json=fields)).json()
            assert got["token_strs"] == [Tokenizer(TINY).token_name(token) for token in right]
            assert got["token_strs"][:2] == ["To", "Ġcreate"]
            back = await client.post("/detokenize", json={"model": "tiny", "tokens": right})
            assert back.json() == {"prompt": WORDS}
            assert driver.stats()["requests_submitted"] == 1

    run(work)


def test_a_conversation_becomes_the_ids_that_chats_make_of_it() -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.2, "chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {
            "messages": [USER, {"role": "assistant", "content": "A view"}],
            "add_generation_prompt": False, "continue_final_message": True,
        },
    )  # fmt: skip

    async def work() -> None:
        async with serving(vocab_size=5000, max_model_len=128, num_pages=64) as (client, _, _):
            found = []
            for fields in bodies:
                fields = {"messages": [USER], "max_tokens": 1, "return_token_ids": True} | fields
                answered = (await client.post("/v1/chat/completions", json=fields)).json()
                got = (await client.post("/tokenize", json=fields)).json()
                assert got["tokens"] == answered["choices"][0]["prompt_token_ids"]
                found.append(got["tokens"])
            assert len(set(map(tuple, found))) == 3
            brings = {"messages": [USER], "chat_template": "{{ messages[0].content }}"}
            refused = await client.post("/tokenize", json=brings)
            assert "serve.request_templates" in refused.json()["error"]["message"]

    run(work)


def test_a_text_longer_than_the_context_is_counted() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000, max_model_len=64) as (client, _, _):
            for prompt in (WORDS * 20, WORDS * 10_000):
                got = await client.post("/tokenize", json={"prompt": prompt})
                ids = Tokenizer(TINY).encode(prompt)
                assert got.json()["count"] == len(ids) > 64
                back = await client.post("/detokenize", json={"tokens": ids})
                assert back.json() == {"prompt": prompt}

    run(work)


REFUSED: tuple[tuple[str, dict[str, Any], str | None, str], ...] = (
    ("/tokenize", {}, "prompt", "prompt, messages: give one of them"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "give one of them"),
    ("/tokenize", {"prompt": ["a"]}, "prompt", "valid string"),
    ("/tokenize", {"prompt": "a", "colour": 1}, "colour", "not supported by this server"),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, "model", "not served here"),
    ("/detokenize", {}, "tokens", "Field required"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens.1", "valid integer"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens.1", "greater than or equal to 0"),
    ("/detokenize", {"tokens": [4, 5000, 3]}, "tokens", "token id 5000: ids of this model lie in"),
    ("/detokenize", {"tokens": [], "text": "a"}, "text", "not supported by this server"),
)  # fmt: skip


def test_what_cannot_be_tokenised_is_refused_by_name() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000) as (client, _, _):
            for path, fields, param, why in REFUSED:
                got = await client.post(path, json=fields)
                assert got.status_code == (404 if param == "model" else 400), (fields, got.text)
                assert got.json()["error"]["param"] == param, got.text
                assert why in got.json()["error"]["message"]
            assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    run(work)


@pytest.mark.parametrize("keys", [(), ("sk-1",)])
def test_pings_need_no_key_and_the_version_does(keys: tuple[str, ...]) -> None:
    async def work() -> None:
        async with serving(keys=keys) as (client, _, endpoints):
            for method in ("GET", "POST", "HEAD"):
                assert (await client.request(method, "/ping")).status_code == 200
            for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                got = await client.post(path, json=fields)
                assert got.status_code == (401 if keys else 200)
            got = await client.get("/version")
            assert got.status_code == (401 if keys else 200)
            if not keys:
                assert got.json() == {"version": outrider.__version__}
            endpoints.drain()
            assert (await client.get("/ping")).status_code == 503

    run(work)
