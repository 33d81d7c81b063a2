"""Pages on demand and preemption, without ranks: who holds what, who leaves, and that all end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.driver.request import Request
from outrider.actors.driver.scheduler import Scheduler
from outrider.actors.errors import PromptTooLongError
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.step import Grow, Join, Progress, Sampling, StepEvent
from tests.actors.conftest import limits
from tests.paging import Ranks, answer_to

PAGE, DRAFTS = 16, 3
ROWS = DRAFTS + 1


def scheduler(**changes: Any) -> Scheduler:
    keys = {"page_tokens": PAGE, "draft_tokens": DRAFTS, "overshoot_rows": overshoot_rows(DRAFTS)}
    return Scheduler(limits(**{**keys, "max_model_len": 4096, **changes}))


def add(s: Scheduler, prompt: int, answer: int, priority: int = 0) -> Request:
    sampling = Sampling(max_tokens=answer, ignore_eos=True)
    asked = GenerationRequest(prompt=[1] * prompt, sampling=sampling, priority=priority)
    return s.add(asked, [1] * prompt)


def test_a_request_holds_pages_for_what_it_has_and_gets_more_as_it_goes_on() -> None:
    s = scheduler(num_pages=300)
    request = add(s, 100, 3000)
    (join,) = s.commands()
    assert isinstance(join, Join)
    assert pages_for(100 + ROWS, PAGE) <= len(join.pages) < 20
    held, text = len(join.pages), 100
    while text < 2000:
        s.apply(StepEvent(1, 0.0, [Progress(request=0, slot=0, tokens=[1] * ROWS)]))
        text += ROWS
        for command in s.commands():
            assert isinstance(command, Grow)
            assert (command.request, command.slot) == (0, 0)
            held += len(command.pages)
        assert text + 2 * ROWS <= held * PAGE <= text + 10 * PAGE
    assert not request.ended


def test_no_more_pages_are_given_than_a_request_can_ever_fill() -> None:
    s = scheduler(num_pages=300)
    add(s, 100, 20)
    (join,) = s.commands()
    assert isinstance(join, Join)
    assert len(join.pages) == pages_for(100 + 20 + overshoot_rows(DRAFTS), PAGE)


def test_slots_are_not_kept_empty_for_what_requests_might_say() -> None:
    """Full contexts for 4 of the 32 slots' requests, which use a sixteenth of it."""
    s = scheduler(max_slots=32, max_model_len=32_768, num_pages=4 * 2048)
    ranks = Ranks(s, random.Random(0))
    requests = [add(s, 1500, 30_000) for _ in range(32)]
    for _ in range(200):
        ranks.turn()
    assert ranks.most_together == s.num_running == 32
    assert s.num_preemptions == 0
    for request in requests:
        s.abort(request.number)
    ranks.run()


def test_eight_requests_in_a_pool_for_one_and_a_half_all_end() -> None:
    prompt, answer = 300, 900
    one = pages_for(prompt + answer + overshoot_rows(DRAFTS), PAGE)
    s = scheduler(max_slots=8, num_pages=1 + one + one // 2)
    ranks = Ranks(s, random.Random(1))
    requests = [add(s, prompt, answer) for _ in range(8)]
    ranks.run()
    assert all(r.emitted == answer_to([1] * prompt, answer) for r in requests)
    assert ranks.most_together > 1
    assert 0 < s.num_preemptions < 30, "requests take turns to suspend each other"


def test_the_youngest_of_the_least_urgent_leaves_first_and_comes_back_first() -> None:
    s = scheduler(max_slots=4, num_pages=91)
    old, middle, young = add(s, 250, 600, priority=1), add(s, 250, 600), add(s, 250, 600)
    ranks = Ranks(s, random.Random(2))
    suspended: list[Request] = []
    for _ in range(2000):
        ranks.turn()
        for request in (old, middle, young):
            if request.was_admitted and request.slot is None and not request.ended:
                suspended += [request] * (request not in suspended)
    assert suspended[:2] == [old, young]  # `old` is the least urgent
    assert all(r.finish == "length" for r in (old, middle, young))
    assert s.num_requests["finished"] == 3


def test_a_request_waits_while_those_that_run_would_take_its_pages_back() -> None:
    """Otherwise it would join, run its prompt, and be the next to be suspended."""
    wanted = pages_for(100 + 4 * ROWS + 64, PAGE)
    joined = []
    for num_pages in (1 + 2 * wanted, 1 + 2 * wanted + 4):
        s = scheduler(num_pages=num_pages)
        add(s, 100, 200)
        add(s, 100, 200)
        joined.append(len(s.commands()))
    assert joined == [1, 2]


def test_a_request_that_cannot_fit_alone_is_refused_at_once_and_by_how_much() -> None:
    s = scheduler(num_pages=33)
    with pytest.raises(PromptTooLongError, match=r"needs 33 KV pages .* has 32: 1 too few"):
        add(s, 400, 33 * PAGE - 400 - overshoot_rows(DRAFTS))
    add(s, 400, 32 * PAGE - 400 - overshoot_rows(DRAFTS))
    Ranks(s, random.Random(0)).run()


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_in_a_small_pool_ends_with_clean_books(seed: int) -> None:
    rng = random.Random(seed)
    s = scheduler(max_slots=6, num_pages=rng.choice((36, 40, 48)), max_model_len=512)
    ranks = Ranks(s, rng, lag=rng.randint(0, 5), chunk=64)
    requests: list[Request] = []
    for _ in range(1500):
        roll = rng.random()
        if roll < 0.1 and s.num_waiting < 20:
            prompt = rng.randint(1, 300)
            answer = rng.randint(1, min(512, s.limits.room_for(0)) - prompt)
            requests.append(add(s, prompt, answer, priority=rng.randint(0, 1)))
        elif roll < 0.12 and s.unfinished:
            s.abort(rng.choice(s.unfinished).number)
        ranks.turn()
    ranks.run()
    assert s.blocks.free_pages == s.blocks.usable_pages
    whole = [r for r in requests if r.error is None]
    assert len(whole) > 20
    assert all(r.emitted == answer_to(r.prompt, r.sampling.max_tokens) for r in whole)
    assert s.num_preemptions > 0
