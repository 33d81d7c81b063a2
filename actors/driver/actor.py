"""The driver as a Ray actor, for scripts and jobs: a line a method over driver/process.py.

    open -> start -> run: three calls, of which run is one long one
No method is async: a Ray worker whose main thread is free wakes a hundred times a second. As in
ranks/actor.py, a method imports what it needs, after __init__ has settled from where.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from outrider.actors.driver.assembly import DriverSetup
    from outrider.actors.driver.process import DriverProcess
    from outrider.actors.ranks.connection import Address


@ray.remote
class DriverActor:
    """DriverProcess in a Ray worker process: open, start, run. It owns the ranks.

    A single async method would make Ray give it a loop of its own, and the main thread to itself.
    """

    _process: DriverProcess
    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        from outrider.actors.cluster.imports import isolate_worker

        isolate_worker()

    def open(self, node: str) -> Address:
        """Where this driver listens for the process on Ray node `node`."""
        from outrider.actors.driver.process import DriverProcess

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
