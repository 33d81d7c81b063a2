"""A real HTTP server (uvicorn) over a driver whose ranks are threads, and what its tests share.

The answers of `Counting` ranks are known in advance: the last prompt token + 1, + 2, ...
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
import uvicorn

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.http.endpoints import Endpoints
from outrider.model.text import Tokenizer
from tests.actors.conftest import VOCAB, Counting, ThreadRanks, limits
from tests.test_end_to_end import TINY


@asynccontextmanager
async def serving(
    *,
    step_s: float = 0.0,
    chunk: int = 8,
    keys: tuple[str, ...] = (),
    serve: dict[str, Any] | None = None,
    runner: Counting | None = None,
    folder: Path = TINY,
    **changes: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Driver, Endpoints]]:
    ranks = ThreadRanks([runner or Counting(chunk=chunk, step_s=step_s)])
    tokenizer = Tokenizer(folder)
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
    # The sockets it accepts inherit this. asyncio sets it on its own listeners alone; without it an
    # answer waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    server = uvicorn.Server(uvicorn.Config(endpoints.app, log_level="error", lifespan="off"))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client, driver, endpoints
    finally:
        server.should_exit = True
        await task
        endpoints.close()
        await driver.close()


def run(work: Callable[[], Awaitable[None]], limit_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
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


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **changes}
