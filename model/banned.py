"""Sequences of tokens that an answer may not hold: which tokens may follow it, row by row.

    answer, drafts -> BannedSequences.look_ahead -> LookAhead: the drafts that it leaves, masks
    committed tokens -> BannedSequences.commit
A token is banned where it would complete a sequence. It stands in the place of a grammar's Matcher
(grammar.py). It remembers as many of the last tokens as the longest sequence has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from outrider.model.grammar import LookAhead


class BannedSequences:
    """What one request may not say."""

    def __init__(
        self, sequences: Sequence[Sequence[int]], emitted: Sequence[int], vocab_size: int
    ) -> None:
        """sequences: each of two tokens or more. emitted: the answer so far."""
        self._all = np.packbits(np.ones(vocab_size, dtype=np.uint8), bitorder="little")
        self._lasts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for sequence in sequences:
            self._lasts[tuple(sequence[:-1])].append(sequence[-1])
        self._lengths = sorted({len(before) for before in self._lasts})
        self._tokens = self._ends(emitted)

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        self._tokens = self._ends([*self._tokens, *tokens])

    def look_ahead(self, drafts: Sequence[int], most: int) -> LookAhead:
        """Follow the drafts up to the first that is banned. most: of them at most."""
        tokens, taken = list(self._tokens), []
        banned = self._banned(tokens)
        masks = [self._mask(banned)]
        for draft in drafts[:most]:
            if draft in banned:
                break
            taken.append(draft)
            tokens.append(draft)
            banned = self._banned(tokens)
            masks.append(self._mask(banned))
        return LookAhead(taken, np.stack(masks))

    def _ends(self, tokens: Sequence[int]) -> list[int]:
        """As many of the last tokens as decide what is banned."""
        return list(tokens[-self._lengths[-1] :])

    def _banned(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that would complete a sequence behind these."""
        ends = (tuple(tokens[-length:]) for length in self._lengths if length <= len(tokens))
        return {last for end in ends for last in self._lasts.get(end, ())}

    def _mask(self, banned: set[int]) -> np.ndarray:
        mask = self._all.copy()
        for token in banned:
            mask[token // 8] &= 255 ^ (1 << (token % 8))
        return mask
