"""Sequences that an answer may not hold: masks that forbid their last tokens, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.model.banned import BannedSequences
from outrider.model.step import Grammar, Sampling


@given(
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, 3), max_size=12),
    cut=st.integers(0, 12),
)
def test_a_token_is_banned_where_it_would_complete_a_sequence(
    sequences: list[list[int]], tokens: list[int], cut: int
) -> None:
    """However much of the answer is committed and how much is drafted, after a return as well."""
    matcher = BannedSequences(sequences, tokens[: cut // 2], vocab_size=11)
    matcher.commit(tokens[cut // 2 : cut])
    ahead = matcher.look_ahead(tokens[cut:], most=5)
    assert ahead.drafts == tokens[cut:][: len(ahead.drafts)]
    assert len(ahead.masks) == len(ahead.drafts) + 1
    for row, mask in enumerate(ahead.masks):
        allowed = np.unpackbits(mask, bitorder="little")
        assert not allowed[11:].any()
        before = tokens[: cut + row]
        for token in range(11):
            said = [*before, token]
            ends = any(said[-len(one) :] == one for one in sequences)
            assert allowed[token] == (not ends)
    left = tokens[cut:][len(ahead.drafts) :]
    if left and len(ahead.drafts) < 5:
        assert not np.unpackbits(ahead.masks[-1], bitorder="little")[left[0]]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"banned_sequences": ((5,),)}, "2 to 2048 token ids"),
        ({"banned_sequences": ((5, -1),)}, "2 to 2048 token ids"),
        ({"banned_sequences": ((5, 6),) * 129}, "at most 128 sequences"),
        ({"banned_sequences": ((5, 6),), "allowed_ids": (5,)}, "not together with allowed_ids"),
        ({"banned_sequences": ((5, 6),), "grammar": Grammar("regex", "a")}, "not together with a"),
    ],
)
def test_what_breaks_a_rule_is_named(changes: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Sampling(**changes)
