"""The life of a driver that serves one Engine over a connection, without Ray.

    open: listen -> start: the Engine connects, ranks load -> run: answer its calls until the end
An actor (driver/actor.py) carries these three calls. It remembers driver, ranks and connection.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import zmq.asyncio

from outrider.actors.cluster.shares import claim_share
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
        self._share = claim_share(setup.spec, setup.name)
        self._driver, notes = assemble(setup, self._share)
        server = DriverServer(self._connection, self._driver, self._about)
        self._serving = asyncio.ensure_future(server.serve())
        reporting = asyncio.ensure_future(server.report(lambda: self._driver.ranks.loaded_bytes))
        starting = asyncio.ensure_future(self._driver.start())
        await asyncio.wait({starting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        reporting.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            raise EngineClosedError("the engine was closed while it started")
        starting.result()
        return notes + self._driver.ranks.warnings()

    async def run(self) -> None:
        """Until the Engine says stop; then the ranks are gone."""
        try:
            await self._serving
        finally:
            await self._driver.close()
            self._share.release()

    def _about(self) -> dict[str, Any]:
        return {
            "driver": {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))},
            "ranks": self._driver.ranks.stats(),
        }
