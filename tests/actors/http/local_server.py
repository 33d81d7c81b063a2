"""A real HTTP server (uvicorn) over a driver whose ranks are threads, and what its tests share.

The answers of `Counting` ranks are known in advance: the last prompt token + 1, + 2, ...
`TinyServer` has the bundled checkpoint instead, and an event loop of its own, for clients that
wait.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn

from outrider.actors.cluster.spec import RecoverySpec, ServeSpec
from outrider.actors.driver.assembly import limits_of
from outrider.actors.driver.driver import Driver
from outrider.actors.driver.scheduler import Limits
from outrider.actors.http.endpoints import Endpoints
from outrider.model.text import Tokenizer
from tests.actors.cluster.test_spec import made
from tests.actors.conftest import VOCAB, Counting, ThreadRanks, limits
from tests.ranks import Team
from tests.test_end_to_end import TINY

ENGINE: dict[str, Any] = {"max_slots": 4, "max_model_len": 1024, "num_pages": 400}
"""Of a TinyServer."""


@asynccontextmanager
async def serving(
    *,
    step_s: float = 0.0,
    chunk: int = 8,
    keys: tuple[str, ...] = (),
    serve: dict[str, Any] | None = None,
    runner: Counting | None = None,
    folder: Path = TINY,
    send_bytes: int | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Driver, Endpoints]]:
    ranks = ThreadRanks([runner or Counting(chunk=chunk, step_s=step_s)])
    bounds = limits(**{"vocab_size": VOCAB, **changes})
    async with (
        listening(ranks, bounds, keys, serve or {}, folder, send_bytes) as (
            url,
            driver,
            endpoints,
        ),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client, driver, endpoints


@asynccontextmanager
async def listening(
    ranks: ThreadRanks,
    bounds: Limits,
    keys: Sequence[str],
    serve: Mapping[str, Any],
    folder: Path = TINY,
    send_bytes: int | None = None,
) -> AsyncIterator[tuple[str, Driver, Endpoints]]:
    """A server over these ranks -> its address, its driver, its endpoints. folder: of the tokenizer
    and the chat template. send_bytes: what the system holds for a client that does not read."""
    tokenizer = Tokenizer(folder)
    once = RecoverySpec(max_losses=0)
    driver = Driver(bounds, lambda: ranks, recovery=once, load_text=lambda: tokenizer)
    await driver.start()
    endpoints = Endpoints(
        driver,
        tokenizer,
        serve=ServeSpec(**serve),
        model="tiny",
        about=lambda: {"ranks": [], "slots": bounds.max_slots, "draft_tokens": bounds.draft_tokens},
        keys=[hashlib.sha256(key.encode()).digest() for key in keys],
    )
    listener = socket.create_server(("127.0.0.1", 0))
    # The sockets it accepts inherit this. asyncio sets it on its own listeners alone; without it an
    # answer waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    server = uvicorn.Server(uvicorn.Config(endpoints.app, log_level="error", lifespan="off"))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url, driver, endpoints
    finally:
        server.should_exit = True
        await task
        endpoints.close()
        await driver.close()


class TinyServer:
    """The bundled checkpoint with drafts on, behind HTTP, in a thread."""

    def __init__(
        self,
        *,
        keys: Sequence[str] = (),
        runner: Counting | None = None,
        folder: Path = TINY,
        **serve: Any,
    ) -> None:
        """keys: of the API. runner: what answers instead of the checkpoint. folder: as `listening`.
        serve: keys of cluster.yaml's section."""
        self._keys, self._serve = keys, serve
        self._runner, self._folder = runner, folder
        self.root = ""
        self.driver: Any = None
        self.endpoints: Any = None
        self._loop = asyncio.new_event_loop()
        self._ready, self._ending = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        runner: Any = self._runner
        if runner is None:
            (runner,) = Team(TINY, draft_tokens=3, **ENGINE).runners
            runner.hang = threading.Event()  # what ThreadRanks stops by
            bounds = limits_of(made(model=str(TINY)), runner.model, runner.run)
        else:
            bounds = limits(vocab_size=4096, eos_ids=(2,), **ENGINE)
        ranks = ThreadRanks([runner])
        async with listening(ranks, bounds, self._keys, self._serve, self._folder) as opened:
            self.root, self.driver, self.endpoints = opened
            self._ready.set()
            await self._ending.wait()

    def call(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have the server's event loop call this soon."""
        self._loop.call_soon_threadsafe(functools.partial(work, *args, **kwargs))

    def close(self) -> None:
        self.call(self._ending.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()


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
