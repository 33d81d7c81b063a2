"""Serving over minutes: scaling, a thousand requests, the commands; run with --slow."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest
from ray import serve

from outrider.actors.serve import application, serving_spec
from tests.actors.served import Served, free_port, one_client
from tests.test_end_to_end import PROMPTS, TINY

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_load_brings_a_second_replica_that_answers_alike(served: Served) -> None:
    """serve.max_replicas over HTTP: one slot, more requests at once than it takes."""
    overrides = {
        "model": str(TINY), "tensor_parallel": 1, "serve.slots": 1, "max_queue": 40,
        "serve.max_replicas": 2, "queue_timeout_s": 120.0,
    }  # fmt: skip
    serve.run(application(serving_spec(None, overrides)), name="scaled", route_prefix="/scaled")
    body = {"prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0}
    right = served.right(PROMPTS[0], max_tokens=60).text
    enough, cpus = threading.Event(), {}

    def client(_: int) -> None:
        with httpx.Client(base_url=served.root + "/scaled", timeout=120) as http:
            while not enough.is_set():
                answer = http.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == right
                health = http.get("/health").json()
                cpus[health["driver"]["pid"]] = set(health["ranks"][0]["cpus"])

    try:
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(client, i) for i in range(8)]
            deadline = time.monotonic() + 200
            while len(cpus) < 2 and time.monotonic() < deadline:
                time.sleep(0.5)
            enough.set()
            for call in calls:
                call.result()
        one, other = cpus.values()
        assert not one & other or len(os.sched_getaffinity(0)) < 2
    finally:
        serve.delete("scaled")


@pytest.mark.timeout(600)
def test_a_thousand_requests_leave_nothing_behind(served: Served) -> None:
    """No page, slot, file or task; ten of each 25 stream, nine of them are left early."""
    dice = random.Random(0)
    bodies = [
        {"prompt": dice.choice(PROMPTS)[:80], "max_tokens": dice.randint(1, 12), "seed": i}
        for i in range(1000)
    ]

    async def some(bodies: list[dict[str, Any]]) -> None:
        async with httpx.AsyncClient(base_url=served.root, timeout=90) as http:
            calls: list[Any] = [http.post("/v1/completions", json=b) for b in bodies[10:]]
            calls += [one_client(http, i, b, i or None) for i, b in enumerate(bodies[:10])]
            answers = await asyncio.gather(*calls)
        assert {a.status_code for a in answers[:-10]} == {200}

    asyncio.run(some(bodies[:25]))
    pids = served.settle()["engine"]
    processes = [psutil.Process(p["pid"]) for p in (pids["driver"], *pids["ranks"])]
    before, files = served.settle(), [process.num_fds() for process in processes]
    for start in range(0, 1000, 25):
        asyncio.run(some(bodies[start : start + 25]))
    time.sleep(1.0)
    after = served.settle()
    assert after["requests_submitted"] - before["requests_submitted"] == 1000
    assert after["tasks"] <= before["tasks"] + 2
    for process, count in zip(processes, files, strict=True):
        assert process.num_fds() <= count + 8


def test_the_command_serves_behind_a_key_and_finishes_what_is_open(
    tmp_path: Path, repo: Path
) -> None:
    """`outrider serve` with HAProxy and its own cluster; SIGTERM while a stream is open."""
    keys, port = tmp_path / "keys", free_port()
    keys.write_text("sk-one\nsk-two\n")
    command = [sys.executable, "-m", "outrider.actors.cli", "serve", "--model", str(TINY)]
    command += ["--port", str(port), "--set", f"serve.api_key_file={keys}"]
    command += ["--set", "serve.slots=1", "--set", "speculation.draft_tokens=auto"]
    root = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, cwd=repo, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            says = [process.stderr.readline()]
            while "ready: " not in says[-1]:
                assert says[-1], "".join(says)
                says.append(process.stderr.readline())
            assert any("1 slot; single-slot speculation is active: 0 to 5" in line for line in says)
            assert httpx.get(root + "/health").json()["mode"] == "single-slot"
            assert httpx.get(root + "/v1/models").status_code == 401
            client = openai.OpenAI(base_url=root + "/v1", api_key="sk-two", timeout=60)
            how: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0}
            stream = client.completions.create(**how, max_tokens=600, stream=True)
            first = next(stream)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 15
            while (health := httpx.get(root + "/health")).status_code == 200:
                assert time.monotonic() < deadline
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            with pytest.raises(openai.InternalServerError) as refused:
                client.with_options(max_retries=0).completions.create(**how)
            assert refused.value.code == "draining"
            assert int(refused.value.response.headers["retry-after"]) >= 1
            chunks = [first, *stream]
            assert chunks[-1].choices[0].finish_reason in ("length", "stop")
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.timeout(300)
def test_a_replica_whose_ranks_are_lost_for_good_is_replaced(served: Served) -> None:
    """Its stream ends with the rank's own error, its health is red, and another one answers."""
    overrides = {"model": str(TINY), "tensor_parallel": 1, "max_losses": 0}
    serve.run(application(serving_spec(None, overrides)), name="mortal", route_prefix="/mortal")
    root, body = served.root + "/mortal", {"prompt": "a", "max_tokens": 3900, "ignore_eos": True}
    try:
        first = httpx.get(root + "/health").json()
        with httpx.stream("POST", root + "/v1/completions", json=body | {"stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert "choices" in next(lines)
            os.kill(first["ranks"][0]["pid"], signal.SIGKILL)
            *_, last, end = lines
        assert end == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert re.search(rf"rank 0 \(pid {first['ranks'][0]['pid']}\) died", error["message"])
        seen, deadline_s = set(), time.monotonic() + 100
        while True:
            health = httpx.get(root + "/health", timeout=60)
            seen.add(health.status_code)
            if health.status_code == 200 and health.json()["driver"] != first["driver"]:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert 503 in seen
        assert (
            httpx.post(root + "/v1/completions", json=body | {"max_tokens": 5}).status_code == 200
        )
    finally:
        serve.delete("mortal")
