"""Requests with a number of drafts of their own: a batch runs as deep as the deepest of them asks.

The bundled checkpoint, whose draft was trained, in float32. `off` is K = 0, one request at a time.
Graphs are recorded on the CPU (tests/graphs.py), so that each depth is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from outrider.model.batch import DecodeBatch
from outrider.model.runner import Runner
from outrider.model.step import Sampling
from tests.graphs import record
from tests.model.test_backlog import follow, note
from tests.model.test_npu_iterations import npu_team
from tests.ranks import Output, Team, serve

K = 5
KEYS = {"draft_tokens": K, "max_slots": 3, "num_pages": 200}
OWN = (0, None, 1, 0, K, 0, None, 1, 2)
"""Draft tokens of the requests of a run, in the order in which they join."""
Requests = Sequence[tuple[list[int], Sampling]]


@pytest.fixture(scope="module")
def tiny(repo) -> Path:
    return repo / "examples" / "tiny"


def requests_of(own: Sequence[int | None], **how: object) -> Requests:
    generator = torch.Generator().manual_seed(5)
    lengths = [(7 * i) % 40 + 1 for i in range(len(own))]
    prompts = [torch.randint(0, 500, (n,), generator=generator).tolist() for n in lengths]
    samplings = [
        Sampling(max_tokens=30 + n % 9, ignore_eos=True, draft_tokens=k, seed=n, **how)  # type: ignore[arg-type]
        for k, n in zip(own, lengths)
    ]
    return list(zip(prompts, samplings))


@pytest.fixture(scope="module")
def off(tiny) -> Callable[[Requests], list[list[int]]]:
    (runner,) = Team(tiny, **{**KEYS, "draft_tokens": 0}).runners
    return lambda requests: [serve(runner, [request])[0].tokens for request in requests]


def depths_run(runner: Runner) -> list[int]:
    """From now on: the number of drafts of each iteration."""
    run, depths = runner.run_iteration, []

    def running(batch: DecodeBatch) -> tuple[torch.Tensor, ...]:
        depths.append(batch.num_drafts)
        return run(batch)

    runner.run_iteration = running  # type: ignore[method-assign]
    return depths


def assert_drafted(outs: Sequence[Output], own: Sequence[int | None]) -> None:
    """Each request took as many drafts as it may, and some drafts were kept and some were not."""
    for out, k in zip(outs, own, strict=True):
        most = K if k is None else k
        assert out.drafted <= most * out.iterations
        # Near its end an answer takes fewer, for K + 1 iterations at the most.
        assert out.drafted >= most * (out.iterations - K - 1)
        assert out.drafted > 0 or most == 0
    assert 20 < sum(out.accepted for out in outs) < sum(out.drafted for out in outs) - 20


@pytest.mark.parametrize(
    ("recorded", "size", "how"),
    [
        (False, 2, {}),
        (True, 1, {}),
        (True, 2, {"temperature": 0.7, "top_p": 0.95, "frequency_penalty": 0.3}),
    ],
)
def test_texts_are_the_same_whatever_requests_of_other_depths_do(
    tiny, off, recorded: bool, size: int, how: dict
) -> None:
    requests = requests_of(OWN, **how)
    team = Team(tiny, tensor_parallel=size, **KEYS)
    depths = [depths_run(runner) for runner in team.runners]
    widths: list[int] = []
    for runner in team.runners:
        note(runner.executor.drafter, widths)
        if recorded:
            record(runner)
    outs = team.generate(requests, stagger=2)
    assert [out.tokens for out in outs] == off(requests)
    assert_drafted(outs, OWN)
    assert {0, 1, 2, K} <= set(depths[0])
    assert all(other == depths[0] for other in depths)
    assert widths == [], "depth 0 ran for nobody who drafts, so no row waited for the draft"


@pytest.mark.parametrize("recorded", [False, True])
def test_the_depth_changes_with_who_is_there_and_with_the_plan(tiny, off, recorded: bool) -> None:
    """`auto` beside requests with a number of their own: rows wait for the draft now and then."""
    requests = requests_of(OWN)
    (runner,) = Team(tiny, auto_depth=True, **KEYS).runners
    if recorded:
        record(runner)
    depths, widths = depths_run(runner), []
    note(runner.executor.drafter, widths)
    follow(runner, [K, K, 0, 0, 0, 3, 1, 0, 0, K, 2])
    outs = serve(runner, requests, stagger=2)
    assert [out.tokens for out in outs] == off(requests)
    assert set(depths) == {0, 1, 2, 3, K}
    assert max(widths) > 1
    assert all(out.drafted == 0 for out, k in zip(outs, OWN) if k == 0)
    assert sum(out.accepted for out in outs) > 20


def test_on_a_device_with_graphs_and_host_lengths(tiny, off, monkeypatch) -> None:
    requests, keys = requests_of(OWN), {**KEYS, "page_tokens": 128, "num_pages": 16}
    team = npu_team(tiny, monkeypatch, **keys)
    depths = depths_run(team.runners[0])
    outs = team.generate(requests, stagger=2)
    monkeypatch.undo()
    assert [out.tokens for out in outs] == off(requests)
    assert_drafted(outs, OWN)
    assert {0, 1, 2, K} <= set(depths)


@pytest.mark.parametrize("own", [0, 1, 2, None])
def test_a_batch_runs_as_deep_as_its_deepest_request_to_the_end(tiny, own: int | None) -> None:
    """One graph makes an answer: it does not change where the answer has few tokens left."""
    (runner,) = Team(tiny, **KEYS).runners
    record(runner)
    depths = depths_run(runner)
    requests = requests_of([own, 0, own])
    for request in requests:
        serve(runner, [request])
    assert set(depths) == {0, K if own is None else own}
    del depths[:]
    serve(runner, requests)
    assert set(depths[:10]) == {K if own is None else own}


def test_a_slot_drafts_as_well_after_a_request_without_drafts(tiny) -> None:
    """0 drafts, then K in the same slot, then both at once: the draft's cache has no holes."""
    none, deep = requests_of([0, K])
    (runner,) = Team(tiny, **{**KEYS, "max_slots": 1}).runners
    record(runner)
    alone = serve(runner, [deep])[0]
    assert len(set(alone.kept)) >= 3
    assert serve(runner, [none, deep, none, deep])[1::2] == [alone, alone]
    (runner,) = Team(tiny, **KEYS).runners
    record(runner)
    for stagger in (0, 4):
        outs = serve(runner, [none, deep, none], stagger)
        assert outs[1] == alone
        assert outs[0].drafted == outs[2].drafted == 0


