"""The driver's end of the connection to its Engine.

    Connection -> Call -> DriverServer -> Driver        DriverServer -> Reply -> Connection
One connection carries all calls of an Engine at once; each has a number, which its replies carry.
Ray carries the start of the driver, the errors of the start, and its death.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

from outrider.actors.driver.driver import Driver
from outrider.actors.driver.messages import (
    Abort,
    Answered,
    Call,
    Completed,
    Completion,
    Failed,
    Failure,
    Generate,
    GetStats,
    LoadProgress,
    Stats,
    Stop,
    Stream,
    Streamed,
)
from outrider.actors.ranks.connection import Connection

REPORT_S = 0.2
"""Seconds between two reports of the loading progress."""


class DriverServer:
    """Answers each call with its replies, until one says stop."""

    def __init__(
        self, connection: Connection, driver: Driver, about: Callable[[], dict[str, Any]]
    ) -> None:
        """about: what GetStats adds to the driver's own statistics."""
        self._connection = connection
        self._driver = driver
        self._about = about
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while True:
            call: Call = await self._connection.receive_async(cast(Any, Call))
            match call:
                case Stop():
                    return
                case Abort(keys=keys):
                    for key in keys:
                        self._driver.abort(key)
                case _:
                    answering = asyncio.ensure_future(self._answer(call))
                    self._answering.add(answering)
                    answering.add_done_callback(self._answering.discard)

    async def report(self, loaded: Callable[[], tuple[int, int]]) -> None:
        """Send the loading progress until this task is cancelled."""
        while True:
            done_bytes, total_bytes = loaded()
            self._connection.send(LoadProgress(done_bytes, total_bytes))
            await asyncio.sleep(REPORT_S)

    async def _answer(self, call: Generate | Stream | GetStats) -> None:
        with contextlib.suppress(ConnectionError):  # the caller is gone: Ray ends this process
            try:
                match call:
                    case GetStats():
                        stats = self._driver.stats() | self._about()
                        self._connection.send(Stats(call.call, stats))
                    case Stream(request=request):
                        await self._driver.check_grammar(request.sampling.grammar)
                        async for chunk in self._driver.submit(request):
                            self._connection.send(Streamed(call.call, chunk))
                    case Generate(requests=requests):

                        def tell(index: int, completion: Completion) -> None:
                            self._connection.send(Answered(call.call, index, completion))

                        await self._driver.generate(requests, tell)
                        self._connection.send(Completed(call.call))
            except Exception as error:  # whatever it is, the caller waits for it
                self._connection.send(Failed(call.call, Failure.of(error)))
