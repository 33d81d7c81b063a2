"""The scheduler: order, exact page needs, refusals that say by how much, ends, nothing leaked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.driver.request import Request
from outrider.actors.driver.scheduler import Scheduler
from outrider.actors.errors import RequestAbortedError, RequestError, RequestFailedError
from outrider.model.plan import pages_for
from outrider.model.step import MAX_STOP_IDS, Join, Leave, Progress, Sampling, StepEvent
from tests.actors.conftest import EOS, VOCAB, limits


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(limits(**changes))


def add(s: Scheduler, prompt: list[int], stop: tuple[str, ...] = (), **sampling: Any) -> Request:
    asked = GenerationRequest(prompt=prompt, sampling=Sampling(**sampling), stop=stop)
    return s.add(asked, prompt, Letters() if stop else None)


def joins(s: Scheduler) -> list[Join]:
    return [command for command in s.commands() if isinstance(command, Join)]


def step(
    s: Scheduler, request: int, slot: int, tokens: list[int], finish: str | None = None, **more: Any
) -> list[Request]:
    """One step of the leader that brought one request these tokens."""
    progress = Progress(request=request, slot=slot, tokens=tokens, finish=finish, **more)
    return s.apply(StepEvent(iteration=1, step_s=0.0, progress=[progress]))


class Letters:
    """A detokenizer of letters, one a token; 999 is a fault."""

    def push(self, ids: Sequence[int]) -> str:
        assert 999 not in ids, "no such letter"
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


def test_requests_are_admitted_in_order_while_slots_last():
    s = scheduler()
    for token in range(5):
        add(s, [token], max_tokens=4)
    found = joins(s)
    assert [(j.request, j.slot, j.tokens) for j in found] == [(0, 0, [0]), (1, 1, [1]), (2, 2, [2])]
    assert (s.num_waiting, s.num_running) == (2, 3)
    assert joins(s) == []


def test_pages_cover_prompt_answer_and_overshoot():
    s = scheduler()
    add(s, [1] * 9, max_tokens=11)
    (join,) = joins(s)
    assert len(join.pages) == pages_for(9 + 11 + 4, 8)
    assert 0 not in join.pages


def test_a_request_that_does_not_fit_yet_holds_up_those_behind_it():
    s = scheduler(num_pages=10)
    add(s, [1] * 8, max_tokens=40)
    add(s, [1] * 8, max_tokens=40)
    add(s, [1], max_tokens=1)
    assert [j.request for j in joins(s)] == [0]
    step(s, 0, 0, [5], "length")
    assert [j.request for j in joins(s)] == [1, 2]


def test_the_slot_of_a_finished_request_goes_to_the_next():
    s = scheduler(max_slots=1)
    add(s, [1])
    add(s, [2])
    joins(s)
    (request,) = step(s, 0, 0, [2, 3], "stop")
    assert (request.emitted, request.finish) == ([2, 3], "stop")
    (join,) = joins(s)
    assert (join.request, join.slot) == (1, 0)


def test_prompt_and_emitted_tokens_are_kept_for_a_replay():
    s = scheduler()
    request = add(s, [4, 5], max_tokens=9)
    joins(s)
    step(s, 0, 0, [6])
    step(s, 0, 0, [7, 8])
    assert request.prompt + request.emitted == [4, 5, 6, 7, 8]


def test_max_tokens_is_cut_to_the_context():
    s = scheduler(max_model_len=32)
    assert add(s, [1] * 30, max_tokens=100).sampling.max_tokens == 2
    assert add(s, [1] * 31, max_tokens=100).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], rf"prompt token {VOCAB} at index 1: .* \[0, {VOCAB}\)"),
        ([-1], "prompt token -1 at index 0"),
        ([1] * 64, r"64 tokens, 1 too many: the maximum context length is .*max_model_len = 64 "),
        ([VOCAB] * 64, "has 64 tokens, 1 too many"),  # its length first: ids take time
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt: list[int], says: str):
    s = scheduler()
    with pytest.raises(RequestError, match=says):
        add(s, prompt)
    assert not s.unfinished


def test_a_request_that_can_never_get_its_pages_is_refused_saying_by_how_much():
    rows = 40 + 4
    need = pages_for(rows, 8)
    exact = scheduler(num_pages=need + 1)
    add(exact, [1] * 8, max_tokens=32)
    assert len(joins(exact)) == 1
    short = scheduler(num_pages=need)
    says = f"needs {need} KV pages of 8 tokens, the cache has {need - 1}: 1 too few.*num_pages"
    with pytest.raises(RequestError, match=says):
        add(short, [1] * 8, max_tokens=32)


def test_seeds_are_drawn_apart_unless_given():
    s = scheduler()
    drawn = {add(s, [1]).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert None not in drawn
    assert add(s, [1], seed=5).sampling.seed == 5


def test_what_a_request_leaves_open_is_the_models_default_and_what_it_says_wins():
    s = scheduler(sampling_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    open_request, greedy = add(s, [1]).sampling, add(s, [1], temperature=0.0, top_k=0).sampling
    assert (open_request.temperature, open_request.top_k, open_request.top_p) == (0.6, 20, None)
    assert open_request.repetition_penalty == greedy.repetition_penalty == 1.1
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)
    assert not greedy.draws
    without = add(scheduler(), [1]).sampling
    assert not without.draws
    assert not without.edits


def test_an_answer_ends_at_stop_ids_and_at_the_end_of_sequence_unless_that_is_ignored():
    def end_ids(**sampling: Any) -> list[int]:
        s = scheduler()
        add(s, [1], **sampling)
        (join,) = joins(s)
        return join.end_ids

    assert end_ids(stop_ids=(4, EOS)) == [4, EOS]
    assert end_ids(stop_ids=(4,)) == [4, EOS]
    assert end_ids(stop_ids=(4,), ignore_eos=True) == [4]


@pytest.mark.parametrize("count", [MAX_STOP_IDS - 1, MAX_STOP_IDS])
def test_as_many_stop_ids_as_are_allowed_leave_room_for_the_end_of_sequence(count: int):
    s = scheduler(eos_ids=(EOS, EOS - 1))
    add(s, [1], stop_ids=tuple(range(count)))
    (join,) = joins(s)
    assert join.end_ids == [*range(count), EOS, EOS - 1]


def test_a_request_that_cannot_go_on_fails_alone_and_gives_back_what_it_held():
    s = scheduler(max_slots=2)
    first, second, third = add(s, [1]), add(s, [2]), add(s, [3])
    assert [join.request for join in joins(s)] == [0, 1]
    step(s, 0, 0, [5], verified=False)
    assert step(s, 0, 0, [], verified=False, error="sampling.grammar: no token") == [first]
    assert first.take().token_ids == [5]  # type: ignore[union-attr]
    with pytest.raises(RequestFailedError, match=r"request 0 failed: sampling\.grammar: no token"):
        first.take()
    assert s.num_requests["failed"] == 1
    assert not second.ended
    (join,) = s.commands()  # no Leave: the ranks know
    assert isinstance(join, Join)
    assert (join.request, join.slot) == (third.number, 0)


def test_an_aborted_request_leaves_queue_or_slot():
    s = scheduler(max_slots=1)
    running, waiting = add(s, [1]), add(s, [2])
    assert len(joins(s)) == 1
    assert s.abort(1) is waiting
    assert s.num_waiting == 0
    assert s.commands() == []
    assert s.abort(0) is running
    assert s.commands() == [Leave(slot=0, request=0)]
    for request in (running, waiting):
        with pytest.raises(RequestAbortedError):
            request.take()
    assert step(s, 0, 0, [3]) == []  # of a step that ran meanwhile
    assert running.emitted == []
    assert s.abort(0) is None
    assert s.abort(99) is None


def test_who_leaves_is_told_before_who_gets_its_slot():
    s = scheduler(max_slots=1)
    add(s, [1])
    add(s, [2])
    s.commands()
    s.abort(0)
    leave, join = s.commands()
    assert leave == Leave(slot=0, request=0)
    assert isinstance(join, Join)
    assert (join.slot, join.request) == (0, 1)


def test_a_suspended_request_comes_back_before_later_ones_with_all_that_it_has():
    s = scheduler(max_slots=2)
    first, second, third = add(s, [4, 5], max_tokens=9), add(s, [1]), add(s, [2])
    joins(s)
    step(s, 0, 0, [6, 7])
    s.suspend(first.number)
    assert (first.slot, first.was_admitted, s.num_waiting, s.num_running) == (None, True, 2, 1)
    leave, join = s.commands()
    assert leave == Leave(slot=0, request=0)
    assert isinstance(join, Join)
    assert (join.slot, join.tokens, join.emitted) == (0, [4, 5], [6, 7])
    assert join.sampling == first.sampling
    assert (first.slot, third.slot) == (0, None)
    assert not second.ended


def test_progress_from_before_a_suspension_is_not_taken_for_later_progress():
    s = scheduler()
    request = add(s, [4], max_tokens=9)
    (before,) = joins(s)
    step(s, before.request, 0, [5])
    s.suspend(request.number)
    (after,) = joins(s)
    assert after.slot == before.slot
    assert step(s, before.request, 0, [6, 7]) == []
    step(s, after.request, 0, [6, 7], "length")
    assert request.emitted == [5, 6, 7]
    assert s.commands() == []
    s.blocks.check_idle()


def test_log_probabilities_of_a_prompt_come_once_whenever_it_is_suspended():
    s = scheduler()
    request = add(s, [1, 2, 3], max_tokens=3, prompt_logprobs=0)
    rows = [[(2, -0.5)]], [[(3, -1.5)]]
    (join,) = joins(s)
    step(s, join.request, 0, [], verified=False, prompt_logprobs=rows[0])
    s.suspend(request.number)
    (join,) = joins(s)
    for some in rows:
        step(s, join.request, 0, [], verified=False, prompt_logprobs=some)
    step(s, join.request, 0, [9], verified=False)
    s.suspend(request.number)
    (join,) = joins(s)
    step(s, join.request, 0, [8, 7], "length")
    chunk = request.take()
    assert chunk is not None
    assert (chunk.token_ids, chunk.prompt_logprobs) == ([9, 8, 7], [None, *rows[0], *rows[1]])


def test_when_the_ranks_are_gone_all_wait_again_and_nobody_is_told_to_leave():
    s = scheduler()
    requests = [add(s, [i], max_tokens=9, stop_ids=(7,)) for i in range(5)]
    joins(s)
    step(s, 1, 1, [6])
    s.abort(0)
    s.suspend_all()
    s.blocks.check_idle()
    found = s.commands()
    assert [(j.tokens, j.emitted) for j in found if isinstance(j, Join)] == [
        ([1], [6]), ([2], []), ([3], [])
    ]  # fmt: skip
    assert len(found) == 3
    assert len({j.request for j in found} | {r.number for r in requests}) == 7, "numbers are reused"
    s.abort(1)
    assert s.commands()[0] == Leave(slot=found[0].slot, request=found[0].request)


def test_a_stop_string_ends_a_request_before_the_ranks_do():
    s = scheduler()
    request = add(s, [1], stop=("cd",), max_tokens=9)
    s.commands()
    step(s, 0, 0, [ord("a")], verified=False)
    step(s, 0, 0, [ord(c) for c in "bcde"], drafted=3, accepted=3)
    assert request.finish == "stop"
    assert bytes(request.emitted) == b"abcd"
    assert s.commands() == [Leave(slot=0, request=0)]
    chunk = request.take()
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason) == ("ab", "stop")
    s.blocks.check_idle()


def test_log_probabilities_of_a_prompt_come_with_its_first_tokens_and_in_order():
    s = scheduler()
    request = add(s, [1, 2, 3], max_tokens=2, prompt_logprobs=0)
    s.commands()
    rows = [[(2, -0.5)]], [[(3, -1.5)]]
    for some in rows:
        step(s, 0, 0, [], verified=False, prompt_logprobs=some)
        assert request.take() is None
    assert request.stats().ttft_s == 0.0
    step(s, 0, 0, [9], verified=False)
    first = request.take()
    assert first is not None
    assert first.prompt_logprobs == [None, *rows[0], *rows[1]]
    step(s, 0, 0, [8], finish="length")
    last = request.take()
    assert last is not None
    assert last.prompt_logprobs == []
    assert (request.counters.tokens, request.counters.iterations) == (2, 1)
    whole = request.completion([first, last])
    assert whole.prompt_logprobs == first.prompt_logprobs


def test_a_first_token_and_an_iteration_in_one_step_are_one_change():
    s = scheduler()
    request = add(s, [1], max_tokens=3)
    s.commands()
    progress = [
        Progress(request=0, slot=0, tokens=[5], verified=False),
        Progress(request=0, slot=0, tokens=[6, 7], drafted=1, accepted=1, finish="length"),
    ]
    assert s.apply(StepEvent(iteration=1, step_s=0.0, progress=progress)) == [request]
    assert request.emitted == [5, 6, 7]


def test_the_ranks_own_end_is_not_told_back_to_them():
    s = scheduler()
    request = add(s, [1], stop=("b",), max_tokens=9)
    s.commands()
    step(s, 0, 0, [ord(c) for c in "abc"], "length", drafted=2, accepted=2)
    assert (request.finish, bytes(request.emitted)) == ("stop", b"ab")
    assert s.commands() == []


@pytest.mark.parametrize(
    ("stop", "tokens", "finish", "accepted", "counts"),
    [
        (("b",), b"bcde", None, 3, 1),
        (("e",), b"bcde", None, 3, 3),
        (("c",), b"bcde", None, 2, 2),
        ((), b"b", "stop", 3, 1),
        ((), b"bcd", "length", 3, 3),
        (("z",), b"bcd", None, 2, 2),
    ],
)
def test_drafts_behind_the_end_are_not_accepted_ones(
    stop: tuple[str, ...], tokens: bytes, finish: str | None, accepted: int, counts: int
):
    """A stop id and a stop string alike, in the request's counts and in the engine's."""
    s = scheduler()
    request = add(s, [1], stop=stop, max_tokens=20)
    s.commands()
    step(s, 0, 0, [ord("a")], verified=False)
    step(s, 0, 0, list(tokens), finish, drafted=3, accepted=accepted)
    for counters in (request.counters, s.counters):
        assert (counters.drafted, counters.accepted) == (3, counts)
        assert counters.per_position == [position < counts for position in range(3)]
        assert counters.tokens == len(request.emitted)


def test_a_fault_in_one_requests_text_ends_that_request_alone():
    s = scheduler()
    bad, good = add(s, [1], stop=("x",), max_tokens=9), add(s, [1], stop=("x",), max_tokens=9)
    s.commands()
    progress = [
        Progress(request=0, slot=0, tokens=[999]), Progress(request=1, slot=1, tokens=[97])
    ]  # fmt: skip
    assert s.apply(StepEvent(iteration=1, step_s=0.0, progress=progress)) == [bad, good]
    with pytest.raises(RequestFailedError, match="request 0 failed: AssertionError: no such") as e:
        bad.take()
    assert "Traceback" in e.value.detail
    assert s.commands() == [Leave(slot=0, request=0)]
    assert s.num_requests["failed"] == 1
    assert not good.ended


def test_random_traffic_ends_with_clean_books():
    rng = random.Random(1)
    s = scheduler(num_pages=20)
    live: dict[int, int] = {}
    for _ in range(3000):
        roll = rng.random()
        if roll < 0.3 and s.num_waiting < 20:
            add(s, [1] * rng.randint(1, 30), max_tokens=rng.randint(1, 30))
        elif roll < 0.6 and live:
            request = rng.choice(list(live))
            done = rng.random() < 0.5
            step(s, request, live[request], [1], "length" if done else None)
            if done:
                del live[request]
        elif roll < 0.7 and live:
            request = rng.choice([r for r in s.unfinished if r.slot is not None])
            del live[request.join_number]
            rng.choice([s.abort, s.suspend])(request.number)
        elif roll < 0.705:
            s.suspend_all()
            live.clear()
        live |= {j.request: j.slot for j in joins(s)}
        s.blocks.check()
    while live or s.num_waiting:
        for request, slot in live.items():
            step(s, request, slot, [1], "length")
        live = {j.request: j.slot for j in joins(s)}
    s.blocks.check_idle()
