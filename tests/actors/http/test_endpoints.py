"""HTTP over a driver whose ranks are threads: admission, keys, limits, disconnects, and bodies.

A real server (uvicorn, a port from the OS) with tokens known in advance: what a client sees of
every refusal, and what the driver sees of a client that goes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.http.bodies import ApiError, ChatBody, CompletionBody, parse
from outrider.actors.http.endpoints import Endpoints
from outrider.model.text import Tokenizer
from tests.actors.conftest import VOCAB, Counting, ThreadRanks, limits
from tests.actors.driver.test_driver import answer

TINY = Path(__file__).parents[3] / "examples" / "tiny"
KEY = "sk-correct"


@asynccontextmanager
async def serving(
    *, step_s: float = 0.0, keys: tuple[str, ...] = (), serve: dict | None = None, **changes: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Driver, Endpoints]]:
    ranks = ThreadRanks([Counting(step_s=step_s)])
    tokenizer = Tokenizer(TINY)
    driver = Driver(limits(**{"vocab_size": VOCAB, **changes}), ranks, load_text=lambda: tokenizer)
    await driver.start()
    endpoints = Endpoints(
        driver,
        tokenizer,
        serve=ServeSpec(**(serve or {})),
        model="tiny",
        about=lambda: {"ranks": []},
        keys=[hashlib.sha256(key.encode()).digest() for key in keys],
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(endpoints.app, log_level="error", lifespan="off"))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client, driver, endpoints
    finally:
        server.should_exit = True
        await task
        await driver.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": [1, 2], "max_tokens": 5, "return_token_ids": True, **changes}


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def events(client: httpx.AsyncClient, path: str, **what: Any) -> list[Any]:
    found = []
    async with client.stream("POST", path, json=what | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_prompts_times_n_are_answered_in_order() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            got = await client.post(
                "/v1/completions", json=body(prompt=[[7], [100, 200]], n=2, max_tokens=4)
            )
            assert got.status_code == 200
            choices = got.json()["choices"]
            assert [c["index"] for c in choices] == [0, 1, 2, 3]
            expected = [answer([7], 4)] * 2 + [answer([200], 4)] * 2
            assert [c["token_ids"] for c in choices] == expected
            assert [c["finish_reason"] for c in choices] == ["length"] * 4
            usage = got.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 16)

    run(work)


def test_a_stream_of_many_choices_joins_to_each_answer() -> None:
    async def work() -> None:
        async with serving(step_s=0.001) as (client, _, _):
            what = body(n=3, max_tokens=12, stream_options={"include_usage": True})
            *chunks, last, done = await events(client, "/v1/completions", **what)
            assert done == "[DONE]"
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 36
            assert last["usage"]["speculation"]["drafted_tokens"] > 0
            assert all(c["usage"] is None for c in chunks)
            tokens: dict[int, list[int]] = {}
            for chunk in chunks:
                (choice,) = chunk["choices"]
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            assert tokens == {i: answer([2], 12) for i in range(3)}
            assert len(chunks) > 6

    run(work)


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    async def work() -> None:
        changes = {"max_slots": 1, "max_queue": 2, "max_model_len": 200}
        async with serving(step_s=0.005, **changes) as (client, driver, _):
            long = body(max_tokens=150)
            calls = [
                asyncio.ensure_future(client.post("/v1/completions", json=long)) for _ in range(3)
            ]
            await until(lambda: driver.stats()["queued"] == 2)
            refused = await client.post("/v1/completions", json=long)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "limits.max_queue = 2" in error["message"]
            assert [r.status_code for r in await asyncio.gather(*calls)] == [200] * 3
            assert (await client.post("/v1/completions", json=body())).status_code == 200

    run(work)


def test_who_waits_too_long_gets_429_and_leaves_the_queue() -> None:
    async def work() -> None:
        changes = {"serve": {"queue_timeout_s": 0.15}, "max_slots": 1, "max_model_len": 300}
        async with serving(step_s=0.005, num_pages=90, **changes) as (client, driver, _):
            first = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=250)))
            await until(lambda: driver.stats()["active"] == 1)
            late = await client.post("/v1/completions", json=body(stream=True))
            assert late.status_code == 429
            assert late.json()["error"]["code"] == "queue_timeout"
            assert driver.stats()["queued"] == 0
            assert (await first).status_code == 200

    run(work)


def test_draining_refuses_new_requests_and_finishes_the_others() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_model_len=200) as (client, driver, endpoints):
            open_one = asyncio.ensure_future(
                client.post("/v1/completions", json=body(max_tokens=100))
            )
            await until(lambda: driver.stats()["active"] == 1)
            endpoints.drain()
            refused = await client.post("/v1/completions", json=body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (await client.get("/health")).status_code == 503
            done = await open_one
            assert done.json()["choices"][0]["token_ids"] == answer([2], 100)

    run(work)


def test_a_dead_engine_is_503_and_ends_streams_with_its_reason() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_model_len=200, num_pages=90) as (client, driver, _):
            ranks: Any = driver._ranks
            stream = asyncio.ensure_future(
                events(client, "/v1/completions", **body(max_tokens=150))
            )
            unary = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=150)))
            await until(lambda: driver.stats()["active"] == 2)
            ranks.runners[0].error = RuntimeError("the card is on fire")
            last = (await stream)[-1]
            assert last["error"]["code"] == "engine_dead"
            assert "the card is on fire" in last["error"]["message"]
            assert (await unary).status_code == 503
            late = await client.post("/v1/completions", json=body())
            assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "dead")

    run(work)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_request_while_others_go_on(stream: bool) -> None:
    async def work() -> None:
        changes = {"max_model_len": 2000, "num_pages": 800}
        async with serving(step_s=0.005, **changes) as (client, driver, _):
            other = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=200)))
            what = body(max_tokens=1900, n=2, stream=stream)
            call = asyncio.ensure_future(client.post("/v1/completions", json=what))
            await until(lambda: driver.stats()["active"] == 3)
            call.cancel()
            await until(lambda: driver.stats()["requests_aborted"] == 2, limit_s=0.5)
            assert (await other).json()["choices"][0]["token_ids"] == answer([2], 200)
            await until(lambda: driver.stats()["active"] == 0)
            assert driver.stats()["free_pages"] == 799

    run(work)


def test_a_client_that_goes_while_it_waits_leaves_the_queue() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_slots=1, max_model_len=200) as (client, driver, _):
            first = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=100)))
            await until(lambda: driver.stats()["active"] == 1)
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body()))
            await until(lambda: driver.stats()["queued"] == 1)
            waiting.cancel()
            await until(lambda: driver.stats()["queued"] == 0, limit_s=0.5)
            assert (await first).status_code == 200

    run(work)


def test_a_slow_reader_does_not_stall_others() -> None:
    """It reads nothing of an answer larger than the sockets' buffers until the others are done."""

    async def work() -> None:
        changes = {"max_model_len": 30_000, "num_pages": 12_000}
        async with serving(**changes) as (client, driver, _):
            slow = client.stream(
                "POST", "/v1/completions", json=body(max_tokens=20_000, n=2, stream=True)
            )
            async with slow as response:
                for i in range(5):
                    fast = await client.post(
                        "/v1/completions", json=body(prompt=[i], max_tokens=50)
                    )
                    assert fast.json()["choices"][0]["token_ids"] == answer([i], 50)
                await until(lambda: driver.stats()["active"] == 0, limit_s=30)
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"

    run(work)


