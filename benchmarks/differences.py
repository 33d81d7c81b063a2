"""Where two answers to one prompt first differ, and how close the two likeliest tokens were there.

    answer, expected answer -> first_difference -> position -> top2_margin of the text up to it

A margin near 0 is a tie that rounding decides, as happens in bfloat16; a large one is a fault.
Benchmarks and tests report it wherever outputs of two ways to run are compared and differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

TokenIds = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token at which an answer is not the expected one."""

    answer: int
    """Index of the answer among those compared."""
    position: int
    """Of the token in the answer."""
    margin: float
    """Logit of the likeliest token there less that of the second."""


def first_difference(answer: TokenIds, expected: TokenIds) -> int | None:
    """Position of the first token that differs or that one of them lacks; None: they are equal."""
    pairs = zip_longest(answer, expected, fillvalue=None)
    return next((at for at, (got, right) in enumerate(pairs) if got != right), None)


def find_differences(
    compared: Iterable[tuple[TokenIds, TokenIds, TokenIds]],
    top2_margin: Callable[[list[int]], float],
) -> list[Difference]:
    """compared: (prompt, answer, expected answer) of each request.

    top2_margin: token ids -> the margin of the token that follows them.
    """
    found = []
    for index, (prompt, answer, expected) in enumerate(compared):
        position = first_difference(answer, expected)
        if position is not None:
            margin = top2_margin([*prompt, *expected[:position]])
            found.append(Difference(answer=index, position=position, margin=round(margin, 4)))
    return found


def margin_of(log_probs: Sequence[tuple[int, float]]) -> float:
    """log_probs: (id, log probability) of a token, then of the two likeliest ones."""
    (_, first), (_, second) = log_probs[1:3]
    return first - second
