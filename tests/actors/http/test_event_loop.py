"""No body holds the event loop: /health answers, and streams go on, whatever a client sends.

The bodies come from a process of their own, so that only the server's work counts here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.actors.http.local_server import body, run, serving

LIMIT_S = 0.1
"""Longest wait for /health on a quiet machine."""
NOISE = 10
"""On a busy machine: so many times the longest pause of an idle process at the same time."""
IDLE = """
import select, sys, time

longest, before = 0.0, time.perf_counter()
while not select.select([sys.stdin], [], [], 0.005)[0]:
    now = time.perf_counter()
    longest, before = max(longest, now - before), now
print(longest)
"""
"""Does nothing until its input ends, then prints its longest pause in seconds."""
SENDER = """
import sys, threading, urllib.error, urllib.request

def send():
    request = urllib.request.Request(sys.argv[1], data, {"content-type": "application/json"})
    try:
        status = urllib.request.urlopen(request, timeout=100).status
    except urllib.error.HTTPError as refusal:
        status = refusal.code
    sys.stdout.write(f"{status}\\n")

data = sys.stdin.buffer.read()
for _ in range(int(sys.argv[2])):
    threading.Thread(target=send).start()
"""
"""Sends its input as a body, so many times at once, and prints the statuses."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WORDS = "the quick brown fox 12 "


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def chat_of(content: Any, messages: int = 1) -> bytes:
    return as_json(messages=[{"role": "user", "content": content}] * messages)


LOADS: tuple[tuple[str, int, str, bytes, set[int]], ...] = (
    ("texts: too many", 30, COMPLETIONS, as_json(prompt=["a" * 19_999] * 200), {400}),
    ("texts: too long", 4, COMPLETIONS, as_json(prompt="a " * 2_000_000), {400}),
    ("texts to encode", 3, COMPLETIONS, as_json(prompt=WORDS * 20_000), {400}),
    ("a chat to encode", 3, CHATS, chat_of(WORDS * 20_000), {400}),
    ("ids to check", 3, COMPLETIONS, as_json(prompt=[[5] * 30_000] * 8), {200}),
    ("choices of ids", 1, COMPLETIONS, as_json(prompt=[5] * 60_000, n=32), {200}),
    ("ids to echo", 2, COMPLETIONS, as_json(prompt=[[9] * 60_000] * 4, echo=True), {200}),
    ("lists", 4, COMPLETIONS, as_json(prompt=[[]] * 100_000), {400}),
    ("names", 4, COMPLETIONS, as_json(**{f"x{i}": 1 for i in range(60_000)}), {400}),
    ("a long name", 4, COMPLETIONS, as_json(**{"promt" * 200_000: 1}), {400}),
    ("message parts", 4, CHATS, chat_of([{"type": "text", "text": "a"}] * 10_000, 2), {200}),
    ("small bodies", 30, COMPLETIONS, as_json(prompt=[[]] * 2_000), {400}),
)
"""(name, how many at once, path, body, statuses)"""


async def started(script: str, *words: str, stdin: Any = PIPE) -> Process:
    return await create_subprocess_exec(
        sys.executable, "-c", script, *words, stdin=stdin, stdout=PIPE
    )


async def longest_wait_s(client: httpx.AsyncClient, sender: Process) -> float:
    """Longest wait for /health until the sender ends, or 0 if this machine alone explains it."""
    idle, longest_s = await started(IDLE), 0.0
    ended = asyncio.ensure_future(sender.wait())
    while not ended.done():
        asked_s = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        longest_s = max(longest_s, time.perf_counter() - asked_s)
        await asyncio.sleep(0.005)
    pause_s = float((await idle.communicate(b""))[0])
    return longest_s if longest_s > max(LIMIT_S, NOISE * pause_s) else 0.0


@pytest.mark.timeout(300)
def test_health_answers_and_a_stream_goes_on_whatever_bodies_come(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_model_len": 70_000, "num_pages": 80_000, "max_slots": 8}

    async def work() -> None:
        async with serving(step_s=0.02, chunk=1 << 20, **changes) as (client, _, endpoints):
            endpoints.start()
            gc.freeze()  # as a replica does
            large = as_json(prompt=[5] * 9_000, max_tokens=1)
            assert (await client.post(COMPLETIONS, content=large)).status_code == 200
            endless = body(max_tokens=60_000, stream=True)
            async with client.stream("POST", COMPLETIONS, json=endless) as stream:
                lines, waits_s = stream.aiter_lines(), {}
                for name, count, path, data, statuses in LOADS:
                    (tmp_path / "body").write_bytes(data)
                    url = str(client.base_url.join(path))
                    for _ in range(2):  # once more where the machine had a hiccup
                        with (tmp_path / "body").open("rb") as file:
                            sender = await started(SENDER, url, str(count), stdin=file)
                            waits_s[name] = await longest_wait_s(client, sender)
                        got = [int(word) for word in (await sender.communicate())[0].split()]
                        assert (len(got), set(got)) == (count, statuses), name
                        if not waits_s[name]:
                            break
                    assert (await anext(lines)).startswith("data: ")
                    await anext(lines)
            assert {name: wait_s for name, wait_s in waits_s.items() if wait_s} == {}

    try:
        run(work, limit_s=290)
    finally:
        gc.unfreeze()
