"""What benchmarks and tests say of answers that differ: where, and how close it was."""

from __future__ import annotations

import pytest

from outrider.benchmarks.differences import Difference, find_differences, first_difference
from outrider.model.step import Sampling
from tests.ranks import Team


def test_a_missing_token_is_a_difference_and_equal_answers_have_none() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_the_margin_is_that_of_the_two_likeliest_tokens_at_the_first_difference(
    planted_tiny,
) -> None:
    team, prompt = Team(planted_tiny, draft_tokens=0), [5, 9, 17]
    (out,) = team.generate([(prompt, Sampling(max_tokens=6, logprobs=2))])
    wrong = [*out.tokens[:4], out.tokens[4] + 1, out.tokens[5]]
    compared = [(prompt, out.tokens, out.tokens), (prompt, wrong, out.tokens)]
    (found,) = find_differences(compared, team.top2_margin)
    (_, first), (_, second) = out.logprobs[4][1:]
    margin = pytest.approx(first - second, abs=1e-3)
    assert (found.answer, found.position, found.margin) == (1, 4, margin)
    assert found.margin > 1, "a planted checkpoint leaves no doubt"
    with pytest.raises(AssertionError, match="position=4, margin="):
        team.assert_same(prompt, wrong, out.tokens)


def test_no_margin_is_asked_for_where_nothing_differs() -> None:
    assert find_differences([([1], [2, 3], [2, 3])], lambda tokens: 1 / 0) == []
    found = find_differences([([1], [2], [3])], lambda tokens: float(tokens == [1]))
    assert found == [Difference(answer=0, position=0, margin=1.0)]
