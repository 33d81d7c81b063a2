"""Pages on demand and preemption with real ranks: the answers are those of a pool without end.

The oracle is K = 0 on one rank, alone, with all pages from the start. Every test that compares
asserts that requests were suspended.
"""

from __future__ import annotations

import pytest
import torch

from outrider.model.step import Grow, Join, Sampling
from tests.model.conftest import Checkpoint
from tests.ranks import Team, record_drafts
from tests.scheduled import Scheduled

PAGE = 8


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 158, (length,), generator=generator).tolist()


def team(varied: Checkpoint, draft_tokens: int, *, num_pages: int = 160, **changes: object) -> Team:
    return Team(
        varied.folder,
        draft_tokens=draft_tokens,
        page_tokens=PAGE,
        num_pages=num_pages,
        max_model_len=512,
        **changes,
    )


KINDS = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 30},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.5},
    {"draft_tokens": 1},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "top_k": 9, "seed": 1},
    {"draft_tokens": 0},
)
ASKED = [
    (prompt_of(length, i), {"max_tokens": 140 - 5 * i, **KINDS[i]})
    for i, length in enumerate((9, 33, 70, 17, 64, 40, 8, 31))
]


@pytest.fixture(scope="module")
def expected(varied: Checkpoint) -> list[list[int]]:
    engine, answers = team(varied, 0), []
    for prompt, how in ASKED:
        scheduled = Scheduled(engine)
        request = scheduled.submit(prompt, **how)
        scheduled.run()
        answers.append(request.emitted)
    assert all(len(set(answer)) > len(answer) // 4 for answer in answers), "dull answers"
    return answers


@pytest.mark.parametrize(
    ("tensor_parallel", "draft_tokens", "lag", "run_ahead"),
    [(1, 0, 1, 1), (1, 3, 2, 0), (1, 5, 0, 1), (2, 2, 1, 1)],
)
def test_eight_requests_in_a_pool_for_one_and_a_half_say_what_they_say_alone(
    varied: Checkpoint,
    expected: list[list[int]],
    tensor_parallel: int,
    draft_tokens: int,
    lag: int,
    run_ahead: int,
) -> None:
    longest = -(-(70 + 130 + 2 * (draft_tokens + 1)) // PAGE)
    engine = team(
        varied,
        draft_tokens,
        tensor_parallel=tensor_parallel,
        num_pages=1 + longest + longest // 2,
        max_slots=6,
    )
    for runner in engine.runners:
        runner.run_ahead = run_ahead
    scheduled = Scheduled(engine, lag=lag)
    requests = [scheduled.submit(prompt, **how) for prompt, how in ASKED]
    scheduled.run()
    for (prompt, _), request, answer in zip(ASKED, requests, expected, strict=True):
        engine.assert_same(prompt, request.emitted, answer)
    assert scheduled.scheduler.num_preemptions > 0
    assert scheduled.most_together > 1
    if draft_tokens:
        assert sum(request.counters.accepted for request in requests) > 0
    (scored,) = (request for request, (_, how) in zip(requests, ASKED) if "logprobs" in how)
    chunk = scored.take()
    assert chunk is not None
    assert (len(chunk.logprobs), len(chunk.prompt_logprobs)) == (len(scored.emitted), 40)


def test_drafts_of_a_request_that_was_suspended_are_those_of_one_that_was_not(
    varied: Checkpoint,
) -> None:
    """For each position that both drafted from. Each iteration starts where the last one ended, and
    that may differ where a request left and lost what was under way."""
    prompts = [prompt_of(length) for length in (9, 33, 64)]
    offered = []
    for num_pages in (160, 37):
        engine = team(varied, 3, num_pages=num_pages)
        drafts = record_drafts(engine.runners[0])
        scheduled = Scheduled(engine)
        requests = [scheduled.submit(prompt, max_tokens=150) for prompt in prompts]
        names: dict[int, int] = {}
        while scheduled.has_work:
            scheduled.step()
            names.update({request.join_number: request.number for request in requests})
        offered.append({(names[join], rows): d for (join, rows), d in drafts.items()})
        assert (scheduled.scheduler.num_preemptions > 0) == (num_pages == 37)
    both = offered[0].keys() & offered[1].keys()
    assert len(both) > 30
    for key in both:
        pairs = zip(offered[0][key], offered[1][key])  # a batch near its end may draft fewer
        assert all(first == second for first, second in pairs), key


def test_a_request_whose_pages_are_full_waits_while_the_others_go_on(varied: Checkpoint) -> None:
    """The ranks decide it for themselves: they may be any number of steps ahead of the driver."""
    (runner,) = team(varied, 3).runners
    how = Sampling(max_tokens=60)
    pages = {0: list(range(1, 5)), 1: list(range(5, 30))}
    joins = [
        Join(slot=slot, request=slot, tokens=prompt_of(20), pages=pages[slot], sampling=how)
        for slot in pages
    ]
    runner.apply(joins)
    tokens: dict[int, list[int]] = {0: [], 1: []}

    def step_while_there_is_work() -> None:
        while runner.has_work:
            for progress in runner.step():
                tokens[progress.request] += progress.tokens

    step_while_there_is_work()
    assert len(tokens[1]) == 60
    assert 4 * PAGE - 20 - 4 < len(tokens[0]) <= 4 * PAGE - 20
    assert tokens[0] == tokens[1][: len(tokens[0])]
    runner.apply([Grow(slot=0, request=0, pages=list(range(40, 48)))])
    step_while_there_is_work()
    assert tokens[0] == tokens[1]
