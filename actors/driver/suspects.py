"""Which request ends the ranks, if one does: suspects run alone, one after the other.

    note_loss(requests in slots) -> the culprit, or None       first -> who runs next, and alone
A loss of the ranks may have nothing to do with requests: a process was killed, a device broke. So
presence alone proves nothing. Suspect is who was in a slot at two losses in a row and hardly got on
in between. To be cleared it needs a few tokens, which is a moment's work; so the culprit among any
number of suspects is found at the price of two more losses, at which it was alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.actors.driver.request import Request

SUSPECT_LOSSES, CULPRIT_LOSSES = 2, 2
"""Losses in a row, without getting on in between, that make a request suspect; and those at which
it was alone that make it the culprit."""


class Suspects:
    """The requests that must run alone before anything else runs."""

    def __init__(self, enough_tokens: int) -> None:
        """enough_tokens: who got so many since it joined has got on. After a loss the ranks make a
        few tokens again that they had not delivered before: those are to be fewer."""
        self._enough_tokens = enough_tokens
        self._requests: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def first(self) -> Request:
        """The oldest suspect, whose turn it is."""
        return self._requests[min(self._requests)]

    def note_loss(self, running: Sequence[Request]) -> Request | None:
        """The ranks were lost while these requests were in slots; -> the one that is to blame."""
        is_alone = len(running) == 1
        for request in running:
            if self._got_on(request):
                request.losses = request.losses_alone = 0
            request.losses += 1
            request.losses_alone = request.losses_alone + 1 if is_alone else 0
            if request.losses >= SUSPECT_LOSSES:
                self._requests[request.number] = request
            else:
                self._requests.pop(request.number, None)
        if is_alone and running[0].losses_alone >= CULPRIT_LOSSES:
            return running[0]
        return None

    def note_progress(self, request: Request) -> bool:
        """A request got tokens or ended; -> whether that clears it, so that the next one's turn
        has come."""
        if request.number not in self._requests or not (request.ended or self._got_on(request)):
            return False
        self.drop(request)
        return True

    def drop(self, request: Request) -> None:
        """It is not suspect any more, or was not."""
        if self._requests.pop(request.number, None) is not None:
            request.losses = request.losses_alone = 0

    def clear(self) -> None:
        self._requests.clear()

    def _got_on(self, request: Request) -> bool:
        return request.num_since_join >= self._enough_tokens
