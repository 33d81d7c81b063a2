"""Fields that choose among answers, cut prompts, or change how an answer is written.

What is right is said by the engine that is asked directly, as in test_parameters.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.actors.http.bodies import CompletionBody
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.prompts import banned_tokens, chat_text
from outrider.model.text import Tokenizer
from tests.actors.http.local_server import body, events, run, serving, until
from tests.actors.http.test_parameters import Offline, server
from tests.ranks import Team
from tests.test_end_to_end import PROMPTS, TINY

PROMPT = PROMPTS[1]
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


def mean_logprob(rows: list[list[tuple[int, float]]]) -> float:
    return sum(row[0][1] for row in rows) / len(rows)


def test_of_best_of_answers_the_likeliest_a_token_come_back(offline: Offline) -> None:
    ids = offline.tokenizer.encode(PROMPT)
    how = {"temperature": 1.0, "logprobs": 0}
    outs = offline(ids, [{**how, "seed": 3 + i} for i in range(5)])
    ranked = sorted(outs, key=lambda out: mean_logprob(out.logprobs), reverse=True)
    assert ranked[:2] != outs[:2], "the first two are not the best"

    async def answers() -> list[dict[str, Any]]:
        async with server() as ask:
            fields = {"prompt": [PROMPT, PROMPT], "temperature": 1.0, "seed": 3, "n": 2}
            return [
                await ask("completions", **fields, best_of=5),
                await ask("completions", **fields, best_of=5, logprobs=1),
                await ask("completions", **fields, best_of=2),
            ]

    chosen, reported, plain = asyncio.run(answers())
    for got in (chosen, reported):
        assert [c["token_ids"] for c in got["choices"]] == [out.tokens for out in ranked[:2]] * 2
        assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3]
        assert got["usage"]["completion_tokens"] == 2 * sum(len(out.tokens) for out in outs)
    assert all(c["logprobs"] is None for c in chosen["choices"])
    assert all(c["logprobs"]["top_logprobs"] for c in reported["choices"])
    assert [c["token_ids"] for c in plain["choices"]] == [out.tokens for out in outs[:2]] * 2


def test_usage_tells_what_of_a_prompt_was_known_and_salts_keep_tenants_apart() -> None:
    async def answers() -> list[dict[str, Any]]:
        async with server(num_snapshots=8) as ask:
            fields: dict[str, Any] = {"temperature": 0.7, "seed": 1, "prompt": PROMPT}
            return [
                await ask("completions", **fields),
                await ask("completions", **fields),
                await ask("completions", **fields, cache_salt="a"),
                await ask("completions", **fields, cache_salt="a"),
                await ask("completions", **{**fields, "prompt": [PROMPT, PROMPT]}, n=3),
                await ask("completions", **{**fields, "prompt": PROMPT + " and then"}),
            ]

    got = asyncio.run(answers())
    length = got[0]["usage"]["prompt_tokens"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in got]
    assert cached[:5] == [0, length, 0, length, 2 * length]
    assert 0 < cached[5] <= length
    texts = [one["choices"][0]["text"] for one in got[:5]]
    assert texts == texts[:1] * 5


def test_what_ends_an_answer_belongs_to_it_where_asked(offline: Offline) -> None:
    ids = offline.tokenizer.encode(PROMPT)
    (plain,) = offline(ids, [{}])
    text = offline.text(plain)
    stop, token = text[9:12], plain.tokens[7]
    word = offline.tokenizer.decode([token])
    until_token = offline.tokenizer.decode(plain.tokens[: plain.tokens.index(token) + 1])
    assert word

    async def answers() -> list[str]:
        async with server() as ask:
            asked = []
            for include in (True, False):
                fields = {"prompt": PROMPT, "temperature": 0, "include_stop_str_in_output": include}
                for how in ({"stop": ["never in it", stop]}, {"stop_token_ids": [token]}):
                    asked.append(await ask("completions", **fields, **how))
            assert {got["choices"][0]["finish_reason"] for got in asked} == {"stop"}
            return [got["choices"][0]["text"] for got in asked]

    before = text[: text.find(stop)]
    assert asyncio.run(answers()) == [
        before + stop, until_token, before, until_token[: -len(word)]
    ]  # fmt: skip


def test_special_tokens_have_text_where_asked(offline: Offline) -> None:
    """The answer to "x" ends in <|im_end|> by itself."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    shows = {"skip_special_tokens": False}

    async def answers() -> list[str]:
        async with server() as ask:
            hows = ({}, shows, shows | {"include_stop_str_in_output": True},
                    shows | {"ignore_eos": True})  # fmt: skip
            got = [await ask("chat/completions", **fields, **how) for how in hows]
            return [one["choices"][0]["message"]["content"] for one in got]

    hidden, shown, included, went_on = asyncio.run(answers())
    assert hidden == shown
    assert included == shown + "<|im_end|>"
    assert went_on.startswith(included)
    pieces = offline.tokenizer.stream(special=True)
    ids = offline.tokenizer.encode("a<|im_end|>b")
    assert [pieces.push([token]) for token in ids] == ["a", "<|im_end|>", "b"]


