"""What clients of a server see while lost ranks are replaced."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx2 as httpx
import pytest

from tests.actors.served import Served
from tests.test_end_to_end import PROMPTS

pytestmark = pytest.mark.ray


def test_a_killed_rank_interrupts_a_stream_and_changes_nothing_of_it(served: Served) -> None:
    """The client sees a pause; usage and text are those of an undisturbed request."""
    how: dict[str, Any] = {
        "model": "tiny", "prompt": PROMPTS[1], "max_tokens": 300, "temperature": 0.8, "seed": 3,
        "stream": True, "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    right = list(served.client.completions.create(**how))
    before = served.stats()
    stream = served.client.completions.create(**how)
    found = [next(stream) for _ in range(5)]
    os.kill(before["engine"]["ranks"][1]["pid"], signal.SIGKILL)
    while (health := httpx.get(served.root + "/health")).json()["status"] == "ok":
        time.sleep(0.01)
    assert (health.status_code, health.json()["status"]) == (200, "recovering")
    found += stream
    for pieces in (found, right):
        assert len("".join(c.choices[0].text for c in pieces if c.choices)) > 300
    text, wanted = ("".join(c.choices[0].text for c in p if c.choices) for p in (found, right))
    assert text == wanted
    usages = [pieces[-1].usage.model_dump() for pieces in (found, right)]
    for usage in usages:
        del usage["prompt_tokens_details"]  # the cache went with the ranks
    assert usages[0] == usages[1]
    after = served.settle()
    assert (after["recoveries"], after["requests_failed"]) == (before["recoveries"] + 1, 0)
    assert {rank["pid"] for rank in after["engine"]["ranks"]}.isdisjoint(
        rank["pid"] for rank in before["engine"]["ranks"]
    )
    assert "outrider_recoveries_total 1.0" in httpx.get(served.root + "/metrics").text
