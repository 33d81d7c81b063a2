"""The API key and the sizes of what a client may send."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from outrider.actors.cluster.haproxy_start import INSTANCE_HEADER
from tests.actors.http.local_server import body, run, serving

KEY = "sk-correct"


def test_keys_are_asked_for_everywhere_but_in_health() -> None:
    async def work() -> None:
        async with serving(keys=("sk-other", KEY)) as (client, _, _):
            for scheme in ("Bearer", "bearer", "BEARER", "bEaReR "):
                right = {"authorization": f"{scheme} {KEY}"}
                assert (await client.get("/v1/models", headers=right)).is_success
            for header in ("", KEY, "Bearer", "Bearer sk-wrong", f"Basic {KEY}", f"Bearer{KEY}"):
                wrong = {"authorization": header} if header else {}
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


def test_a_body_that_does_not_come_is_408() -> None:
    async def work() -> None:
        async with serving(serve={"request_timeout_s": 0.3}) as (client, _, _):

            async def never() -> AsyncIterator[bytes]:
                yield b'{"prompt": '
                await asyncio.sleep(20)

            got = await client.post("/v1/completions", content=never())
            assert got.status_code == 408
            assert "serve.request_timeout_s = 0.3 s" in got.json()["error"]["message"]
            slow = await client.post("/v1/completions", json=body(max_tokens=50))
            assert slow.status_code == 200  # the time of an answer does not count

    run(work)


def test_what_another_servers_proxy_sends_is_503() -> None:
    async def work() -> None:
        async with serving() as (client, _, endpoints):
            own = {INSTANCE_HEADER: "ours"}
            guarded: Any = endpoints.app
            guarded._instance = "ours"
            for headers, status in ((own, 200), ({}, 503), ({INSTANCE_HEADER: "other"}, 503)):
                got = await client.get("/v1/models", headers=headers)
                assert got.status_code == status
            assert (got.json()["error"]["code"], got.headers["retry-after"]) == ("unavailable", "1")

    run(work)


def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it() -> None:
    """openai's code, and the words by which litellm and others know it."""

    async def work() -> None:
        async with serving() as (client, _, _):
            said = [{"role": "user", "content": "word " * 300}]
            for path, what in (
                ("completions", {"prompt": [1] * 70}), ("completions", {"prompt": "word " * 300}),
                ("chat/completions", {"messages": said}),
            ):  # fmt: skip
                got = await client.post(f"/v1/{path}", json=what)
                error = got.json()["error"]
                assert (got.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "maximum context length is 64 tokens" in error["message"]
        async with serving(num_pages=5) as (client, _, _):
            error = (await client.post("/v1/completions", json=body(prompt=[1] * 60))).json()[
                "error"
            ]
            assert error["code"] == "context_length_exceeded"
            assert "cache.num_pages" in error["message"]

    run(work)


def test_a_compressed_body_is_415_and_a_byte_order_mark_is_no_part_of_one() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            data = json.dumps(body()).encode()
            for coding in ("gzip", "br", "deflate, gzip"):
                headers = {"content-encoding": coding}
                got = await client.post(
                    "/v1/completions", content=gzip.compress(data), headers=headers
                )
                assert got.status_code == 415
                assert coding in got.json()["error"]["message"]
            plain = {"content-encoding": "identity"}
            for content in (data, codecs.BOM_UTF8 + data):
                got = await client.post("/v1/completions", content=content, headers=plain)
                assert got.status_code == 200, got.text

    run(work)


def test_head_and_trailing_slashes_answer() -> None:
    async def work() -> None:
        async with serving(keys=(KEY,)) as (client, _, _):
            key = {"authorization": f"Bearer {KEY}"}
            for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/stats"):
                for method in ("GET", "HEAD"):
                    for end in ("", "/"):
                        got = await client.request(method, path + end, headers=key)
                        assert got.status_code == 200, (method, path + end)
                        assert bool(got.content) == (method == "GET")
            assert (await client.head("/health/")).status_code == 200
            assert (await client.head("/metrics/")).status_code == 401
            for path in ("/v1/completions/", "/v1/completions//"):
                got = await client.post(path, json=body(), headers=key)
                assert got.status_code == 200
            assert (await client.post("/health", headers=key)).status_code == 405
            assert (await client.get("/nowhere", headers=key)).status_code == 404

    run(work)


def test_the_api_describes_itself_unless_there_are_keys() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            told = (await client.get("/openapi.json")).json()
            assert "/docs" in (page := await client.get("/docs")).url.path
            assert "swagger" in page.text
        schemas = told["components"]["schemas"]
        for path, name in (
            ("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody"),
            ("/v1/responses", "ResponsesBody"), ("/v1/messages", "MessagesBody"),
            ("/v1/responses/input_tokens", "ResponsesBody"),
            ("/v1/messages/count_tokens", "CountTokensBody"), ("/tokenize", "TokenizeBody"),
            ("/detokenize", "DetokenizeBody"),
        ):  # fmt: skip
            content = told["paths"][path]["post"]["requestBody"]["content"]
            assert content["application/json"]["schema"]["$ref"].endswith("/" + name)
            assert "model" in schemas[name]["properties"]
        assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(told))) <= schemas.keys()
        assert set(told["paths"]["/health"]) == {"get"}
        async with serving(keys=(KEY,)) as (client, _, _):
            for path in ("/openapi.json", "/docs"):
                assert (await client.get(path)).status_code == 401
                key = {"authorization": f"Bearer {KEY}"}
                assert (await client.get(path, headers=key)).status_code == 404
        async with serving(keys=(KEY,), serve={"docs": True}) as (client, _, _):
            assert (await client.get("/openapi.json")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
        async with serving(serve={"docs": False}) as (client, _, _):
            assert (await client.get("/docs")).status_code == 404

    run(work)
