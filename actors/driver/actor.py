"""The driver in a Ray worker process of its own, for scripts and jobs.

    open -> start -> run: three calls, of which run is one long one
No method is async: a Ray worker whose main thread is free wakes a hundred times a second.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import zmq.asyncio

from outrider.actors.driver.assembly import DriverSetup, assemble
from outrider.actors.driver.server import DriverServer
from outrider.actors.errors import EngineClosedError
from outrider.actors.ranks.connection import Address, Connector
from outrider.actors.ranks.messages import Hello


class DriverProcess:
    """A Driver, its ranks and its server, from open to the end. Plain: it needs no actor."""

    async def open(self, here: bool, host: str) -> Address:
        """Where to reach this driver. here: its Engine is on this machine; host: address if not."""
        self._connector = Connector(zmq.asyncio.Context(io_threads=1), limit_bytes=-1)
        self._connection, address = self._connector.listen(None if here else host)
        return address

    async def start(self, setup: DriverSetup) -> list[str]:
        """Returns when requests may come, with warnings for the user. EngineClosedError when the
        Engine says stop before that."""
        await self._connection.receive_async(Hello)
        self._connector.remove_folder()
        self._ranks, self._driver, notes = assemble(setup)
        server = DriverServer(self._connection, self._driver, self._about)
        self._serving = asyncio.ensure_future(server.serve())
        reporting = asyncio.ensure_future(server.report(lambda: self._ranks.loaded_bytes))
        starting = asyncio.ensure_future(self._driver.start())
        await asyncio.wait({starting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        reporting.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            raise EngineClosedError("the engine was closed while it started")
        starting.result()
        return notes + self._ranks.warnings()

    async def run(self) -> None:
        """Until the Engine says stop; then the ranks are gone."""
        try:
            await self._serving
        finally:
            await self._driver.close()

    def _about(self) -> dict[str, Any]:
        return {
            "driver": {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))},
            "ranks": self._ranks.stats(),
        }


@ray.remote
class DriverActor:
    """DriverProcess in a Ray worker process: open, start, run. It owns the ranks.

    A single async method would make Ray give it a loop of its own, and the main thread to itself.
    """

    _process: DriverProcess
    _loop: asyncio.AbstractEventLoop

    def open(self, node: str) -> Address:
        """Where this driver listens for the process on Ray node `node`."""
        self._process, self._loop = DriverProcess(), asyncio.new_event_loop()
        here = node == ray.get_runtime_context().get_node_id()
        return self._loop.run_until_complete(
            self._process.open(here, ray.util.get_node_ip_address())
        )

    def start(self, setup: DriverSetup) -> list[str]:
        """Returns when requests may come, with what the user should be warned of."""
        return self._loop.run_until_complete(self._process.start(setup))

    def run(self) -> None:
        """The one long call: until the caller says stop."""
        self._loop.run_until_complete(self._process.run())
