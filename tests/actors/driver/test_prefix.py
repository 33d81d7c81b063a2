"""Prefix reuse without a model: which beginnings are found, what is kept, and that books close.

The ranks of tests/paging.py know what lies in each page, so an answer that rested on a row or a
state of another text would be another answer.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.actors.driver.blocks import BlockAllocator
from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.driver.prefix import Chain, PrefixCache
from outrider.actors.driver.request import Request
from outrider.actors.driver.scheduler import Scheduler
from outrider.model.plan import overshoot_rows
from outrider.model.step import Join, Sampling
from tests.actors.conftest import limits
from tests.paging import Ranks, answer_to

PAGE, DRAFTS, EVERY = 8, 3, 24


def scheduler(**changes: Any) -> Scheduler:
    keys = {
        "page_tokens": PAGE,
        "draft_tokens": DRAFTS,
        "overshoot_rows": overshoot_rows(DRAFTS),
        "num_snapshots": 12,
        "snapshot_tokens": EVERY,
        "num_pages": 400,
        "max_model_len": 1024,
    }
    return Scheduler(limits(**{**keys, **changes}))


def ranks_of(s: Scheduler, seed: int = 0, **changes: Any) -> Ranks:
    return Ranks(s, random.Random(seed), **{"chunk": 32, **changes})


def add(s: Scheduler, prompt: list[int], answer: int = 5, salt: str = "", **how: Any) -> Request:
    sampling = Sampling(max_tokens=answer, ignore_eos=True, **how)
    return s.add(GenerationRequest(prompt=prompt, sampling=sampling, cache_salt=salt), prompt)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=length)


def ask(s: Scheduler, ranks: Ranks, prompt: list[int], answer: int = 5, **how: Any) -> Request:
    request = add(s, prompt, answer, **how)
    ranks.run()
    assert request.emitted == answer_to(prompt, answer)
    return request


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 30, 32, 33, 100])
def test_a_prompt_is_not_computed_again_wherever_it_ends(length: int) -> None:
    s = scheduler()
    ranks, prompt = ranks_of(s), text(length)
    assert ask(s, ranks, prompt).cached_tokens == 0
    assert ask(s, ranks, prompt).cached_tokens == length
    assert ask(s, ranks, [*prompt, 1, 2, 3]).cached_tokens == length
    other = [*prompt, *answer_to(prompt, 20), 5]
    assert ask(s, ranks, other).cached_tokens == length
    if length > EVERY:
        assert ask(s, ranks, prompt[:-1]).cached_tokens == EVERY * ((length - 2) // EVERY)


@pytest.mark.parametrize("length", [50, 72, 73, 96, 100])
@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, 23, 24, 47, 48, 49])
def test_the_longest_beginning_is_found_and_no_text_that_differs(length: int, at: int) -> None:
    s = scheduler(num_snapshots=40)
    ranks, prompt = ranks_of(s), text(100)
    ask(s, ranks, prompt)
    other = [*prompt[:length], 3]
    other[at] += 100
    assert ask(s, ranks, other).cached_tokens == EVERY * (at // EVERY)
    assert ask(s, ranks, other).cached_tokens == len(other)


def test_a_conversation_is_found_although_the_words_that_ask_for_an_answer_go() -> None:
    """As in chat templates that drop the thoughts of turns before the last."""
    s = scheduler(eos_ids=(200,), num_snapshots=40)
    ranks, turn = ranks_of(s), [*text(75), 200]
    ask(s, ranks, [*turn, 91, 92, 93])
    second = [*turn, 91, 94, *text(9, 1), 200, *text(20, 2), 200]
    assert ask(s, ranks, [*second, 91, 92, 93]).cached_tokens == len(turn)
    assert ask(s, ranks, [*second, 91, 94]).cached_tokens == len(second)
    # A turn that ends a row or two behind what is saved anyway spares the next one nothing.
    other = [*text(23, 5), 200, 200]
    ask(s, ranks, [*other, 91])
    assert ask(s, ranks, [*other, 95]).cached_tokens == 24


def test_tenants_with_other_salts_share_nothing() -> None:
    s = scheduler()
    ranks, prompt = ranks_of(s), text(60)
    for salt in ("", "a", "b" * 100, "b" * 101):
        assert ask(s, ranks, prompt, salt=salt).cached_tokens == 0
        assert ask(s, ranks, prompt, salt=salt).cached_tokens == 60


def test_log_probabilities_of_a_prompt_need_all_of_its_rows() -> None:
    s = scheduler()
    ranks, prompt = ranks_of(s), text(60)
    ask(s, ranks, prompt)
    assert ask(s, ranks, prompt, prompt_logprobs=0).cached_tokens == 0
    assert ask(s, ranks, prompt).cached_tokens == 60


def test_what_was_used_longest_ago_makes_way_first() -> None:
    s = scheduler(num_snapshots=3)
    ranks = ranks_of(s)
    first, second, third, fourth = (text(20, seed) for seed in range(4))
    for prompt in (first, second, third):
        ask(s, ranks, prompt)
    assert ask(s, ranks, first).cached_tokens == 20
    ask(s, ranks, fourth)
    assert s.prefix.num_evicted == 1
    for prompt, cached in ((first, 20), (third, 20), (fourth, 20), (second, 0)):
        assert ask(s, ranks, prompt).cached_tokens == cached


def test_cached_pages_are_given_to_requests_that_need_them() -> None:
    s = scheduler(num_pages=41, max_slots=1)
    ranks = ranks_of(s)
    for seed in range(10):
        ask(s, ranks, text(100, seed), answer=100)
    assert s.blocks.available_pages == 40
    assert s.blocks.free_pages < 40
    assert s.num_preemptions == 0
    assert ask(s, ranks, text(100, 9)).cached_tokens == 100


def test_a_cache_without_places_finds_nothing_and_says_nothing_to_the_ranks() -> None:
    s = scheduler(num_snapshots=0)
    ranks = ranks_of(s)
    for _ in range(2):
        add(s, text(60))
        commands = s.commands()
        assert isinstance(commands[0], Join)
        assert (commands[0].saves, commands[0].restore) == ([], None)
        ranks.apply(commands)
        ranks.run()
    assert s.blocks.free_pages == s.blocks.usable_pages


def test_what_an_aborted_request_may_not_have_saved_is_not_found() -> None:
    s = scheduler()
    ranks, prompt = ranks_of(s), text(200)
    request = add(s, prompt)
    ranks.turn()
    s.abort(request.number)
    ranks.run()
    assert ask(s, ranks, prompt).cached_tokens == 0


def test_nothing_is_found_once_the_ranks_are_others() -> None:
    s = scheduler()
    ranks, prompt = ranks_of(s), text(60)
    ask(s, ranks, prompt)
    request = add(s, prompt, 50)
    ranks.turn()
    assert request.cached_tokens == 60
    s.suspend_all()
    assert s.blocks.free_pages == s.blocks.usable_pages
    ranks = ranks_of(s)
    ranks.run()
    assert ranks.num_restored == 0
    assert request.emitted == answer_to(prompt, 50)
    assert ask(s, ranks, prompt).cached_tokens == 60


def test_requests_that_begin_alike_at_the_same_time_compute_it_once() -> None:
    s = scheduler(max_slots=8)
    ranks, prompt = ranks_of(s), text(100)
    same = [add(s, prompt, 20) for _ in range(3)]
    longer = [add(s, [*prompt, *text(5, seed)], 20) for seed in range(3)]
    ranks.run()
    for request in same + longer:
        assert request.emitted == answer_to(request.prompt, 20)
    assert ranks.num_run == 100 + 3 * 5
    assert [request.cached_tokens for request in same + longer] == [0] + [100] * 5
    assert ranks.most_together == 6


def test_who_waits_for_anothers_rows_keeps_its_place_and_holds_nobody_up() -> None:
    s = scheduler(max_slots=3)
    ranks, prompt = ranks_of(s, chunk=8), text(100)
    first, waits = add(s, prompt, 20), add(s, prompt, 20)
    others = [add(s, text(30, 5), 20), add(s, text(30, 6), 20)]
    ranks.turn()
    slots = [request.slot for request in (first, waits, *others)]
    assert slots == [0, None, 1, None]  # the third slot is kept
    s.abort(first.number)
    ranks.turn()
    assert waits.slot is not None, "it computes the beginning itself"
    ranks.run()
    assert waits.emitted == answer_to(prompt, 20)


def test_nobody_waits_for_rows_of_another_tenant_or_where_all_rows_are_needed() -> None:
    s = scheduler(max_slots=4)
    prompt = text(100)
    requests = [add(s, prompt), add(s, prompt, salt="x"), add(s, prompt, prompt_logprobs=0)]
    s.commands()
    assert all(request.slot is not None for request in requests)


def test_a_long_prompt_takes_no_more_than_a_quarter_of_the_places_and_its_end() -> None:
    cache = PrefixCache(BlockAllocator(1, 10), num_snapshots=16, every=10)
    for length, start in ((5, 0), (10, 0), (11, 0), (95, 0), (1000, 0), (1000, 990), (1001, 333)):
        saves = cache.reserve(1, Chain(text(length), PAGE, ""), start)
        rows = [save.rows for save in saves]
        assert rows == sorted(set(rows))
        assert rows[-1] == length
        assert len(rows) <= 1 + 16 // 4
        assert all(start < row and row % 10 == 0 for row in rows[:-1])
        assert len(rows) > 1 or length - start <= 10
        cache.cancel(1)
        cache.check()


@pytest.mark.parametrize("seed", range(16))
def test_random_traffic_with_evictions_says_what_it_would_without_and_closes_its_books(
    seed: int,
) -> None:
    rng = random.Random(seed)
    s = scheduler(
        num_pages=rng.choice((45, 60, 200)),
        num_snapshots=rng.choice((1, 2, 5, 20)),
        snapshot_tokens=rng.choice((8, 16, 24, 40)),
        max_slots=rng.randint(1, 6),
        max_model_len=320,
        eos_ids=(rng.randint(0, 20),),
    )
    ranks = Ranks(s, rng, lag=rng.randint(0, 4), chunk=rng.choice((8, 24, 64)))
    bases = [text(200, i) for i in range(3)]
    requests: list[Request] = []
    for _ in range(600):
        roll = rng.random()
        if roll < 0.15 and s.num_waiting < 12:
            prompt = rng.choice(bases)[: rng.randint(1, 200)] + text(
                rng.randint(0, 9), rng.randint(0, 3)
            )
            requests.append(add(s, prompt, rng.randint(1, 60), salt=rng.choice(("", "", "x"))))
            if rng.random() < 0.3:  # a turn of a conversation that will have been answered
                more = prompt + answer_to(prompt, 30) + [7]
                requests.append(add(s, more, rng.randint(1, 30)))
        elif roll < 0.18 and s.unfinished:
            s.abort(rng.choice(s.unfinished).number)
        elif roll < 0.2 and s.num_running:
            s.suspend(rng.choice([r for r in s.unfinished if r.slot is not None]).number)
        elif roll < 0.3 and (places := s.prefix.snapshots()):
            s.prefix.evict(rng.choice(places))
        ranks.turn()
    ranks.run()
    whole = [r for r in requests if r.error is None]
    assert len(whole) > 20
    for request in whole:
        assert request.emitted == answer_to(request.prompt, request.sampling.max_tokens)
    assert ranks.num_restored > 0
    assert s.blocks.available_pages == s.blocks.usable_pages
    s.prefix.clear()
    s.prefix.check()
    assert s.blocks.free_pages == s.blocks.usable_pages
