"""Every behaviour that was given up gives the tokens of the one that replaced it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.model import ablation
from outrider.model.config import Ablation
from outrider.model.gdn import GatedDeltaNet
from outrider.model.step import Sampling
from outrider.parallel.device import Device
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.ranks import Output, Team, serve

NUM_NEW = 20
OLD = {
    "sync_each_draft": (Device, "synchronise"),
    "merge_then_split": (ablation.PackedProjections, "_repack"),
    "greedy_probabilities": (ablation.ProbabilityCheck, "__call__"),
    "gather_logits": (ablation.GatheredHead, "greedy"),
    "no_graph": (ablation, "replace"),
}
"""Each key, and a function that runs because of it."""
PROMPTS = [[(7 * i + n) % 159 for i in range(n)] for n in (9, 33, 2)]


@pytest.fixture(scope="module")
def folder(varied: Checkpoint) -> Path:
    """Every layer matters, and now and then a draft is right."""
    return varied.folder


def answers(folder: Path, old: Ablation, size: int = 2, sampled: bool = False) -> list[Output]:
    team = Team(folder, tensor_parallel=size, draft_tokens=3, ablation=old)
    how = Sampling(max_tokens=NUM_NEW, ignore_eos=True)
    warm = Sampling(max_tokens=NUM_NEW, ignore_eos=True, temperature=0.9, seed=5)
    return team.generate([(p, warm if sampled and i else how) for i, p in enumerate(PROMPTS)])


@pytest.fixture(scope="module")
def new(folder: Path) -> list[Output]:
    outs = answers(folder, Ablation())
    assert all(len(set(out.tokens)) >= NUM_NEW // 2 for out in outs)
    assert len({kept for out in outs for kept in out.kept}) >= 3
    return outs


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    real: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def counting(*args: Any, **how: Any) -> Any:
        calls.append(1)
        return real(*args, **how)

    monkeypatch.setattr(owner, name, counting)
    return calls


@pytest.mark.parametrize("key", OLD)
def test_the_old_behaviour_runs_and_gives_the_same_tokens(
    key: str, folder: Path, new: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, *OLD[key])
    old = answers(folder, Ablation(**{key: True}))
    assert calls
    assert old == new
    assert sum(out.drafted for out in old) > 50


@pytest.mark.parametrize("size", [1, 2])
def test_all_old_behaviours_together_give_the_same_tokens(folder: Path, size: int) -> None:
    everything = Ablation(**dict.fromkeys(OLD, True))
    for sampled in (False, True):
        old = answers(folder, everything, size, sampled)
        assert old == answers(folder, Ablation(), size, sampled)
        assert all(out.drafted for out in old)


@pytest.mark.parametrize("key", OLD)
def test_nothing_old_runs_by_default(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, *OLD[key])
    outs = answers(folder, Ablation(), size=1)
    assert sum(out.drafted for out in outs) > 50
    assert not calls


def test_packed_projections_are_those_of_the_merged_matrix(folder: Path) -> None:
    mixer = Team(folder).runners[0].executor.target.layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet)
    x = torch.randn(2, 3, 64)
    packed = ablation.PackedProjections(mixer, open_device("cpu", 0, alone()))
    torch.testing.assert_close(packed(x), mixer.in_proj(x))


@pytest.mark.parametrize("key", OLD)
def test_right_drafts_are_accepted_and_wrong_ones_are_not(key: str, planted_tiny: Path) -> None:
    want = answers(planted_tiny, Ablation())
    assert answers(planted_tiny, Ablation(**{key: True})) == want
    assert 20 < sum(out.accepted for out in want) < sum(out.drafted for out in want)


def test_drafts_of_sampled_requests_may_be_the_likeliest_tokens(folder: Path) -> None:
    """The text does not depend on the drafts; how many of them are kept does."""
    coupled = answers(folder, Ablation(), sampled=True)
    likeliest = answers(folder, Ablation(argmax_drafts=True), sampled=True)
    assert [out.tokens for out in likeliest] == [out.tokens for out in coupled]
    assert [out.kept for out in likeliest] != [out.kept for out in coupled]


def test_the_device_is_awaited_once_a_draft_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, Device, "synchronise")
    team = Team(folder, draft_tokens=3, ablation=Ablation(sync_each_draft=True), pin_rows=True)
    (out,) = team.generate([(PROMPTS[0], Sampling(max_tokens=NUM_NEW, ignore_eos=True))])
    assert len(calls) == 3 * out.iterations


def test_probabilities_of_all_ids_are_kept_for_the_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    check = ablation.ProbabilityCheck.__call__

    def watching(self: Any, drafts: Tensor, targets: Tensor) -> Tensor:
        seen.append(
            (drafts.shape[1], len(self.draft.probabilities), *self.target.probabilities[-1].shape)
        )
        assert torch.allclose(self.target.probabilities[-1].sum(-1), torch.ones(()))
        return check(self, drafts, targets)

    monkeypatch.setattr(ablation.ProbabilityCheck, "__call__", watching)
    team = Team(folder, draft_tokens=3, ablation=Ablation(greedy_probabilities=True))
    team.generate([(PROMPTS[0], Sampling(max_tokens=NUM_NEW, ignore_eos=True))])
    assert (3, 3, 4, 160) in seen


def test_an_iteration_in_pieces_is_captured_pass_by_pass(folder: Path) -> None:
    """What a piece reads of another must lie where the other's replay writes it."""
    how = [(p, Sampling(max_tokens=NUM_NEW, ignore_eos=True)) for p in PROMPTS[:1]]
    want = Team(folder, draft_tokens=3).generate(how)
    team = Team(folder, draft_tokens=3, ablation=Ablation(sync_each_draft=True))
    (runner,) = team.runners
    captured = record(runner)
    assert serve(runner, how) == want
    pieces = [key for key in captured() if key[0] != "prefill"]
    assert pieces == [(1, 3, name) for name in ("gather_slots", 0, 1, 2, "drafts", "verify")]
