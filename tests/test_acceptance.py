"""Drafts of sampled requests are drawn with the noise of the target's rows: more of them survive.

On the bundled checkpoint at temperature 1, where `python -m outrider.benchmarks.acceptance` counts
over more tokens (docs/benchmarks.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.benchmarks import acceptance

SEEDS, NUM_NEW = 2, 64


@pytest.mark.parametrize(("argmax", "first"), [(False, (0.5, 0.65)), (True, (0.3, 0.45))])
def test_so_many_first_drafts_are_accepted(
    repo: Path, argmax: bool, first: tuple[float, float]
) -> None:
    """Drafts that were drawn with other noise would be accepted in 0.29 of the passes."""
    model = repo / "examples" / "tiny"
    prompts = acceptance.held_out_prompts(model)
    runner = acceptance.open_runner(model, prompts, 3, NUM_NEW, argmax)
    counts, texts = acceptance.measure(runner, prompts, {"temperature": 1.0}, SEEDS, NUM_NEW)
    assert counts["tokens"] == len(prompts) * SEEDS * NUM_NEW
    least, most = first
    assert least <= counts["accepted_by_position"][0] <= most
    assert len({tuple(text) for text in texts}) == len(texts)


def test_acceptance_by_position_counts_the_passes_that_drafted_so_far() -> None:
    passes = [(3, 3), (3, 1), (3, 0), (1, 1), (0, 0)]
    assert acceptance.by_position(passes, 3) == [0.75, 0.3333, 0.3333]
