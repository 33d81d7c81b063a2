"""The host's table of requests: who sits where, what is in flight, where an answer ends."""

from __future__ import annotations

import pytest

from outrider.model.running import RunningRequest, SlotTable
from outrider.model.step import Join, Leave, Progress, Sampling
from tests import checkpoints
from tests.ranks import BlockAllocator, Team

K, PAGE_TOKENS = 5, 4


def join(slot: int, request: int, *, prompt: int = 3, end_ids: tuple[int, ...] = (), **how) -> Join:
    return Join(
        slot=slot,
        request=request,
        tokens=[1] * prompt,
        pages=[1] * 40,
        sampling=Sampling(**{"max_tokens": 20, **how}),
        end_ids=list(end_ids),
    )


def table_of(*joins: Join) -> tuple[SlotTable, list[RunningRequest]]:
    table = SlotTable(PAGE_TOKENS, K + 1)
    for one in joins:
        table.add(one, K)
    requests = [table.get(one.slot) for one in joins]
    return table, [request for request in requests if request is not None]


def decoding(table: SlotTable, *requests: RunningRequest) -> None:
    """The prompts have run, and their first tokens were read."""
    for request in requests:
        request.launch_prompt(request.prompt_left)
        table.add_tokens(request, [7], [], verified=False)


def test_prompts_wait_in_the_order_of_their_requests_and_decode_by_slot() -> None:
    table, (late, early) = table_of(join(0, 8), join(2, 5))
    assert table.prefilling() == [early, late]
    assert table.decoding() == []
    decoding(table, early)
    assert (table.prefilling(), table.decoding()) == ([late], [early])
    decoding(table, late)
    assert (table.prefilling(), table.decoding()) == ([], [late, early])


def test_what_is_in_flight_counts_as_one_token_each() -> None:
    table, (request,) = table_of(join(0, 1, max_tokens=4))
    request.launch_prompt(2)
    assert (request.prompt_left, request.in_flight) == (1, 0)
    request.launch_prompt(1)
    assert (request.in_flight, request.tokens_needed, request.position) == (1, 3, 3)
    for _ in range(3):
        assert table.decoding() == [request]
        request.launch_rows(K + 1)
    assert request.tokens_needed == 0
    assert table.decoding() == []
    assert table.add_tokens(request, [7], [], verified=False)[0].finish is None
    assert (request.in_flight, request.tokens_needed, request.last_rows) == (3, 0, K + 1)


def test_an_answer_ends_at_its_length_or_at_an_end_id() -> None:
    table, (short, stopped) = table_of(join(0, 1, max_tokens=3), join(1, 2, end_ids=(9,)))
    decoding(table, short, stopped)
    (progress,) = table.add_tokens(short, [4, 5, 6], [[(4, -1.0)]] * 3, drafted=3, accepted=2)
    assert progress == Progress(
        1, 0, [4, 5], drafted=3, accepted=2, logprobs=[[(4, -1.0)]] * 2, finish="length"
    )
    (progress,) = table.add_tokens(stopped, [4, 9, 6], [], drafted=2, accepted=2)
    assert (progress.tokens, progress.finish) == ([4, 9], "stop")
    assert len(table) == 0


def test_results_of_a_request_that_has_left_are_dropped() -> None:
    table, (first,) = table_of(join(0, 1))
    decoding(table, first)
    table.remove(Leave(slot=0, request=99))
    assert len(table) == 1
    table.remove(Leave(slot=0, request=1))
    table.remove(Leave(slot=0, request=1))
    assert table.add_tokens(first, [4], []) == []
    table.add(join(0, 2), K)
    assert table.add_tokens(first, [4], []) == [], "the slot belongs to another request"
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        table.add(join(0, 3), K)


def test_the_digest_follows_every_change() -> None:
    table, (request,) = table_of(join(0, 1))
    digests = [SlotTable(PAGE_TOKENS, K + 1).digest(), table.digest()]
    request.launch_prompt(3)
    digests.append(table.digest())
    table.add_tokens(request, [4], [], verified=False)
    digests.append(table.digest())
    table.add_tokens(request, [5], [])
    digests.append(table.digest())
    assert len(set(digests)) == len(digests)
    other, (same,) = table_of(join(0, 1))
    same.launch_prompt(3)
    other.add_tokens(same, [4], [], verified=False)
    other.add_tokens(same, [5], [])
    assert other.digest() == digests[-1]


@pytest.mark.parametrize(
    ("samplings", "limit"),
    [
        ([], None),
        ([{"draft_tokens": 2}], 2),
        ([{"draft_tokens": 2}, {"draft_tokens": 4}, {"draft_tokens": 0}], 4),
        ([{"draft_tokens": 2}, {}], K),
        ([{"draft_tokens": 16}], K),
        ([{"max_tokens": 4}], 2),  # one token by the prompt, then two drafts and the target's own
        ([{"max_tokens": 1}], 0),
    ],
)
def test_no_more_drafts_are_worth_choosing_than_a_request_can_take(samplings, limit) -> None:
    table, _ = table_of(*(join(i, i, **how) for i, how in enumerate(samplings)))
    assert table.draft_limit() == limit


def test_a_step_says_how_many_drafts_its_iteration_made(tmp_path) -> None:
    text = checkpoints.config()
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text, seed=11))
    (runner,) = Team(folder, draft_tokens=K, auto_depth=True).runners
    assert runner.draft_limit == K
    blocks = BlockAllocator(runner.run)
    runner.apply([blocks.join(0, 0, [1, 2, 3], Sampling(max_tokens=20, draft_tokens=2))])
    assert runner.draft_limit == 2
    made = []
    while runner.has_work:
        runner.limit_drafts(1 if len(made) == 2 else K)
        made.append((runner.step()[-1].drafted, runner.num_drafts))
    assert made[:4] == [(2, 2), (2, 2), (1, 1), (2, 2)]
    assert all(drafted == num_drafts for drafted, num_drafts in made)
