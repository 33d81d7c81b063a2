"""What is not a number makes no tokens: it stops the rank, wherever it comes from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from outrider.model.runner import Runner
from outrider.model.step import Join, NumbersError, Sampling
from tests.ranks import Team, serve

TINY = Path(__file__).parents[2] / "examples" / "tiny"
SAMPLINGS = {
    "greedy": Sampling(max_tokens=30),
    "sampled": Sampling(max_tokens=30, temperature=0.9, seed=4, logprobs=1),
}


@pytest.fixture
def team() -> Team:
    return Team(TINY, dtype="float32", draft_tokens=3)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_broken_weights_make_no_first_token(team: Team, kind: str) -> None:
    (runner,) = team.runners
    assert len(serve(runner, [([1, 2, 3], SAMPLINGS[kind])])[0].tokens) == 30
    with torch.inference_mode():
        runner.executor.target.layers[0].input_layernorm.scale[:] = float("nan")
    with pytest.raises(NumbersError, match="not numbers"):
        serve(runner, [([1, 2, 3], SAMPLINGS[kind])])


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_broken_cache_of_one_request_makes_no_later_token(
    team: Team, kind: str, slot: int
) -> None:
    """Every token that came before is that of an undisturbed run."""
    (runner,) = team.runners
    whole = serve(runner, [([5, 6], SAMPLINGS[kind])])[0].tokens
    runner.apply([_join(number, SAMPLINGS[kind]) for number in range(2)])
    found: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(4):
        for progress in runner.step():
            found[progress.slot] += progress.tokens
    _spoil(runner, slot)
    later = None
    with suppress(NumbersError):
        later = runner.step()
    assert later is None, "what is not a number made tokens"
    for tokens in found.values():
        assert 4 <= len(tokens) < 30
        assert tokens == whole[: len(tokens)]


def _join(number: int, sampling: Sampling) -> Join:
    pages = list(range(1 + 10 * number, 11 + 10 * number))
    return Join(slot=number, request=number, tokens=[5, 6], pages=pages, sampling=sampling)


def _spoil(runner: Runner, slot: int) -> None:
    """The delta-net states of one slot."""
    with torch.inference_mode():
        for tensor in runner.executor.states.tensors():
            if tensor.is_floating_point():
                tensor[:, slot] = float("nan")
