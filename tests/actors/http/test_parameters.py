"""Every parameter of the API gives the answer of an engine that is asked for the same directly.

    body -> Endpoints -> Driver -> RankLoop -> Runner with drafts      Runner without drafts
The bundled checkpoint, its ranks as a thread of this process. tests/actors/test_serve.py compares
the same cases over Ray Serve.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.http.bodies import ChatBody, CompletionBody
from outrider.actors.http.endpoints import Endpoints
from outrider.model.step import Sampling
from outrider.model.text import Tokenizer
from tests.actors.conftest import ThreadRanks, limits
from tests.actors.parameters import MAX_TOKENS, NOT_OF_THE_ANSWER, cases
from tests.ranks import Output, Team
from tests.test_end_to_end import PROMPTS, TINY

K = 3
ENGINE: dict[str, Any] = {"max_slots": 8, "max_model_len": 512, "num_pages": 400}
PROMPT = PROMPTS[1]
Ask = Callable[..., Awaitable[dict[str, Any]]]


class Offline:
    """The engine without drafts, asked directly: what is right."""

    def __init__(self) -> None:
        self.team = Team(TINY, draft_tokens=0, **ENGINE)
        self.tokenizer = Tokenizer(TINY)

    def __call__(self, prompt: list[int], hows: Sequence[dict[str, Any]]) -> list[Output]:
        """One answer for each of the settings."""
        asked = [self._sampling(**how) for how in hows]
        once = list(dict.fromkeys(asked))
        outs = self.team.generate([(prompt, sampling) for sampling in once])
        return [outs[once.index(sampling)] for sampling in asked]

    def text(self, out: Output) -> str:
        return self.tokenizer.decode(out.tokens[:-1] if out.finish == "stop" else out.tokens)

    def _sampling(self, **how: Any) -> Sampling:
        ends = () if how.get("ignore_eos") else self.team.model.eos_ids
        how["stop_ids"] = (*how.get("stop_ids", ()), *ends)
        return Sampling(**{"max_tokens": MAX_TOKENS, **how})


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


@asynccontextmanager
async def server() -> AsyncIterator[Ask]:
    """(path, fields) -> the answer of a server whose drafts are on; asserts that it is a 200."""
    (runner,) = Team(TINY, draft_tokens=K, **ENGINE).runners
    runner.hang = threading.Event()  # type: ignore[attr-defined] # what ThreadRanks stops by
    run, model, tokenizer = runner.run, runner.model, Tokenizer(TINY)
    bounds = limits(
        vocab_size=model.vocab_size, eos_ids=model.eos_ids, max_model_len=run.max_model_len,
        num_pages=run.num_pages, page_tokens=run.page_tokens, max_slots=run.max_slots,
    )  # fmt: skip
    driver = Driver(bounds, ThreadRanks([runner]), load_text=lambda: tokenizer)  # type: ignore
    await driver.start()
    endpoints = Endpoints(driver, tokenizer, serve=ServeSpec(), model="tiny", about=dict)
    transport = httpx.ASGITransport(app=endpoints.app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:

            async def ask(path: str, **fields: Any) -> dict[str, Any]:
                given = {"max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
                got = await client.post(f"/v1/{path}", json=given, timeout=60)
                assert got.status_code == 200, got.text
                return got.json()

            yield ask
    finally:
        endpoints.close()
        await driver.close()


def given(chat: bool, offline: Offline) -> tuple[str, dict[str, Any], list[int]]:
    """The path, the fields that hold the prompt, and its ids."""
    if not chat:
        return "completions", {"prompt": PROMPT}, offline.tokenizer.encode(PROMPT)
    said = [{"role": "user", "content": PROMPT}]
    ids = offline.tokenizer.apply_chat_template(said)
    return "chat/completions", {"messages": said}, ids


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_parameter_means_what_it_means_to_the_engine(chat: bool, offline: Offline) -> None:
    path, fields, prompt = given(chat, offline)
    (plain,) = offline(prompt, [{}])
    assert len(plain.tokens) == MAX_TOKENS
    table = cases(plain.tokens, offline.text(plain), offline.team.model.eos_ids[0])
    body = ChatBody if chat else CompletionBody
    assert set(body.model_fields) <= table.keys() | NOT_OF_THE_ANSWER
    if chat:  # its settings are those of completions: a few of them show that
        table = {name: table[name] for name in ("max_tokens", "temperature's default", "stop")}

    rights = offline(prompt, [case.how for case in table.values()])
    befores = offline(prompt, [case.without for case in table.values()])

    async def answers() -> list[dict[str, Any]]:
        async with server() as ask:
            return await asyncio.gather(*(ask(path, **fields, **c.fields) for c in table.values()))

    for (name, case), right, before, got in zip(
        table.items(), rights, befores, asyncio.run(answers())
    ):
        text, finish = offline.text(right), right.finish
        if case.stop:
            ends = [at for stop in case.stop if (at := text.find(stop)) >= 0]
            text, finish = text[: min(ends)], "stop"
        else:
            assert right.tokens != before.tokens, f"{name} changes nothing"
        (choice,) = got["choices"]
        assert (text_of(choice), choice["finish_reason"]) == (text, finish), name
        assert case.stop or choice["token_ids"] == right.tokens, name
        assert got["usage"]["speculation"]["drafted_tokens"] > 0, name


@pytest.mark.parametrize("chat", [False, True])
def test_choices_draw_with_their_own_seeds_and_report_raw_probabilities(
    chat: bool, offline: Offline
) -> None:
    """Choice i draws with seed + i. Log probabilities are those before penalties and bias."""
    path, fields, prompt = given(chat, offline)
    how = {"temperature": 0.9, "presence_penalty": 1.5}
    asked = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}

    rights = offline(prompt, [{**how, "logprobs": 2, "seed": 5 + i} for i in range(3)])
    (plain,) = offline(prompt, [{}])
    greedy = {**fields, "temperature": 0}

    async def answers() -> list[dict[str, Any]]:
        async with server() as ask:
            return await asyncio.gather(
                ask(path, **fields, **how, **asked, seed=5, n=3),
                ask(path, **greedy, speculation={"draft_tokens": 0}),
                ask(path, **greedy, **({} if chat else {"echo": True})),
            )

    drawn, undrafted, echoed = asyncio.run(answers())
    for choice, right in zip(drawn["choices"], rights, strict=True):
        assert choice["token_ids"] == right.tokens
        assert text_of(choice) == offline.text(right)
        told = choice["logprobs"]
        own = [one["logprob"] for one in told["content"]] if chat else told["token_logprobs"]
        assert own == pytest.approx([row[0][1] for row in right.logprobs], abs=1e-3)
    assert undrafted["usage"]["speculation"]["drafted_tokens"] == 0
    assert undrafted["choices"][0]["token_ids"] == plain.tokens
    assert text_of(echoed["choices"][0]) == ("" if chat else PROMPT) + offline.text(plain)