def test_nobody_waits_for_drafts_that_a_request_never_takes(tiny) -> None:
    """Rows of a request without drafts do not wait for the draft, which it never needs."""
    (runner,) = Team(tiny, max_model_len=512, **KEYS).runners
    widths: list[int] = []
    note(runner.executor.drafter, widths)
    long = Sampling(max_tokens=200, ignore_eos=True, draft_tokens=0)
    deep = Sampling(max_tokens=30, ignore_eos=True)
    first, later = serve(runner, [([1, 2, 3], long), ([4, 5, 6], deep)], stagger=150)
    alone = serve(runner, [([4, 5, 6], deep)])[0]
    assert (first.iterations, later) == (199, alone)
    assert widths == []
    assert not runner.executor.slots.backlog.count.any()


def test_where_not_all_depths_are_captured_the_next_one_runs(tiny, off) -> None:
    own = (0, 1, 3, 5, 9, 16, None, 6)
    (runner,) = Team(tiny, **{**KEYS, "draft_tokens": 16, "max_slots": 1}).runners
    captured, depths = record(runner), depths_run(runner)
    requests = requests_of(own)
    outs = serve(runner, requests)
    assert [out.tokens for out in outs] == off(requests)
    assert set(depths) == {0, 1, 4, 8, 16}
    assert {key[1] for key in captured() if key[0] != "prefill"} == set(depths)
    assert all(max(out.kept) <= 1 + (16 if k is None else k) for out, k in zip(outs, own))
    assert sum(out.accepted for out in outs) > 20
