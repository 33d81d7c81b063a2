"""After warm-up nothing is captured any more, whatever clients ask for; and nothing is left behind.

Graphs are recorded on the CPU (tests/graphs.py), so a capture while requests wait would show.
"""

from __future__ import annotations

import itertools

import pytest

from outrider.model.runner import Runner
from outrider.model.step import Sampling
from outrider.model.warmup import warm_up
from outrider.parallel.vocab import LMHead
from tests import checkpoints
from tests.graphs import record
from tests.ranks import Output, Team, serve

K, SLOTS, NUM_NEW = 2, 5, 12
PROMPTS = [[3, 5, 8, 13], [21] * 9, list(range(40, 73)), [7], [90, 2] * 20]
SAMPLINGS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.2, "temperature": 0.6, "logprobs": 2},
    {"logit_bias": ((17, 3.0),), "min_tokens": 4},
    {"logprobs": 0},
    {"logprobs": 20},
    {"draft_tokens": 0},
    {"draft_tokens": 1, "temperature": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text, seed=11)
    return checkpoints.write(tmp_path_factory.mktemp("warmup"), text, weights)


def runner_of(folder, **changes: object) -> Runner:
    keys = {"draft_tokens": K, "max_slots": SLOTS, "num_pages": 200, **changes}
    return Team(folder, **keys).runners[0]


def requests() -> list[tuple[list[int], Sampling]]:
    """Each kind of sampling beside each other one, in batches of changing size."""
    prompts = itertools.cycle(PROMPTS)
    pairs = itertools.product(SAMPLINGS, repeat=2)
    return [
        (next(prompts), Sampling(max_tokens=NUM_NEW - i % 5, seed=i, **how))
        for i, how in enumerate(itertools.chain.from_iterable(pairs))
    ][:120]


@pytest.fixture(scope="module")
def alone(folder) -> list[Output]:
    """Each request by itself, without drafts and without graphs."""
    runner = runner_of(folder, draft_tokens=0)
    return [serve(runner, [request])[0] for request in requests()]


@pytest.mark.parametrize("auto_depth", [False, True])
def test_no_client_causes_a_capture(folder, alone: list[Output], auto_depth: bool) -> None:
    runner = runner_of(folder, auto_depth=auto_depth)
    captured = record(runner)
    warm_up(runner)
    before = captured()
    sizes = [key for key in before if key[0] != "prefill"]
    # Sizes, variants and depths. Without a tokenizer there are no grammars, which need two pieces.
    assert len(sizes) == 4 * 3 * (K + 1)
    assert set(runner.graphs._graphs) == set(before), "a graph ran once and is not captured"
    depths, step = itertools.cycle(range(K + 1)), runner.step

    def stepping() -> list:
        if auto_depth:
            runner.limit_drafts(next(depths))
        return step()

    runner.step = stepping  # type: ignore[method-assign]
    outs = serve(runner, requests(), stagger=1)
    assert captured() == before
    assert set(runner.graphs._graphs) == set(before)
    for out, expected in zip(outs, alone, strict=True):
        assert (out.tokens, out.finish) == (expected.tokens, expected.finish)
        assert_same_logprobs(out, expected)
    assert sum(out.drafted for out in outs) > 100


def test_no_client_asks_the_head_for_what_was_not_warm(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled for what it has to do, so first tokens too come in few variants."""
    asked: set[tuple[object, ...]] = set()
    pick = LMHead.pick

    def noting(head, hidden, rows, by_slot, features, *, exact=True):
        asked.add((hidden.shape[1], features, exact))
        return pick(head, hidden, rows, by_slot, features, exact=exact)

    monkeypatch.setattr(LMHead, "pick", noting)
    runner = runner_of(folder)
    record(runner)
    warm_up(runner)
    warm = set(asked)
    assert len({features for _, features, _ in warm}) == 3  # drawn, all, and all of a draft
    for request in requests():
        serve(runner, [request])
    assert asked == warm


def assert_same_logprobs(out: Output, expected: Output) -> None:
    assert len(out.logprobs) == len(expected.logprobs)
    for row, other in zip(out.logprobs, expected.logprobs):
        assert [token for token, _ in row] == [token for token, _ in other]
        assert [value for _, value in row] == pytest.approx([v for _, v in other], abs=1e-4)


def test_as_many_pages_as_one_request_needs_are_enough_for_all_captures(folder) -> None:
    runner = runner_of(folder, num_pages=8, max_model_len=32)
    captured = record(runner)
    warm_up(runner)
    assert {key[0] for key in captured() if key[0] != "prefill"} == {1, 2, 4, SLOTS}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_warm_runner_answers_as_a_cold_one(folder, alone: list[Output], recorded: bool) -> None:
    runner = runner_of(folder)
    if recorded:
        record(runner)
    warm_up(runner)
    assert not runner.has_work
    outs = serve(runner, requests()[:8])
    assert [out.tokens for out in outs] == [out.tokens for out in alone[:8]]
