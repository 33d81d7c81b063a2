"""Clients that stop reading hold nobody up, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import psutil

from tests.actors.http.local_server import body, run, serving, until

READERS = 100


@contextlib.contextmanager
def stopped_reader(url: httpx.URL, max_tokens: int) -> Iterator[socket.socket]:
    """A client that has asked for a stream and reads none of it."""
    data = json.dumps(body(max_tokens=max_tokens, stream=True, ignore_eos=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((url.host, url.port))
        one.sendall(head.encode() + data)
        yield one


def test_a_hundred_clients_that_stop_reading_hold_nobody_up() -> None:
    """The ranks finish all answers, in memory that is bounded, and a client that reads is answered
    meanwhile."""

    async def work() -> None:
        sizes: dict[str, Any] = {"max_slots": 8, "max_model_len": 2000, "num_pages": 3000}
        async with serving(**sizes, max_queue=200, send_bytes=4096) as (client, driver, _):
            readers = [stopped_reader(client.base_url, 1500) for _ in range(READERS)]
            for one in readers:
                one.__enter__()
            await until(lambda: driver.stats()["requests_submitted"] >= READERS, 30)
            before = psutil.Process().memory_info().rss
            started_s = time.monotonic()
            got = await client.post("/v1/completions", json=body(priority=-1))
            assert got.status_code == 200
            assert time.monotonic() - started_s < 10
            await until(lambda: driver.stats()["active"] + driver.stats()["queued"] == 0, 60)
            assert driver.stats()["requests_finished"] >= READERS
            assert psutil.Process().memory_info().rss - before < 256 << 20
            for one in readers:
                one.__exit__(None, None, None)

    run(work, limit_s=150)


def test_a_client_that_reads_nothing_for_long_is_closed() -> None:
    """Its answer is larger than what the system and the server hold for a client, 64 KiB each."""

    async def work() -> None:
        sizes: dict[str, Any] = {"max_slots": 2, "max_model_len": 45_000, "num_pages": 6000}
        how: dict[str, Any] = {"serve": {"reader_timeout_s": 1.0}, "send_bytes": 4096}
        async with serving(**sizes, **how) as (client, driver, endpoints):
            with stopped_reader(client.base_url, 40_000) as one:
                await until(lambda: driver.stats()["requests_submitted"] == 1)
                await until(lambda: driver.stats()["active"] == 0, 60)
                with contextlib.suppress(TimeoutError):
                    await until(lambda: endpoints.drain() == 0, 10)
                assert endpoints.drain() == 0
                assert b"[DONE]" not in await asyncio.to_thread(read_all, one)

    run(work, limit_s=100)


def read_all(one: socket.socket) -> bytes:
    one.settimeout(20)
    data = b""
    while piece := one.recv(1 << 16):
        data += piece
    return data
