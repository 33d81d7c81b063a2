"""Engines on one host: no two are pinned to the same CPUs; a group divides the memory evenly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.actors.cluster import shares
from outrider.actors.cluster.placement import engines_that_fit
from outrider.actors.cluster.reader import load_spec
from outrider.actors.cluster.shares import HostShare, claim_share
from outrider.actors.cluster.spec import Spec
from outrider.parallel import affinity

HOLDER = """
import sys, time
from pathlib import Path
from outrider.actors.cluster.reader import load_spec
from outrider.actors.cluster.shares import claim_share
from outrider.parallel import affinity
affinity.allowed_cpus = lambda: frozenset(range(8))
share = claim_share(load_spec(None, {"model": "m"}), "g", 4, Path(sys.argv[1]))
print(affinity.format_cpus(share.cpus), flush=True)
time.sleep(600)
"""
"""A process with one of four shares of eight CPUs, which it prints."""


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostShare]:
    """`claim_share` on a machine of eight CPUs and 1,000 bytes, 100 fewer with each claim."""
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: frozenset(range(8)))
    free = iter(range(1000, 0, -100))
    monkeypatch.setattr(shares, "free_host_bytes", lambda: next(free))

    def claim(group: str, engines: int = 1, **overrides: object) -> HostShare:
        return claim_share(made(**overrides), group, engines, tmp_path / "claims")

    return claim


def made(**overrides: object) -> Spec:
    return load_spec(None, {"model": "m", **overrides})


def test_replicas_divide_cpus_and_memory_evenly(claim: Callable[..., HostShare]) -> None:
    one, other, late = (claim("server", 2) for _ in range(3))
    assert (one.cpus, other.cpus) == ({0, 1, 2, 3}, {4, 5, 6, 7})
    assert one.memory_bytes == other.memory_bytes == 500
    assert made().rank_cpu_sets(frozenset(range(8)), other.cpus) == ({4, 5}, {6, 7})
    assert late.cpus == frozenset()
    assert made().rank_cpu_sets(frozenset(range(8)), late.cpus) == (None, None)


def test_a_share_that_is_given_back_is_taken_again(claim: Callable[..., HostShare]) -> None:
    one, other = claim("server", 2), claim("server", 2)
    one.release()
    assert claim("server", 2).cpus == one.cpus
    other.release()
    assert claim("server", 2).cpus == other.cpus


def test_an_engine_keeps_off_the_cpus_of_others(claim: Callable[..., HostShare]) -> None:
    replica = claim("server", 2)
    second = claim("a script")
    assert (len(replica.cpus), second.cpus) == (4, frozenset())
    assert second.memory_bytes == 900  # what was free when it started
    replica.release()
    assert claim("another").cpus == frozenset(range(8))


def test_engines_with_ranges_of_their_own_or_none_claim_no_cpus(
    claim: Callable[..., HostShare],
) -> None:
    assert claim("a", rank_cpus=["0-1", "2-3"]).cpus == frozenset()
    assert claim("b", rank_cpus=None).cpus == frozenset()
    assert claim("c").cpus == frozenset(range(8))


def test_more_engines_than_cpus_are_not_pinned(claim: Callable[..., HostShare]) -> None:
    assert claim("server", 9).cpus == frozenset()


def test_a_claim_ends_with_its_process_and_simultaneous_ones_differ(
    tmp_path: Path, repo: Path, claim: Callable[..., HostShare]
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "claims")]
    holders = [
        subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    try:
        taken = [holder.stdout.readline().strip() for holder in holders if holder.stdout]
        assert sorted(taken) == ["0-1", "2-3", "4-5", "6-7"]
        assert claim("g", 4).cpus == frozenset()
        holders[2].kill()
        holders[2].wait()
        assert affinity.format_cpus(claim("g", 4).cpus) == taken[2]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_node_holds_as_many_engines_as_its_resources_allow() -> None:
    spec = made(tensor_parallel=2)  # three CPUs an engine
    assert engines_that_fit(spec, 4, {"CPU": 64}) == 4
    assert engines_that_fit(spec, 4, {"CPU": 6}) == 2
    gpus = made(tensor_parallel=4, device="cuda")
    assert engines_that_fit(gpus, 4, {"CPU": 64, "GPU": 8}) == 2
    assert engines_that_fit(gpus, 4, {"CPU": 64}) == 1
