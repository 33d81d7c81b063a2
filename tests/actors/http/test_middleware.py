"""The API key and the sizes of what a client may send."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
