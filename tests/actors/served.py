"""A server over real HTTP on Ray Serve, and beside it the engine that says what is right."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
from ray import serve

from outrider.actors.driver.messages import Completion
from outrider.actors.engine import Engine, Sampling
from outrider.actors.server import APPLICATION
from tests.conftest import RunningCluster
from tests.test_end_to_end import TINY

SLOTS, QUEUE, K = 4, 28, 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Served:
    """`serve run` on the tests' cluster, and beside it an engine that says what is right.

    Its folder holds cluster.yaml, which describes the application, and modules with the names of
    what a replica imports; it must not import these.
    """

    def __init__(self, cluster: RunningCluster, tiny: Engine, folder: Path) -> None:
        self.offline = tiny
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        self.url = self.root + "/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", timeout=60, max_retries=0)
        (folder / "cluster.yaml").write_text(
            f"model: {TINY}\n"
            f"speculation: {{draft_tokens: {K}}}\n"
            f"limits: {{max_queue: {QUEUE}}}\n"
            f"serve: {{slots: {SLOTS}, queue_timeout_s: 120}}\n"
            "parallel: {rank_cpus: null}\n"  # left to the other engines on this host
        )
        for name in ("model", "tokenizers"):
            (folder / f"{name}.py").write_text("raise ImportError('of the current folder')\n")
        serve.start(http_options={"port": port})  # `serve run` would take 8000
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--name", APPLICATION]
        command += ["outrider.actors.serve:app"]
        path = os.pathsep.join((str(TINY.parents[1]), os.environ.get("PYTHONPATH", "")))
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log,
                env={**cluster.environ(), "PYTHONPATH": path.rstrip(os.pathsep)},
            )  # fmt: skip
        deadline_s = time.monotonic() + 120
        while not self._answers():
            failed = self.process.poll() is not None or time.monotonic() > deadline_s
            if failed:
                self.close()
            assert not failed, (folder / "log").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        return httpx.get(self.root + "/health", timeout=60).status_code == 200

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.client.close()
        serve.shutdown()

    def right(self, prompt: Any, **how: Any) -> Completion:
        (answer,) = self.offline.generate(prompt, Sampling(**how, draft_tokens=0))
        assert answer.stats.drafted == 0
        return answer

    def stats(self) -> dict[str, Any]:
        return httpx.get(self.root + "/v1/stats").json()

    def settle(self, limit_s: float = 10.0) -> dict[str, Any]:
        """Stats once nothing is under way; asserts that everything came back."""
        deadline = time.monotonic() + limit_s
        while (stats := self.stats())["active"] or stats["queued"]:
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
        assert stats["free_pages"] == stats["num_pages"] - 1
        return stats


async def one_client(
    http: httpx.AsyncClient, number: int, body: dict[str, Any], leave_after: int | None
) -> tuple[int, str, str | None]:
    """Streams one request; -> its number, the text and its end, None where the client left."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        finish, events = None, 0
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
            events += 1
            if events == leave_after:
                return number, text, None
    return number, text, finish
