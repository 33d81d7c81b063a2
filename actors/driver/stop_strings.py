"""Texts that end an answer, searched for while the answer arrives in pieces.

    text -> feed -> True when a stop string is complete      take -> text that may be shown
What may be the beginning of a stop string is held back until the text behind it decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The text of one answer up to the first stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """stops: at least one, none empty. include: it belongs to the text, else it is dropped."""
        self._stops, self._include = stops, include
        self._held = self._ready = ""
        self.found: str | None = None
        """The one that has ended the text."""

    def feed(self, text: str, *, armed: bool = True) -> bool:
        """True when a stop string ends within `text`; all text behind it is dropped.

        Of several that end there, the one that begins first counts, and the shortest of those. Not
        armed: nothing stops, and a stop string that ends within this text never will.
        """
        before = len(self._held)
        self._held += text
        if armed:
            places = ((self._held.find(s, max(0, before - len(s) + 1)), s) for s in self._stops)
            found = [(start, len(stop), stop) for start, stop in places if start >= 0]
            if found:
                start, length, self.found = min(found)
                self._release(start + length if self._include else start)
                self._held = ""
                return True
        self._release(len(self._held) - max(map(self._num_begun, self._stops)))
        return False

    def end(self) -> None:
        """No more text will come: what was held back may be shown."""
        self._release(len(self._held))

    def take(self) -> str:
        """The text that became ready since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def _num_begun(self, stop: str) -> int:
        """Characters of `stop` that the held text ends with, fewer than all of them."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]
