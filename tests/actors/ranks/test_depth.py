"""The automatic depth: the best one runs, it follows changes, and no depth is off for good."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.actors.ranks.depth import PROBE_EVERY, Depth
from outrider.model.step import Progress
from tests.actors.conftest import Counting, ThreadRanks
from tests.actors.driver.test_driver import answer, ask, driving, run


def live(
    depth: Depth, steps: int, *, chance: float, draft_s: float, slots: int = 1, seed: int = 0
) -> tuple[Counter[int], float, float]:
    """Steps in a world where a pass takes 1 s and each draft draft_s (5 % noise).

    -> how often each depth ran, tokens and seconds in all.
    """
    dice, ran, tokens, seconds = random.Random(seed), Counter[int](), 0.0, 0.0
    for _ in range(steps):
        k = depth.choose()
        ran[k] += 1
        progress = []
        for slot in range(slots):
            kept = next((i for i in range(k) if dice.random() > chance), k)
            progress.append(Progress(0, slot, [1] * (kept + 1), drafted=k, accepted=kept))
            tokens += kept + 1
        step_s = (
            (1.0 + draft_s * k) * dice.uniform(0.95, 1.05) * (20 if dice.random() < 0.005 else 1)
        )
        depth.note(step_s, progress)
        seconds += min(step_s, 3.0)
    return ran, tokens, seconds


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    ("chance", "draft_s", "best"),
    [(0.0, 0.2, {0}), (0.95, 0.1, {5}), (0.95, 2.0, {0}), (0.6, 0.25, {1, 2}), (1.0, 0.3, {5})],
)
def test_the_depth_that_pays_most_runs(chance: float, draft_s: float, best: set[int], slots: int):
    depth = Depth(5)
    live(depth, 400, chance=chance, draft_s=draft_s, slots=slots)
    ran, _, _ = live(depth, 2000, chance=chance, draft_s=draft_s, slots=slots, seed=1)
    assert sum(ran[k] for k in best) >= 0.9 * 2000, ran
    ran, _, _ = live(depth, 8000, chance=chance, draft_s=draft_s, slots=slots, seed=2)
    assert set(ran) == set(range(6)), "some depth is off for good"


def test_without_acceptance_it_costs_next_to_nothing():
    depth = Depth(5)
    live(depth, 400, chance=0.0, draft_s=0.2)
    _, tokens, seconds = live(depth, 3000, chance=0.0, draft_s=0.2, seed=1)
    assert tokens / seconds > 0.97  # of the 1 token a second that depth 0 yields


def test_it_notices_that_drafts_have_become_good_or_bad():
    depth = Depth(5)
    live(depth, 1000, chance=0.0, draft_s=0.1)
    assert depth.depth == 0
    live(depth, 12 * PROBE_EVERY, chance=0.95, draft_s=0.1, seed=1)
    ran, _, _ = live(depth, 400, chance=0.95, draft_s=0.1, seed=2)
    assert ran[5] + ran[4] > 300
    ran, _, _ = live(depth, 400, chance=0.0, draft_s=0.1, seed=3)
    assert ran[0] > 250


def test_requests_that_want_fewer_drafts_do_not_count_as_a_depths_time():
    depth = Depth(3)
    for _ in range(50):
        depth.choose()
        depth.note(1.0, [Progress(0, 0, [1], drafted=0, accepted=0)])
    assert depth.choose() == 3  # nothing is known of it yet


def test_all_ranks_run_the_leaders_depth_and_tokens_stay():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.001), Counting(step_s=0.002)], depth=Depth(3))
        async with driving(ranks, max_model_len=2000, num_pages=900) as (driver, _):
            handles = [driver.submit(ask([i], max_tokens=600)) for i in range(3)]
            for i, handle in enumerate(handles):
                assert (await handle.result()).token_ids == answer([i], 600)
            depths = {event.depth for event in ranks.events}
            assert depths == {0, 1, 2, 3}
            assert driver.stats()["draft_depth"] in depths

    run(work)
