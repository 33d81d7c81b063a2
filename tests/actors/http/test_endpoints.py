"""HTTP over a driver whose ranks are threads: admission, keys, limits, disconnects, and bodies.

A real server (uvicorn, a port from the OS) with tokens known in advance: what a client sees of
every refusal, and what the driver sees of a client that goes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.actors.driver.test_driver import answer
from tests.actors.http.local_server import body, chat, events, run, serving, until


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
            assert len(chunks) > 3

    run(work)


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    async def work() -> None:
        changes: dict[str, Any] = {"max_slots": 1, "max_queue": 2, "max_model_len": 200}
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
        changes: dict[str, Any] = {
            "serve": {"queue_timeout_s": 0.15},
            "max_slots": 1,
            "max_model_len": 300,
        }
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
        changes: dict[str, Any] = {"serve": {"drain_timeout_s": 7.5}, "max_model_len": 200}
        async with serving(step_s=0.005, **changes) as (client, driver, endpoints):
            open_one = asyncio.ensure_future(
                client.post("/v1/completions", json=body(max_tokens=100))
            )
            stream = asyncio.ensure_future(
                events(client, "/v1/completions", **body(max_tokens=100))
            )
            await until(lambda: driver.stats()["active"] == 2)
            assert endpoints.drain() == 2
            for path, what in (("completions", body()), ("chat/completions", chat(stream=True))):
                refused = await client.post(f"/v1/{path}", json=what)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert refused.headers["retry-after"] == "8"
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            done = await open_one
            assert done.json()["choices"][0]["token_ids"] == answer([2], 100)
            assert (await stream)[-1] == "[DONE]"
            assert endpoints.drain() == 0

    run(work)


def test_what_drains_too_long_ends_with_an_error_that_says_so() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_model_len=2000, num_pages=800) as served:
            client, driver, endpoints = served
            what = body(max_tokens=1900)
            unary = asyncio.ensure_future(client.post("/v1/completions", json=what))
            stream = asyncio.ensure_future(events(client, "/v1/completions", **what))
            await until(lambda: driver.stats()["active"] == 2)
            assert endpoints.drain(cut=True) == 2
            got = await unary
            told = await stream
            assert (got.status_code, told[-1]) == (503, "[DONE]")
            last = told[-2]
            for error in (got.json()["error"], last["error"]):
                assert error["code"] == "draining"
                assert "serve.drain_timeout_s = 60 s" in error["message"]
            assert endpoints.drain() == driver.stats()["active"] == 0

    run(work)


def test_a_dead_engine_is_503_and_ends_streams_with_its_reason() -> None:
    async def work() -> None:
        async with serving(step_s=0.005, max_model_len=200, num_pages=90) as (client, driver, _):
            ranks: Any = driver.ranks
            stream = asyncio.ensure_future(
                events(client, "/v1/completions", **body(max_tokens=150))
            )
            unary = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=150)))
            await until(lambda: driver.stats()["active"] == 2)
            ranks.runners[0].error = RuntimeError("the card is on fire")
            told = await stream
            assert told[-1] == "[DONE]"
            last = told[-2]
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
        changes: dict[str, Any] = {"max_model_len": 2000, "num_pages": 800}
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
        changes: dict[str, Any] = {"max_model_len": 30_000, "num_pages": 12_000}
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