def test_bad_words_are_never_said(offline: Offline) -> None:
    """Each word alone and behind a space."""
    tokenizer = offline.tokenizer
    ids = tokenizer.encode(PROMPT)
    (plain,) = offline(ids, [{}])
    words = [tokenizer.decode([token]) for token in plain.tokens[:6]]
    words = [word for word in words if len(tokenizer.encode(word)) == 1]
    spelled = banned_tokens(tokenizer, words)
    banned = tuple(token for token, *more in spelled if not more)
    assert {tokenizer.encode(word)[0] for word in words} <= set(banned)
    several = tuple(tuple(one) for one in spelled if len(one) > 1)
    (right,) = offline(ids, [{"banned_ids": banned, "banned_sequences": several}])
    assert right.tokens != plain.tokens
    assert not set(banned) & set(right.tokens)

    async def answers() -> dict[str, Any]:
        async with server() as ask:
            return await ask("completions", prompt=PROMPT, temperature=0, bad_words=words)

    got = asyncio.run(answers())
    assert got["choices"][0]["token_ids"] == right.tokens
    assert got["usage"]["speculation"]["drafted_tokens"] > 0


def test_words_of_several_tokens_are_never_said(offline: Offline) -> None:
    """In each of many answers three words in turn, as the answer without the ban has them."""
    tokenizer = offline.tokenizer
    ids = tokenizer.encode(PROMPT)
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40}
    plains = offline(ids, [how | {"seed": seed} for seed in range(4)])
    words = [[tokenizer.decode(out.tokens[i : i + 2]) for i in (3, 9, 20)] for out in plains]
    spelled = [banned_tokens(tokenizer, some) for some in words]
    assert all(max(map(len, some)) > 1 for some in spelled)

    async def work() -> None:
        accepted = 0
        async with server() as ask:
            for seed, (plain, some, banned) in enumerate(zip(plains, words, spelled)):
                what = how | {"prompt": PROMPT, "seed": seed, "bad_words": some}
                on = await ask("completions", **what)
                off = await ask("completions", **what, speculation={"draft_tokens": 0})
                tokens = on["choices"][0]["token_ids"]
                assert tokens == off["choices"][0]["token_ids"] != plain.tokens
                said = " ".join(map(str, tokens))
                for one in banned:
                    assert f" {' '.join(map(str, one))} " not in f" {said} "
                accepted += on["usage"]["speculation"]["accepted_tokens"]
        assert accepted > 10

    run(work)


def test_words_that_leave_no_token_are_refused() -> None:
    async def work() -> None:
        letter = Tokenizer(TINY).encode("a")
        async with serving(vocab_size=5000) as (client, _, _):
            for words, param in (("a", "allowed_token_ids"), ("several words", "bad_words")):
                what = body(allowed_token_ids=letter, bad_words=[words])
                got = await client.post("/v1/completions", json=what)
                assert got.status_code == 400, got.text
                assert got.json()["error"]["param"] == param
            long = body(bad_words=["🦊" * 256])
            assert (await client.post("/v1/completions", json=long)).status_code == 200

    run(work)


def test_allowed_and_banned_ids_hold_for_drawn_tokens_on_any_number_of_ranks(
    offline: Offline,
) -> None:
    ids = offline.tokenizer.encode(PROMPT)
    (plain,) = offline(ids, [{"temperature": 1.0, "seed": 4}])
    allowed = tuple(sorted({*plain.tokens[::2], 500, 501, 502}))
    hows: list[dict[str, Any]] = [
        {"allowed_ids": allowed, "temperature": 1.0, "seed": 4},
        {"allowed_ids": allowed, "banned_ids": allowed[:2], "temperature": 2.0, "top_p": 0.9},
        {"allowed_ids": allowed, "logit_bias": ((7, 100.0),), "temperature": 0.0},
    ]
    hows = [how | {"seed": 4} for how in hows]
    alone = offline(ids, hows)
    for how, out in zip(hows, alone):
        assert set(out.tokens) <= set(allowed) - set(how.get("banned_ids", ()))
    assert alone[0].tokens != plain.tokens
    team = Team(TINY, draft_tokens=3, tensor_parallel=2, max_slots=8, max_model_len=512,
                num_pages=400)  # fmt: skip
    drafted = team.generate([(ids, offline._sampling(**how)) for how in hows])
    assert [out.tokens for out in drafted] == [out.tokens for out in alone]
    assert sum(out.drafted for out in drafted) > 0


