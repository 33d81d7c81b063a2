"""The padding slot fills a batch up to its bucket; it never gets longer, whatever ran before it.

A padding row that stood at a long context would cost as much attention as a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.model.runner import Runner
from outrider.model.step import Sampling
from outrider.parallel.operands import Rows
from tests import checkpoints
from tests.graphs import record
from tests.ranks import Team, serve

K, NUM_NEW = 3, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text, seed=11)
    return checkpoints.write(tmp_path_factory.mktemp("padding"), text, weights)


def keep_padding_lengths(runner: Runner) -> list[int]:
    """From now on, the keys that padding attends to in each pass of target and draft."""
    slots, padding = runner.executor.slots, runner.run.max_slots
    lengths: list[int] = []
    place: Callable[..., Rows] = slots.rows

    def placing(*args: Any, **keys: Any) -> Rows:
        rows = place(*args, **keys)
        lengths.extend(rows.lengths[rows.slots == padding].tolist())
        return rows

    slots.rows = placing  # type: ignore[method-assign]
    return lengths


@pytest.mark.parametrize("captured", [False, True])
def test_the_padding_slot_stays_at_length_0(folder, captured: bool) -> None:
    """Three requests in batches of four, one after the other: the fourth row is padding."""
    team = Team(folder, draft_tokens=K, max_slots=4, batch_buckets=(4,), max_model_len=64)
    (runner,) = team.runners
    keys = record(runner) if captured else None
    lengths = keep_padding_lengths(runner)
    for start in (0, 40):
        prompts = [[start + n, 7, 9] for n in range(3)]
        outs = serve(runner, [(prompt, Sampling(max_tokens=NUM_NEW)) for prompt in prompts])
        assert all(out.drafted > 0 for out in outs)
    assert keys is None or keys()
    assert runner.executor.slots.length.tolist()[runner.run.max_slots] == 0
    assert len(lengths) > 50
    assert max(lengths) <= K + 1
