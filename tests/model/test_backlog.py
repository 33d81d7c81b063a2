"""Iterations without drafts leave rows to the draft: later drafts are as if it had seen them.

The bundled checkpoint, whose draft was trained, in float32; whatever is kept depends on its KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from outrider.model import backlog
from outrider.model.batch import DecodeBatch
from outrider.model.executor import Drafter, MtpDrafter, RunPiece
from outrider.model.runner import Runner
from outrider.model.step import Sampling
from outrider.parallel.operands import GatheredSlots
from tests.graphs import record
from tests.model.test_npu_iterations import npu_team
from tests.ranks import Output, Team

K, ROWS = 3, 16
KEYS = {"draft_tokens": K, "num_pages": 200, "auto_depth": True}
DEPTHS = {
    "now and then": [K, 0, 0, 2, 0, 1, 1, 0, 0, 0, 0, 0, K, K],
    "long without": [K] + [0] * (ROWS + 5) + [2, K, K],
}


class EachRowAtOnce(MtpDrafter):
    """Runs its first pass in every iteration, drafts or not."""

    def propose(self, batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        if batch.num_drafts:
            return super().propose(batch, at, run)
        self._first_pass(batch, at)
        return batch.slots.new_empty(len(batch.slots), 0)

    def catch_up(self, batch: DecodeBatch, width: int) -> None:
        """Nothing is left to see."""


def requests(repo) -> list[tuple[list[int], Sampling]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 40, 19)
    prompts = [torch.randint(0, 500, (n,), generator=generator).tolist() for n in lengths]
    return [(p, Sampling(max_tokens=40 + n, ignore_eos=True)) for n, p in zip(lengths, prompts)]


def follow(runner: Runner, depths: Iterable[int]) -> None:
    """From now on each step runs at the next of `depths`, over and over."""
    step, ahead = runner.step, itertools.cycle(depths)

    def stepping() -> list:
        runner.limit_drafts(next(ahead))
        return step()

    runner.step = stepping  # type: ignore[method-assign]


def outputs(repo, team: Team, depths: list[int]) -> list[Output]:
    for runner in team.runners:
        follow(runner, depths)
    return team.generate(requests(repo), stagger=2)


def each_row_at_once(team: Team) -> Team:
    for runner in team.runners:
        old = runner.executor.drafter
        assert isinstance(old, MtpDrafter)
        runner.use_drafter(EachRowAtOnce(old.draft, old.head, old.slots))
    return team


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(backlog, "ROWS", ROWS)


@pytest.fixture(scope="module")
def expected(repo):
    """What a draft that sees each row at once leads to: tokens, and rows kept by each iteration."""
    tiny, known = repo / "examples" / "tiny", {}
    for name, depths in DEPTHS.items():
        known[name] = outputs(repo, each_row_at_once(Team(tiny, **KEYS)), depths)
        assert len({kept for out in known[name] for kept in out.kept}) >= 3
        assert sum(out.accepted for out in known[name]) > 20
    return known


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("now and then", {}),
        ("long without", {}),
        ("now and then", {"tensor_parallel": 2, "draft_body": "sharded"}),
    ],
)
def test_later_drafts_are_the_same(repo, expected, name: str, keys: dict) -> None:
    team = Team(repo / "examples" / "tiny", **KEYS, **keys)
    widths: list[int] = []
    for runner in team.runners:
        note(runner.executor.drafter, widths)
    assert outputs(repo, team, DEPTHS[name]) == expected[name]
    assert max(widths) == (ROWS if name == "long without" else 8)


def note(drafter: Drafter | None, widths: list[int]) -> None:
    """Write down how many rows the draft catches up with."""
    assert drafter is not None
    known = drafter.catch_up

    def noting(batch: DecodeBatch, width: int) -> None:
        widths.append(width)
        known(batch, width)

    drafter.catch_up = noting  # type: ignore[method-assign]


def test_captured_iterations_owe_and_catch_up_alike(repo, expected) -> None:
    """Recorded graphs: depth 0 is a graph of its own, and catching up happens between replays."""
    team = Team(repo / "examples" / "tiny", **KEYS)
    (keys,) = [record(runner) for runner in team.runners]
    assert outputs(repo, team, DEPTHS["now and then"]) == expected["now and then"]
    assert {key[1] for key in keys() if key[0] != "prefill"} == {0, 1, 2, K}


def test_a_device_with_host_lengths_and_graphs_does_the_same(repo, monkeypatch) -> None:
    tiny, keys = repo / "examples" / "tiny", {**KEYS, "page_tokens": 128, "num_pages": 16}
    depths = DEPTHS["now and then"]
    got = outputs(repo, npu_team(tiny, monkeypatch, **keys), depths)
    monkeypatch.undo()
    assert got == outputs(repo, each_row_at_once(Team(tiny, **keys)), depths)