def test_a_prompt_is_cut_at_its_beginning_where_asked() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000) as (client, _, _):
            for fields, kept in (
                ({"truncate_prompt_tokens": 2, "prompt": [5, 6, 7]}, [[6, 7]]),
                ({"truncate_prompt_tokens": 9, "prompt": [[5], [6, 7]]}, [[5], [6, 7]]),
                ({"truncate_prompt_tokens": -1, "prompt": [*range(100)]}, [[*range(41, 100)]]),
            ):  # fmt: skip
                got = await client.post("/v1/completions", json=body(**fields, echo=True))
                assert [c["prompt_token_ids"] for c in got.json()["choices"]] == kept
                text = Tokenizer(TINY).decode(kept[0])
                assert got.json()["choices"][0]["text"].startswith(text)
            long = "all work and no play " * 200
            what = {"truncate_prompt_tokens": 8, "return_token_ids": True, "max_tokens": 3}
            got = await client.post("/v1/completions", json={"prompt": long, **what})
            tail = Tokenizer(TINY).encode(long)[-8:]
            assert got.json()["choices"][0]["prompt_token_ids"] == tail
            said = [{"role": "user", "content": long}]
            got = await client.post("/v1/chat/completions", json={"messages": said, **what})
            assert len(got.json()["choices"][0]["prompt_token_ids"]) == 8

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all_are_an_answer(stream: bool) -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            what = body(max_tokens=0, n=2, echo=True, prompt="hi", logprobs=None)
            if stream:
                options = {"include_usage": True}
                *chunks, last, _ = await events(
                    client, "/v1/completions", **what, stream_options=options
                )
                choices, usage = [one for c in chunks for one in c["choices"]], last["usage"]
            else:
                got = (await client.post("/v1/completions", json=what)).json()
                choices, usage = got["choices"], got["usage"]
            assert [c["text"] for c in choices] == ["hi", "hi"]
            assert [c["token_ids"] for c in choices] == [[], []]
            assert [c["finish_reason"] for c in choices] == ["length"] * 2
            assert usage["completion_tokens"] == 0

    run(work)


def test_tokens_are_written_as_their_ids_where_asked() -> None:
    async def answers() -> list[dict[str, Any]]:
        async with server() as ask:
            fields = {"temperature": 0, "return_tokens_as_token_ids": True}
            return [
                await ask("completions", prompt=PROMPT, **fields, logprobs=2),
                await ask("chat/completions", messages=[USER], **fields, logprobs=True),
            ]

    for got in asyncio.run(answers()):
        (choice,) = got["choices"]
        told = choice["logprobs"]
        names = told["tokens"] if "tokens" in told else [one["token"] for one in told["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for name in names)


def test_the_smallest_priority_gets_the_next_slot_and_equal_ones_go_in_turn() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_slots=1, max_model_len=200) as (client, driver, _):
            done: list[int] = []

            async def ask(number: int, priority: int | None) -> None:
                what = body(max_tokens=20, priority=priority)
                assert (await client.post("/v1/completions", json=what)).is_success
                done.append(number)

            calls = []
            for number, priority in enumerate((None, 2, 1, None, 1, -3)):
                calls.append(asyncio.ensure_future(ask(number, priority)))
                await until(lambda: driver.stats()["requests_submitted"] == len(calls))
            await asyncio.gather(*calls)
            assert done == [0, 5, 3, 2, 4, 1]

    run(work)


def test_a_chat_echoes_the_turn_that_it_continues() -> None:
    async def work() -> None:
        async with serving(vocab_size=5000, max_model_len=200, num_pages=60) as (client, _, _):
            begun = {"role": "assistant", "content": "Once upon"}
            goes_on = {"continue_final_message": True}
            for fields, begins, role in (
                ({"messages": [USER, begun], **goes_on}, "Once upon", "assistant"),
                ({"messages": [USER, begun]}, "Once upon", "assistant"),
                ({"messages": [USER]}, "", "assistant"),
                ({"messages": [USER], "add_generation_prompt": False}, "hi", "user"),
            ):  # fmt: skip
                texts = []
                for echo in (True, False):
                    what = {**fields, "max_tokens": 5, "echo": echo}
                    got = (await client.post("/v1/chat/completions", json=what)).json()
                    assert got["choices"][0]["message"]["role"] == role
                    texts.append(got["choices"][0]["message"]["content"])
                assert texts[0] == begins + texts[1]
                *chunks, _ = await events(
                    client, "/v1/chat/completions", **{**fields, "max_tokens": 5, "echo": True}
                )
                deltas = [c["choices"][0]["delta"] for c in chunks]
                assert deltas[0]["role"] == role
                assert "".join(d.get("content") or "" for d in deltas) == texts[0]

    run(work)


QWEN = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{%- else %}<think>{% endif %}{% endif %}[{{ reasoning_effort }}]"
)
"""A template that has what Qwen's has of these fields."""


