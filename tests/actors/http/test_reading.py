"""Large bodies are read in a process of their own, which may end and which ends with ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from outrider.actors.http.bodies import ApiError, BodyLimits, CompletionBody
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.reading import SMALL_BODY_BYTES, BodyReader

LIMITS = BodyLimits(max_choices=8, max_prompt_tokens=4000)
LARGE = json.dumps({"prompt": "a" * 2 * SMALL_BODY_BYTES, "n": 3, "stop": "x"}).encode()


def reader_process(reader: BodyReader) -> psutil.Process:
    (pid,) = reader._pool._processes
    return psutil.Process(pid)


def test_large_bodies_read_as_small_ones_do() -> None:
    async def work() -> None:
        reader = BodyReader(LIMITS)
        try:
            small = await reader.read(CompletionBody, b'{"prompt": "a"}')
            assert small.prompt == ["a"]
            assert not reader._pool._processes
            large = await reader.read(CompletionBody, LARGE)
            assert (len(large.prompt[0]), large.n, large.stops) == (2 * SMALL_BODY_BYTES, 3, ("x",))
            assert len(reader._pool._processes) == 1
            padding = b" " * SMALL_BODY_BYTES
            for data, why in (
                (b'{"prompt": [' + b"1," * 5000 + b"1]}", "the prompt has 5001 tokens"),
                (b'{"prompt": "a", "bets_of": 2}' + padding, "bets_of: not supported"),
                (b"{" + padding, "the body: Invalid JSON"),
            ):
                with pytest.raises(ApiError, match=why):
                    await reader.read(CompletionBody, data)
            said = [{"role": "user", "content": "a" * SMALL_BODY_BYTES}]
            chat = await reader.read(ChatBody, json.dumps({"messages": said}).encode())
            assert chat.conversation() == said
        finally:
            reader.close()

    asyncio.run(work())


def test_a_killed_process_is_an_error_and_the_next_body_is_read() -> None:
    async def work() -> None:
        reader = BodyReader(LIMITS)
        try:
            await reader.read(CompletionBody, LARGE)
            reader_process(reader).kill()
            with pytest.raises(ApiError) as caught:
                await reader.read(CompletionBody, LARGE)
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
            assert (await reader.read(CompletionBody, LARGE)).n == 3
        finally:
            reader.close()

    asyncio.run(work())


OWNER = """
import asyncio, sys, time
from tests.actors.http.test_reading import LARGE, LIMITS, BodyReader, CompletionBody, reader_process

if __name__ == "__main__":
    reader = BodyReader(LIMITS)
    asyncio.run(reader.read(CompletionBody, LARGE))
    print(reader_process(reader).pid, flush=True)
    time.sleep(60)
"""


def test_the_process_ends_with_one_that_is_killed() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_refused_bodies_leave_no_memory_behind() -> None:
    """The errors of one such body take 400 MB."""
    names = ",".join(f'"{i}":1' for i in range(330_000))
    data = f'{{"prompt": "a", {names}}}'.encode()
    assert len(data) < 4 << 20

    async def work() -> None:
        reader = BodyReader(LIMITS)
        try:
            await reader.read(CompletionBody, LARGE)
            process = reader_process(reader)
            before = process.memory_info().rss
            for _ in range(3):
                with pytest.raises(ApiError, match="and 329980 more"):
                    await reader.read(CompletionBody, data)
            assert process.memory_info().rss - before < 100 << 20
        finally:
            reader.close()

    asyncio.run(work())
