"""What the caller of a request waits on.

    Handle: iterate over chunks, or await the whole result      merge: the chunks of several handles
The driver sets the event of a handle whenever its request has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.driver.request import Request


class Handle:
    """One request as its caller sees it. Tokens that arrive while the caller is busy are one chunk.

    Iterating and awaiting raise what ended the request, if it has no complete answer.
    """

    def __init__(self, request: Request, changed: asyncio.Event) -> None:
        """changed: set whenever the request has changed; several handles may share it."""
        self.request = request
        self.changed = changed
        self._complete = False

    def take(self) -> Chunk | None:
        """What has come since the last chunk; None when nothing has."""
        chunk = self.request.take()
        self._complete = chunk is not None and chunk.finish_reason is not None
        return chunk

    async def slot_or_end(self) -> None:
        """Returns once the request has had a slot, or has ended. Nobody else may wait meanwhile."""
        while not (self.request.was_admitted or self.request.ended):
            await self.changed.wait()
            self.changed.clear()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._complete:
            raise StopAsyncIteration
        while (chunk := self.take()) is None:
            await self.changed.wait()
            self.changed.clear()
        return chunk

    async def result(self) -> Completion:
        """All of the answer that no iteration has taken yet; normally all of it."""
        return self.request.completion([chunk async for chunk in self])


async def merge(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of handles that share one event, as they come, each with its handle's index."""
    unfinished = dict(enumerate(handles))
    while unfinished:
        is_news = False
        for index, handle in list(unfinished.items()):
            chunk = handle.take()
            if chunk is not None:
                is_news = True
                if chunk.finish_reason is not None:
                    del unfinished[index]
                yield index, chunk
        if unfinished and not is_news:  # one signal may tell of tokens and of the error behind them
            changed = handles[0].changed
            await changed.wait()
            changed.clear()
