"""A server over real HTTP on Ray Serve, and beside it the engine that says what is right."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import openai
from ray import serve

from outrider.actors.cluster.placement import start_private
from outrider.actors.driver.messages import Completion
from outrider.actors.engine import Engine, Sampling
from outrider.actors.serve import serving, serving_spec
from tests.test_end_to_end import TINY

SLOTS, QUEUE, K = 4, 28, 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Served:
    """A server and, on the same cluster, an engine without drafts that says what is right."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.callback(
            start_private(num_cpus=12, namespace="outrider", object_store_bytes=100 << 20).close
        )
        self._stack.callback(serve.shutdown)
        overrides = {
            "model": str(TINY), "draft_tokens": K, "serve.slots": SLOTS, "max_queue": QUEUE,
            "port": free_port(), "queue_timeout_s": 120.0,
            "rank_cpus": None,  # left to the other engines on this host
        }  # fmt: skip
        self.url = self._stack.enter_context(serving(serving_spec(None, overrides)))
        self.root = self.url.removesuffix("/v1")
        self.client = openai.OpenAI(base_url=self.url, api_key="none", timeout=60, max_retries=0)
        self.offline = self._stack.enter_context(
            Engine.from_config(
                None, model=str(TINY), draft_tokens=0, max_slots=SLOTS, rank_cpus=None
            )
        )

    def close(self) -> None:
        self.client.close()
        self._stack.close()

    def right(self, prompt: Any, **how: Any) -> Completion:
        (answer,) = self.offline.generate(prompt, Sampling(**how))
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
