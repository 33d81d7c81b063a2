"""Admission: order, exact page needs, refusals that say by how much, nothing leaked."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.actors.driver.scheduler import Scheduler
from outrider.actors.errors import QueueFullError, RequestError
from outrider.model.plan import pages_for
from outrider.model.step import Progress, Sampling
from tests.actors.conftest import EOS, VOCAB, limits


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(limits(**changes))


def progress(request: int, slot: int, tokens: list[int], finish: str | None = None) -> Progress:
    return Progress(request=request, slot=slot, tokens=tokens, finish=finish)


def test_requests_are_admitted_in_order_while_slots_last():
    s = scheduler()
    for token in range(5):
        s.add([token], Sampling(max_tokens=4))
    joins = s.admit()
    assert [(j.request, j.slot, j.tokens) for j in joins] == [(0, 0, [0]), (1, 1, [1]), (2, 2, [2])]
    assert (s.queued, s.active) == (2, 3)
    assert s.admit() == []


def test_pages_cover_prompt_answer_and_overshoot():
    s = scheduler()
    s.add([1] * 9, Sampling(max_tokens=11))
    (join,) = s.admit()
    assert len(join.pages) == pages_for(9 + 11 + 4, 8)
    assert 0 not in join.pages


def test_a_request_that_does_not_fit_yet_holds_up_those_behind_it():
    s = scheduler(num_pages=10)
    s.add([1] * 8, Sampling(max_tokens=40))
    s.add([1] * 8, Sampling(max_tokens=40))
    s.add([1], Sampling(max_tokens=1))
    assert [j.request for j in s.admit()] == [0]
    s.advance(progress(0, 0, [5], "length"))
    assert [j.request for j in s.admit()] == [1, 2]


def test_the_slot_of_a_finished_request_goes_to_the_next():
    s = scheduler(max_slots=1)
    s.add([1], Sampling())
    s.add([2], Sampling())
    s.admit()
    entry = s.advance(progress(0, 0, [2, 3], "stop"))
    assert entry is not None
    assert (entry.emitted, entry.finish) == ([2, 3], "stop")
    (join,) = s.admit()
    assert (join.request, join.slot) == (1, 0)


def test_prompt_and_emitted_tokens_are_kept_for_a_replay():
    s = scheduler()
    entry = s.add([4, 5], Sampling(max_tokens=9))
    s.admit()
    s.advance(progress(0, 0, [6]))
    s.advance(progress(0, 0, [7, 8]))
    assert entry.prompt + entry.emitted == [4, 5, 6, 7, 8]


def test_max_tokens_is_cut_to_the_context():
    s = scheduler(max_model_len=32)
    assert s.add([1] * 30, Sampling(max_tokens=100)).sampling.max_tokens == 2
    assert s.add([1] * 31, Sampling(max_tokens=100)).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], rf"prompt token {VOCAB} at index 1: .* \[0, {VOCAB}\)"),
        ([-1], "prompt token -1 at index 0"),
        ([1] * 64, "has 64 tokens, 1 too many: limits.max_model_len = 64 leaves 63"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt: list[int], says: str):
    s = scheduler()
    with pytest.raises(RequestError, match=says):
        s.add(prompt, Sampling())
    assert s.idle


def test_a_request_that_can_never_get_its_pages_is_refused_saying_by_how_much():
    rows = 40 + 4
    need = pages_for(rows, 8)
    exact = scheduler(num_pages=need + 1)
    exact.add([1] * 8, Sampling(max_tokens=32))
    assert len(exact.admit()) == 1
    short = scheduler(num_pages=need)
    says = f"needs {need} KV pages of 8 tokens, the cache has {need - 1}: 1 too few.*num_pages"
    with pytest.raises(RequestError, match=says):
        short.add([1] * 8, Sampling(max_tokens=32))


def test_a_full_queue_refuses_and_names_its_limit():
    s = scheduler(max_queue=2)
    s.add([1], Sampling())
    s.add([1], Sampling())
    with pytest.raises(QueueFullError, match=r"limits\.max_queue = 2"):
        s.add([1], Sampling())
    s.admit()
    s.add([1], Sampling())


def test_seeds_are_drawn_apart_unless_given():
    s = scheduler()
    drawn = {s.add([1], Sampling()).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert None not in drawn
    assert s.add([1], Sampling(seed=5)).sampling.seed == 5


def test_stop_ids_hold_the_end_of_sequence_unless_ignored():
    s = scheduler()
    assert s.add([1], Sampling(stop_ids=(4, EOS))).sampling.stop_ids == (4, EOS)
    assert s.add([1], Sampling(stop_ids=(4,))).sampling.stop_ids == (4, EOS)
    assert s.add([1], Sampling(stop_ids=(4,), ignore_eos=True)).sampling.stop_ids == (4,)


def test_abort_takes_a_request_out_of_queue_or_slot():
    s = scheduler(max_slots=1)
    s.add([1], Sampling())
    s.add([2], Sampling())
    s.admit()
    assert s.abort(1) is None
    assert s.queued == 0
    leave = s.abort(0)
    assert leave is not None
    assert (leave.slot, leave.request) == (0, 0)
    assert s.idle
    assert s.advance(progress(0, 0, [3])) is None
    assert s.abort(0) is None
    assert s.abort(99) is None


def test_random_traffic_ends_with_clean_books():
    rng = random.Random(1)
    s = scheduler(num_pages=20)
    live: dict[int, int] = {}
    for _ in range(3000):
        roll = rng.random()
        if roll < 0.3 and s.queued < 20:
            s.add([1] * rng.randint(1, 30), Sampling(max_tokens=rng.randint(1, 30)))
        elif roll < 0.6 and live:
            request = rng.choice(list(live))
            done = rng.random() < 0.5
            s.advance(progress(request, live[request], [1], "length" if done else None))
            if done:
                del live[request]
        elif roll < 0.7 and live:
            request = rng.choice(list(live))
            s.abort(request)
            del live[request]
        live |= {j.request: j.slot for j in s.admit()}
        s.books.audit()
    while live or s.queued:
        for request, slot in live.items():
            s.advance(progress(request, slot, [1], "length"))
        live = {j.request: j.slot for j in s.admit()}
    s.books.audit_idle()
