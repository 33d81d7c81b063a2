"""Log probabilities of prompts over HTTP: echo with logprobs, and prompt_logprobs.

What is right is said by the engine that is asked directly, as in test_parameters.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from outrider.actors.driver.messages import Chunk, Completion, RequestStats
from outrider.actors.http.bodies import ApiError, CompletionBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.responses import ResponseWriter
from outrider.model.text import Tokenizer
from tests.actors.http.test_parameters import Offline, server
from tests.test_end_to_end import PROMPTS, TINY

TOP = 2
SPECIAL = "<|im_end|>"


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


def test_ids_that_a_chat_names_are_its_top_logprobs(offline: Offline) -> None:
    said = [{"role": "user", "content": PROMPTS[1]}]
    ids = offline.tokenizer.apply_chat_template(said)
    named = [offline.tokenizer.encode(word)[0] for word in ("a", "yes", "no")]
    (right,) = offline(ids, [{"logprobs": 0, "logprob_ids": tuple(named), "max_tokens": 6}])

    async def work() -> None:
        async with server() as ask:
            how: dict[str, Any] = {"messages": said, "max_tokens": 6, "temperature": 0}
            got = await ask(
                "chat/completions", logprobs=True, logprob_token_ids=named,
                return_tokens_as_token_ids=True, **how,
            )  # fmt: skip
            rows = got["choices"][0]["logprobs"]["content"]
            assert len(rows) == len(right.logprobs) == 6
            for row, (own, *others) in zip(rows, right.logprobs):
                assert row["token"] == f"token_id:{own[0]}"
                told = {one["token"]: one["logprob"] for one in row["top_logprobs"]}
                assert told == pytest.approx({f"token_id:{i}": v for i, v in others}, abs=1e-3)

    asyncio.run(work())
    wrong = {"prompt": "a", "logprob_token_ids": named}
    with pytest.raises(ApiError, match="logprob_token_ids: only with logprobs"):
        parse(CompletionBody, json.dumps(wrong).encode())


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echo_is_scored_as_the_engine_scores_it(
    max_tokens: int, as_ids: bool, offline: Offline
) -> None:
    prompts = [PROMPTS[1], f"a{SPECIAL}b {PROMPTS[0]}", "a"]
    encoded = [offline.tokenizer.encode(prompt) for prompt in prompts]
    how = {"prompt_logprobs": TOP, "logprobs": TOP, "max_tokens": max(1, max_tokens)}
    rights = [offline(ids, [how])[0] for ids in encoded]

    async def answers() -> dict[str, Any]:
        async with server() as ask:
            return await ask(
                "completions", prompt=encoded if as_ids else prompts, echo=True, logprobs=TOP,
                max_tokens=max_tokens, temperature=0, seed=1234,
            )  # fmt: skip

    got = asyncio.run(answers())
    assert got["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for choice, ids, right in zip(got["choices"], encoded, rights, strict=True):
        told, answer = choice["logprobs"], right.tokens[:max_tokens]
        rows = [*right.prompt_logprobs, *right.logprobs[:max_tokens]]
        assert choice["token_ids"] == answer
        assert choice["prompt_token_ids"] == ids
        assert len({len(values) for values in told.values()}) == 1
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx([r[0][1] for r in rows], abs=1e-3)
        for name, top, row in zip(told["tokens"][1:], told["top_logprobs"][1:], rows, strict=True):
            assert top[name] == pytest.approx(row[0][1], abs=1e-3)
            assert max(top.values()) == pytest.approx(row[1][1], abs=1e-3)
        for name, at in zip(told["tokens"], told["text_offset"], strict=True):
            if not as_ids or name != SPECIAL:  # an echo of ids does not show it
                assert choice["text"][at:].startswith(name)
        assert told["text_offset"] == sorted(told["text_offset"])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_have_vllms_form(chat: bool, top: int, offline: Offline) -> None:
    said = [{"role": "user", "content": PROMPTS[1]}]
    encode = offline.tokenizer.encode
    ids = offline.tokenizer.apply_chat_template(said) if chat else encode(PROMPTS[1])
    (right,) = offline(ids, [{"prompt_logprobs": top}])
    path = "chat/completions" if chat else "completions"
    fields: dict[str, Any] = {"messages": said} if chat else {"prompt": PROMPTS[1]}

    async def answers() -> list[dict[str, Any]]:
        async with server() as ask:
            asked = {**fields, "temperature": 0}
            return [await ask(path, **asked, prompt_logprobs=top, n=2), await ask(path, **asked)]

    got, without = asyncio.run(answers())
    assert "prompt_logprobs" not in without
    assert "prompt_logprobs" not in without["choices"][0]
    found = [got] if chat else got["choices"]
    for first, *rows in (one["prompt_logprobs"] for one in found):
        assert first is None
        assert len(rows) == len(right.prompt_logprobs) == len(ids) - 1
        for told, row in zip(rows, right.prompt_logprobs):
            assert told.keys() == {str(token) for token, _ in row}
            for rank, (token, value) in enumerate(row):
                entry = told[str(token)]
                assert entry["logprob"] == pytest.approx(value, abs=1e-3)
                assert entry["decoded_token"] == offline.tokenizer.token_text(token)
                assert rank == 0 or entry["rank"] == rank
            assert ("rank" in told[str(row[0][0])]) == (row[0][0] in dict(row[1:]))


def test_a_stream_tells_the_same_piece_by_piece() -> None:
    body = parse(
        CompletionBody,
        json.dumps({"prompt": "ab", "echo": True, "logprobs": 1}).encode(),
    )
    tokenizer = Tokenizer(TINY)
    ids = tokenizer.encode("ab")
    scored = [None, *([(token, -1.0), (9, -0.5)] for token in ids[1:])]
    answer = [[(40, -0.25), (40, -0.25)], [(41, -2.0), (42, -1.5)]]
    text = tokenizer.decode([40, 41])

    def writer() -> ResponseWriter:
        return ResponseWriter(body=body, model="tiny", tokenizer=tokenizer, echoes=["ab"])

    whole = Completion(
        prompt_ids=ids, token_ids=[40, 41], text=text, logprobs=answer, finish_reason="length",
        seed=0, stats=RequestStats(), prompt_logprobs=scored,
    )  # fmt: skip
    (right,) = json.loads(writer().whole([whole], {}))["choices"]
    chunks = [
        Chunk(token_ids=[40], text=text[:1], logprobs=answer[:1], prompt_logprobs=scored),
        Chunk(token_ids=[41], text=text[1:], logprobs=answer[1:], finish_reason="length"),
    ]
    streaming = writer()
    parts = [e["choices"][0] for chunk in chunks for e in streaming.events(0, chunk, ids)]
    assert "".join(part["text"] for part in parts) == right["text"]
    for name, values in right["logprobs"].items():
        assert [v for part in parts for v in part["logprobs"][name]] == values
    assert right["logprobs"]["text_offset"][len(ids)] == len("ab")
