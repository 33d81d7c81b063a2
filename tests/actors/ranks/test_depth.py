"""The automatic depth: the best one runs, it follows changes, and no depth is off for good."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.actors.ranks.depth import MIN_PROBE_STEPS, Depth
from outrider.model.step import Progress
from tests.actors.conftest import Counting, ThreadRanks
from tests.actors.driver.test_driver import answer, ask, driving, run


def live(
    depth: Depth,
    steps: int,
    *,
    chance: float,
    draft_s: float,
    slots: int = 1,
    seed: int = 0,
    limit: int = 5,
    end_every: int = 10**9,
) -> tuple[Counter[int], float, float]:
    """Steps in a world where a pass takes 1 s and each draft draft_s (5 % noise).

    No request takes more than `limit` drafts, and every `end_every` steps all are near their ends:
    then an iteration makes one draft at most, whatever was chosen.
    -> how often each depth ran, tokens and seconds in all.
    """
    dice, ran, tokens, seconds = random.Random(seed), Counter[int](), 0.0, 0.0
    for step in range(1, steps + 1):
        k = depth.choose(limit)
        assert k <= limit
        k = k if step % end_every else min(k, 1)
        ran[k] += 1
        progress = []
        for slot in range(slots):
            kept = next((i for i in range(k) if dice.random() > chance), k)
            progress.append(Progress(0, slot, [1] * (kept + 1), drafted=k, accepted=kept))
            tokens += kept + 1
        step_s = (
            (1.0 + draft_s * k) * dice.uniform(0.95, 1.05) * (20 if dice.random() < 0.005 else 1)
        )
        depth.note(step_s, progress, k)
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
    live(depth, 12 * MIN_PROBE_STEPS, chance=0.95, draft_s=0.1, seed=1)
    ran, _, _ = live(depth, 400, chance=0.95, draft_s=0.1, seed=2)
    assert ran[5] + ran[4] > 300
    ran, _, _ = live(depth, 400, chance=0.0, draft_s=0.1, seed=3)
    assert ran[0] > 250


def test_clients_that_cap_their_drafts_get_the_best_depth_below_the_cap():
    """Few drafts are kept, so 0 is best; then the cap goes, and drafts have become good."""
    depth = Depth(5)
    live(depth, 400, chance=0.067, draft_s=0.2, limit=2)
    ran, _, _ = live(depth, 2640, chance=0.067, draft_s=0.2, limit=2, seed=1)
    assert ran[0] >= 0.9 * 2640, ran
    assert set(ran) == {0, 1, 2}
    live(depth, 12 * MIN_PROBE_STEPS, chance=0.95, draft_s=0.1, seed=2)
    ran, _, _ = live(depth, 400, chance=0.95, draft_s=0.1, seed=3)
    assert ran[5] + ran[4] > 300, ran


def test_a_cap_that_comes_and_goes_keeps_both_depths():
    depth = Depth(5)
    live(depth, 400, chance=0.95, draft_s=0.1)
    for seed in range(5):
        ran, _, _ = live(depth, 100, chance=0.95, draft_s=0.1, limit=2, seed=seed)
        assert ran[2] > 80, ran
        ran, _, _ = live(depth, 100, chance=0.95, draft_s=0.1, seed=seed)
        assert ran[5] > 80, ran


def test_a_step_counts_for_the_depth_that_ran_not_for_the_one_chosen():
    """Near their ends requests take fewer drafts; such steps are short and bring fewer tokens."""
    depth = Depth(5)
    live(depth, 400, chance=0.95, draft_s=0.4, end_every=3)
    for k in range(6):
        seconds = depth._seconds[1, k]
        assert seconds == pytest.approx(1.0 + 0.4 * k, rel=0.05), k


@pytest.mark.parametrize(("chance", "best"), [(0.0, 0), (0.95, 3)])
def test_a_depth_that_never_runs_is_no_reason_to_choose_it_for_ever(chance: float, best: int):
    """Answers so short that only their first iteration, which no step counts, could take more."""
    depth, dice = Depth(5), random.Random(3)
    ran = Counter[int]()
    for step in range(3000):
        k = min(depth.choose(5), 3)
        kept = next((i for i in range(k) if dice.random() > chance), k)
        depth.note(1.0 + 0.1 * k, [Progress(0, 0, [1], drafted=k, accepted=kept)], k)
        if step >= 200:
            ran[k] += 1
    assert ran[best] > 0.9 * 2800, ran
    live(depth, 12 * MIN_PROBE_STEPS, chance=0.95, draft_s=0.1, seed=1)
    ran, _, _ = live(depth, 400, chance=0.95, draft_s=0.1, seed=2)
    assert ran[5] + ran[4] > 300, ran


@pytest.mark.parametrize(("chance", "best"), [(0.0, {0}), (0.95, {4, 5})])
def test_it_settles_in_batches_whose_size_changes_with_every_step(chance: float, best: set[int]):
    depth, ran = Depth(5), Counter[int]()
    for i in range(1500):
        part, _, _ = live(depth, 1, chance=chance, draft_s=0.1, slots=(3, 7, 1)[i % 3], seed=i)
        if i >= 300:
            ran += part
    assert sum(ran[k] for k in best) > 0.9 * 1200, ran


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
