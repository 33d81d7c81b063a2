"""Which prompt tokens a step runs: a budget that holds with padding, the oldest request first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from outrider.model.config import RunConfig
from outrider.model.prefill import PaddedSpans, PrefillPolicy
from outrider.model.running import RunningRequest
from outrider.model.step import Join, Sampling
from outrider.parallel.device import Capabilities

KINDS = {
    "any shape": Capabilities(),
    "captured": Capabilities(graphs=True),
    "lengths on the host": Capabilities(graphs=True, host_lengths=True),
}


def policy(kind: str, budget: int) -> PrefillPolicy:
    return PrefillPolicy.of(RunConfig(model_dir="", prefill_chunk=budget), KINDS[kind])


def requests(lengths: Sequence[int]) -> list[RunningRequest]:
    return [
        RunningRequest(
            Join(slot=i, request=i, tokens=[0] * n, pages=[], sampling=Sampling()), draft_tokens=0
        )
        for i, n in enumerate(lengths)
    ]


def shape(groups: list[PaddedSpans]) -> list[tuple[list[tuple[int, int, int]], int]]:
    """Of each group: (slot, start, stop) of its spans, and its width."""
    return [([(s.request.slot, s.start, s.stop) for s in g.spans], g.width) for g in groups]


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_runs_more_rows_than_the_budget(kind: str) -> None:
    """A prompt of 1 token, then one of 512: with 512 rows a step, 576 would have run."""
    groups = policy(kind, 512).next_chunks(requests([1, 512]))
    assert sum(group.num_rows for group in groups) <= 512


@given(
    kind=some.sampled_from(list(KINDS)),
    budget=some.integers(1, 5000),
    lengths=some.lists(some.integers(1, 6000), min_size=1, max_size=8),
)
def test_every_prompt_runs_once_in_order_and_within_the_budget(
    kind: str, budget: int, lengths: list[int]
) -> None:
    rule, left, done = policy(kind, budget), requests(lengths), [0] * len(lengths)
    while left:
        groups = rule.next_chunks(left)
        assert 0 < sum(group.num_rows for group in groups) <= budget
        for group in groups:
            assert all(0 < span.count <= group.width for span in group.spans)
            assert not rule.widths or group.width in rule.widths
            for span in group.spans:
                assert span.request is left[0] or kind == "any shape"
                assert span.start == done[span.request.slot]
                span.request.launch_prompt(span.count)
                done[span.request.slot] = span.stop
            left = [request for request in left if request.prompt_left]
    assert done == lengths


def test_any_shape_is_one_chunk_padded_to_its_longest_span() -> None:
    groups = policy("any shape", 32).next_chunks(requests([3, 9, 10, 1]))
    assert shape(groups) == [([(0, 0, 3), (1, 0, 9), (2, 0, 10)], 10)]


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    groups = policy("any shape", 32).next_chunks(requests([3, 20, 1]))
    assert shape(groups) == [([(0, 0, 3)], 3)]


def test_captured_chunks_hold_one_span_and_have_a_captured_width() -> None:
    groups = policy("captured", 512).next_chunks(requests([1, 300, 200]))
    assert shape(groups) == [
        ([(0, 0, 1)], 64),
        ([(1, 0, 256)], 256),
        ([(1, 256, 300)], 64),
        ([(2, 0, 128)], 128),
    ]


def test_a_prompt_longer_than_the_widest_graph_takes_several_chunks() -> None:
    groups = policy("captured", 8192).next_chunks(requests([5000]))
    assert [group.width for group in groups] == [2048, 2048, 1024]
    assert groups[-1].spans[0].ends_prompt


def test_lengths_on_the_host_need_no_padding() -> None:
    groups = policy("lengths on the host", 512).next_chunks(requests([1, 300, 400]))
    assert shape(groups) == [([(0, 0, 1)], 1), ([(1, 0, 300)], 300), ([(2, 0, 211)], 211)]


def test_a_prompt_goes_on_where_it_stopped() -> None:
    (request,) = requests([40])
    request.launch_prompt(32)
    groups = policy("any shape", 32).next_chunks([request])
    assert shape(groups) == [([(0, 32, 40)], 8)]
    assert not request.in_flight
    request.launch_prompt(8)
    assert request.in_flight == 1