def written(template: str = QWEN, **fields: Any) -> str:
    """The prompt of a chat of this template."""
    data = {"messages": [USER], **fields, "chat_template": template}
    return chat_text(Tokenizer(TINY), parse(ChatBody, json.dumps(data).encode()))


def test_thinking_is_turned_on_and_off_in_each_clients_words() -> None:
    on: tuple[dict[str, Any], ...] = (
        {}, {"enable_thinking": True}, {"thinking": True}, {"thinking": {"type": "enabled"}},
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        {"enable_thinking": True, "reasoning_effort": "none"},
    )  # fmt: skip
    off: tuple[dict[str, Any], ...] = (
        {"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled", "budget_tokens": None}},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
    )  # fmt: skip
    for fields in on:
        assert "<think></think>" not in written(**fields), fields
    for fields in off:
        assert "<think></think>" in written(**fields), fields
    assert written(reasoning_effort="low").endswith("[low]")


def test_the_last_message_is_left_open_where_it_is_continued() -> None:
    begun = {"role": "assistant", "content": "Once upon"}
    closed = written(messages=[USER, begun], add_generation_prompt=False)
    assert closed.endswith("Once upon<|im_end|>[]")
    for fields in ({}, {"add_generation_prompt": False}):
        open_text = written(messages=[USER, begun], continue_final_message=True, **fields)
        assert closed.startswith(open_text)
        assert open_text.endswith("Once upon")
    kept = "{%- for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    spaced = {"role": "assistant", "content": " Once \n"}
    for template, end in ((kept, " Once \n"), (QWEN, "\nOnce")):
        text = written(template, messages=[USER, spaced], continue_final_message=True)
        assert text.endswith(end)
    for content, template in (("", QWEN), ("x", "{{ messages[0].content }}")):
        with pytest.raises(ValueError, match="the last message cannot be continued"):
            written(template, messages=[USER, {"role": "assistant", "content": content}],
                    continue_final_message=True)  # fmt: skip


def test_a_request_brings_its_template_only_where_the_server_takes_it(tmp_path: Path) -> None:
    async def work() -> None:
        many: dict[str, Any] = {"vocab_size": 5000, "max_model_len": 200, "num_pages": 60}
        what = {"messages": [USER], "max_tokens": 2, "return_token_ids": True}
        own = {"chat_template": "Say: {{ messages[0].content }}"}
        async with serving(**many) as (client, _, _):
            got = await client.post("/v1/chat/completions", json=what | own)
            assert got.status_code == 400
            assert "serve.request_templates" in got.json()["error"]["message"]
        async with serving(**many, serve={"request_templates": True}) as (client, _, _):
            got = await client.post("/v1/chat/completions", json=what | own)
            told = got.json()["choices"][0]["prompt_token_ids"]
            assert Tokenizer(TINY).decode(told) == "Say: hi"
            for bad in ("{{ x", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
                got = await client.post("/v1/chat/completions", json=what | {"chat_template": bad})
                assert got.status_code == 400, bad

    run(work)


def test_prompt_cuts_leave_room_for_the_answer() -> None:
    data = {"prompt": "a", "truncate_prompt_tokens": -1}
    for most, kept in ((None, 84), (10, 90), (500, 1), (0, 99)):
        parsed = parse(CompletionBody, json.dumps(data | {"max_tokens": most}).encode())
        assert parsed.kept_prompt_tokens(100) == kept