def test_keys_are_asked_for_everywhere_but_in_health() -> None:
    async def work() -> None:
        async with serving(keys=("sk-other", KEY)) as (client, _, _):
            right = {"authorization": f"Bearer {KEY}"}
            for wrong in ({}, {"authorization": KEY}, {"authorization": "Bearer sk-wrong"}):
                for path in ("/v1/models", "/metrics", "/v1/stats"):
                    refused = await client.get(path, headers=wrong)
                    assert refused.status_code == 401
                    assert refused.json()["error"]["code"] == "invalid_api_key"
                refused = await client.post("/v1/completions", json=body(), headers=wrong)
                assert refused.status_code == 401
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json=body(), headers=right)).is_success
        async with serving() as (client, _, _):
            assert (await client.get("/v1/models")).is_success

    run(work)


def test_sizes_have_limits() -> None:
    async def work() -> None:
        serve = {"max_body_bytes": 2000, "max_choices": 4}
        async with serving(serve=serve) as (client, driver, _):

            async def parts() -> AsyncIterator[bytes]:  # no content-length
                for _ in range(30):
                    yield b" " * 100

            for content in (b" " * 2001, parts()):
                large = await client.post("/v1/completions", content=content)
                assert large.status_code == 413
                assert "serve.max_body_bytes = 2000" in large.json()["error"]["message"]
            for what in (body(n=5), body(prompt=[[1], [2]], n=3)):
                many = await client.post("/v1/completions", json=what)
                assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
            long = await client.post("/v1/completions", json=body(prompt=[1] * 70))
            assert long.status_code == 400
            assert "7 too many" in long.json()["error"]["message"]
            most = await client.post("/v1/completions", json=body(max_tokens=10**9))
            assert most.json()["usage"]["completion_tokens"] == 62
            assert most.json()["choices"][0]["finish_reason"] == "length"
            assert driver.stats()["active"] == 0

    run(work)


def test_metrics_count_what_was_answered() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            for _ in range(3):
                await client.post("/v1/completions", json=body())
            await client.post("/v1/completions", json=body(n=0))
            text = (await client.get("/metrics")).text
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            path = 'outrider_http_requests_total{path="/v1/completions",status='
            assert float(lines[path + '"200"}']) == 3
            assert float(lines[path + '"400"}']) == 1
            assert float(lines["outrider_generated_tokens_total"]) == 15
            assert float(lines["outrider_requests_finished_total"]) == 3
            assert float(lines["outrider_time_to_first_token_seconds_count"]) == 3
            assert float(lines["outrider_drafted_tokens_total"]) > 0

    run(work)


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
    ("completions", {"max_tokens": 0}, "max_tokens"),
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
    ("completions", {"logprobs": 1, "echo": True}, "logprobs"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"speculation": {"draft_tokens": 17}}, "speculation.draft_tokens"),
    ("completions", {"speculation": {"depth": 1}}, "speculation.depth"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    ("chat/completions", {"tools": []}, "tools"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
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


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **changes}


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


@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    changes=st.dictionaries(st.sampled_from(fields) | st.text(max_size=6), plausible, max_size=4),
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


def test_the_first_wrong_field_is_named_without_pydantics_own_words() -> None:
    for data, param in (
        (b'{"prompt": [[1, -2]]}', "prompt"),
        (b'{"prompt": "a", "stop": 5}', "stop"),
        (b'{"prompt": "a", "temprature": 1}', "temprature"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(CompletionBody, data)
        assert (caught.value.error["param"] or "").startswith(param)
        assert "[" not in (caught.value.error["param"] or "")
    with pytest.raises(ApiError, match="did you mean temperature"):
        parse(CompletionBody, b'{"prompt": "a", "temprature": 1}')
