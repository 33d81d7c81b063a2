"""The driver's end of the connection to its caller.

    EngineClient -- Ask --> DriverServer -> Driver        DriverServer -- Reply --> EngineClient
One wire carries every call of an Engine; each call has a number, which its replies carry. Ray
carries the start of the driver, errors of the start, and its death.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from outrider.actors.driver.driver import Driver
from outrider.actors.driver.messages import Ask, Failure, Reply
from outrider.actors.ranks.wire import Wire

REPORT_S = 0.2
"""Between two words on the loading progress."""


class DriverServer:
    """The driver's end: answers each Ask as Replies, until one says stop."""

    def __init__(self, wire: Wire, driver: Driver, about: Callable[[], dict[str, Any]]) -> None:
        """about: what stats() adds to the driver's own."""
        self._wire = wire
        self._driver = driver
        self._about = about
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while not (ask := await self._wire.receive_async(Ask)).stop:
            for key in ask.abort:
                self._driver.abort(key)
            if ask.call:
                call = asyncio.ensure_future(self._answer(ask))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def report(self, loaded: Callable[[], tuple[int, int]]) -> None:
        """Tell of the loading for as long as it goes on."""
        while True:
            self._wire.send(Reply(call=0, loaded=loaded()))
            await asyncio.sleep(REPORT_S)

    async def _answer(self, ask: Ask) -> None:
        with contextlib.suppress(ConnectionError):  # the caller is gone: Ray ends this process
            try:
                if ask.stats:
                    stats = self._driver.stats() | self._about()
                    self._wire.send(Reply(call=ask.call, stats=stats))
                elif ask.pieces:
                    (request,) = ask.requests
                    async for chunk in self._driver.submit(request):
                        self._wire.send(Reply(call=ask.call, chunk=chunk))
                else:
                    done = await self._driver.generate(ask.requests)
                    self._wire.send(Reply(call=ask.call, completions=done))
            except Exception as error:  # whatever it is, the caller waits for it
                self._wire.send(Reply(call=ask.call, failure=Failure.of(error)))
