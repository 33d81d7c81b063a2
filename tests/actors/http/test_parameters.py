"""Every parameter of the API gives the answer of an engine that is asked for the same directly.

    body -> Endpoints -> Driver -> RankLoop -> Runner with drafts      Runner without drafts
The bundled checkpoint, its ranks as a thread of this process. tests/actors/test_serve.py compares
the same cases over Ray Serve.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.assembly import limits_of
from outrider.actors.driver.driver import Driver
from outrider.actors.http.bodies import CompletionBody
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.endpoints import Endpoints
from outrider.model.step import Sampling
from outrider.model.text import Tokenizer
from tests.actors.cluster.test_spec import made
from tests.actors.conftest import ThreadRanks
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
async def server(folder: Path = TINY, **changes: Any) -> AsyncIterator[Ask]:
    """(path, fields) -> the answer of a server whose drafts are on; asserts that it is a 200.

    A path without fields is asked for with GET. changes: of the engine.
    """
    (runner,) = Team(folder, draft_tokens=K, **ENGINE, **changes).runners
    runner.hang = threading.Event()  # type: ignore[attr-defined] # what ThreadRanks stops by
    run, model, tokenizer = runner.run, runner.model, Tokenizer(folder)
    bounds = limits_of(made(model=str(folder)), model, run)
    driver = Driver(bounds, lambda: ThreadRanks([runner]), load_text=lambda: tokenizer)  # type: ignore
    await driver.start()
    endpoints = Endpoints(driver, tokenizer, serve=ServeSpec(), model="tiny", about=dict)
    transport = httpx.ASGITransport(app=endpoints.app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:

            async def ask(path: str, **fields: Any) -> dict[str, Any]:
                given = {"max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
                method, body = ("POST", given) if fields else ("GET", None)
                got = await client.request(method, f"/v1/{path}", json=body, timeout=60)
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


def tiny_with(folder: Path, generation: dict[str, Any] | None) -> Path:
    """The bundled checkpoint with another generation_config.json, or without one."""
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_chat_ends_at_the_tokenizers_end_without_a_generation_config(
    tmp_path: Path, offline: Offline
) -> None:
    """config.json names the end of a text alone. The answer to "x" ends in <|im_end|> by itself."""
    (end,) = offline.tokenizer.encode("<|im_end|>")
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 100}

    async def answers() -> list[dict[str, Any]]:
        async with server(tiny_with(tmp_path, None)) as ask:
            return [await ask("chat/completions", **asked, ignore_eos=on) for on in (False, True)]

    (ended,), (went_on,) = (got["choices"] for got in asyncio.run(answers()))
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"].index(end) == len(ended["token_ids"]) - 1 > 20
    assert went_on["token_ids"][: len(ended["token_ids"])] == ended["token_ids"]
    assert len(went_on["token_ids"]) == 100


def test_what_a_request_leaves_open_is_as_generation_config_says(
    tmp_path: Path, offline: Offline
) -> None:
    """Each field for itself; a field that the request gives wins, and null is not given."""
    model = {"do_sample": True, "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    _, fields, prompt = given(False, offline)
    hows = {name: value for name, value in model.items() if name != "do_sample"}
    asked: list[dict[str, Any]] = [
        {"seed": 3, "temperature": None},
        {"seed": 3, "temperature": 1.4},
        {"seed": 3, "top_k": 0, "temperature": 1.4},
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1},
    ]
    rights = offline(prompt, [hows | {k: v for k, v in a.items() if v is not None} for a in asked])
    assert len({tuple(right.tokens) for right in rights}) == len(asked), "a field changes nothing"

    async def answers() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with server(tiny_with(tmp_path, model)) as ask:
            (card,) = (await ask("models"))["data"]
            return card, [await ask("completions", **fields, **one) for one in asked]

    card, answered = asyncio.run(answers())
    assert card["generation_defaults"] == {"top_p": 1.0, "min_p": 0.0, **hows}
    for got, right in zip(answered, rights, strict=True):
        assert got["choices"][0]["token_ids"] == right.tokens
