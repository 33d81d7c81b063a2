"""Clients that stop reading hold nobody up, and not for ever."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack

import psutil

from tests.actors.http.local_server import body, run, serving, until

READERS, TOKENS = 100, 1500
"""With 20 log probabilities a token, an answer has some 2 MB."""


def request(host: str) -> bytes:
    asked = body(max_tokens=TOKENS, stream=True, logprobs=20, n=1, ignore_eos=True)
    data = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_a_hundred_clients_that_stop_reading_hold_nobody_up() -> None:
    """The ranks finish all answers, in memory that is bounded, and a client that reads is answered
    meanwhile; those that read nothing for a second are closed."""

    async def work() -> None:
        sizes = {"max_slots": 8, "max_model_len": 2000, "num_pages": 3000, "max_queue": 200}
        async with serving(**sizes, serve={"reader_timeout_s": 1.0}) as (client, driver, endpoints):
            url = client.base_url
            with ExitStack() as sockets:
                readers = []
                for _ in range(READERS):
                    one = sockets.enter_context(socket.socket())
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    one.connect((url.host, url.port))
                    one.sendall(request(url.host))
                    readers.append(one)
                await until(lambda: driver.stats()["requests_submitted"] >= READERS, 30)
                before = psutil.Process().memory_info().rss
                started_s = time.monotonic()
                got = await client.post("/v1/completions", json=body(priority=-1))
                assert got.status_code == 200
                assert time.monotonic() - started_s < 10
                await until(lambda: driver.stats()["active"] + driver.stats()["queued"] == 0, 60)
                assert driver.stats()["requests_finished"] >= READERS
                assert psutil.Process().memory_info().rss - before < 1 << 30
                await until(lambda: endpoints.drain() == 0, 20)
                ends = await asyncio.to_thread(lambda: [read_all(one)[-8:] for one in readers[:3]])
                assert all(b"[DONE]" not in end for end in ends)

    run(work, limit_s=150)


def read_all(one: socket.socket) -> bytes:
    one.settimeout(20)
    data = b""
    while piece := one.recv(1 << 16):
        data += piece
    return data
