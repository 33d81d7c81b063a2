"""Web pages of other origins: which of them browsers let call the server and read its answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.actors.http.chromium import Chromium
from tests.actors.http.local_server import TinyServer, body, chat, run, serving

PAGE, OTHER, KEY = "https://app.example.com", "https://other.example.com", "sk-correct"
ALLOWED = "access-control-allow-origin"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
    "access-control-request-private-network": "true",
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")


def test_preflights_of_named_origins_are_answered_without_a_key() -> None:
    async def work() -> None:
        serve = {"cors_origins": (PAGE, "http://localhost:3000")}
        async with serving(keys=(KEY,), serve=serve) as (client, _, _):
            for path in PATHS:
                got = await client.options(path, headers=PREFLIGHT)
                assert got.status_code == 200, got.text
                assert got.headers[ALLOWED] == PAGE
                assert "POST" in got.headers["access-control-allow-methods"]
                asked = PREFLIGHT["access-control-request-headers"]
                assert got.headers["access-control-allow-headers"] == asked
                assert got.headers["access-control-allow-private-network"] == "true"
                assert "Origin" in got.headers["vary"]
                assert "access-control-allow-credentials" not in got.headers
                refused = await client.options(path, headers=PREFLIGHT | {"origin": OTHER})
                assert refused.status_code == 400
                assert ALLOWED not in refused.headers
            delete = PREFLIGHT | {"access-control-request-method": "DELETE"}
            assert (await client.options(PATHS[0], headers=delete)).status_code == 400

    run(work)


def test_every_kind_of_answer_can_be_read_by_a_named_origin_alone() -> None:
    async def work() -> None:
        key = {"authorization": f"Bearer {KEY}"}
        serve: dict[str, Any] = {"cors_origins": (PAGE,)}
        async with serving(keys=(KEY,), serve=serve) as (client, _, endpoints):
            kinds = [
                (200, "POST", "/v1/completions", body(), key),
                (200, "POST", "/v1/completions", body(stream=True), key),
                (200, "POST", "/v1/chat/completions", chat(stream=True), key),
                (400, "POST", "/v1/completions", body(nonsense=1), key),
                (401, "POST", "/v1/completions", body(), {}),
                (404, "GET", "/nowhere", None, key),
                (405, "POST", "/health", None, key),
                (413, "POST", "/v1/completions", b" " * (5 << 20), key),
                (200, "GET", "/v1/stats", None, key),
            ]
            for draining in (False, True):
                for status, method, path, what, headers in kinds:
                    how = {"content": what} if isinstance(what, bytes) else {"json": what}
                    for origin in (PAGE, OTHER, None):
                        sent = headers | ({"origin": origin} if origin else {})
                        got = await client.request(method, path, headers=sent, **how)
                        if not draining:
                            assert got.status_code == status, (path, got.text)
                        allowed = got.headers.get(ALLOWED)
                        assert allowed == (PAGE if origin == PAGE else None)
                        assert "Origin" in got.headers["vary"]
                endpoints.drain()
            late = await client.post("/v1/completions", json=body(), headers=key | {"origin": PAGE})
            assert (late.status_code, late.headers[ALLOWED]) == (503, PAGE)
            assert late.headers["retry-after"]
            assert "retry-after" in late.headers["access-control-expose-headers"]

    run(work)


def test_all_origins_or_none() -> None:
    async def work() -> None:
        async with serving(serve={"cors_origins": "*"}) as (client, _, _):
            for origin in (PAGE, "null"):
                preflight = await client.options(PATHS[0], headers=PREFLIGHT | {"origin": origin})
                assert (preflight.status_code, preflight.headers[ALLOWED]) == (200, "*")
                got = await client.post(PATHS[0], json=body(), headers={"origin": origin})
                assert (got.status_code, got.headers[ALLOWED]) == (200, "*")
        async with serving() as (client, _, _):
            assert (await client.options(PATHS[0], headers=PREFLIGHT)).status_code == 405
            got = await client.post(PATHS[0], json=body(), headers={"origin": PAGE})
            assert got.status_code == 200
            assert not any(name.startswith("access-control") for name in got.headers)

    run(work)


@contextmanager
def page_of_another_origin() -> Iterator[str]:
    """The address of a page that is empty; another port is another origin."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()


ASK = """(async (url, key, body) => {
  const headers = {"content-type": "application/json", authorization: `Bearer ${key}`};
  try {
    const got = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
    const pieces = [], reader = got.body.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read())
      pieces.push(new TextDecoder().decode(part.value));
    return {status: got.status, pieces: pieces.length, text: pieces.join("")};
  } catch (error) { return {refused: error.name}; }
})"""


def test_in_a_browser_a_page_of_another_origin_streams_where_it_is_named(
    browser: Chromium,
) -> None:
    with (
        page_of_another_origin() as named,
        page_of_another_origin() as other,
        closing(TinyServer(keys=[KEY], cors_origins=(named,))) as server,
    ):
        url = server.root + "/v1/chat/completions"

        def ask(page: str, key: str, **changes: Any) -> dict[str, Any]:
            what = chat(max_tokens=40, stream=True, temperature=0, **changes)
            given = ", ".join(map(json.dumps, (url, key, what)))
            return browser.open(page + "/").evaluate(f"{ASK}({given})")

        got = ask(named, KEY)
        assert got["status"] == 200
        assert got["text"].endswith("data: [DONE]\n\n")
        assert got["pieces"] > 3, "it came as one piece"
        assert ask(named, "sk-wrong")["status"] == 401
        assert "nonsense" in ask(named, KEY, nonsense=1)["text"]
        assert ask(other, KEY) == {"refused": "TypeError"}
