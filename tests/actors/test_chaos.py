"""A seeded part of `make chaos`: faults strike real ranks, and no request notices.

The kinds of faults that differ to the driver, once each, at moments that the seed draws, under
traffic of every kind of request.
"""

from __future__ import annotations

import pytest

from tests.chaos import FAULTS, KINDS, run
from tests.conftest import RunningCluster

pytestmark = pytest.mark.ray


def test_faults_at_any_moment_cost_no_request_anything(cluster: RunningCluster) -> None:
    faults = ("killed", "stopped", "memory overwritten")
    assert set(faults) < set(FAULTS)
    found = run(seed=4, num_faults=4, faults=faults, moments=("answer", "prompt"))
    assert found["faults_injected"] == 4
    assert found["requests_in_slots_at_faults"] > 0
    assert set(found["by_kind"]) <= set(KINDS)
    assert (found["lost"], found["duplicated"], found["wrong"]) == (0, 0, 0), found["examples"]
    first, last = found["held_at_first"], found["held_at_last"]
    for what in ("rank_processes", "pages_held", "slots_held", "queued", "shared_memory_files"):
        assert first[what] == last[what], what
    assert last["driver_fds"] <= first["driver_fds"] + 8
    assert last["driver_rss_mb"] < first["driver_rss_mb"] + 50, "has it imported torch?"
