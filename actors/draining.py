"""How a replica ends what it has under way, whoever ends it: `serve delete`, scaling, a signal.

    Serve ends the replica -> on_shutdown -> drain: refuse, wait for drain_timeout_s, cut -> __del__
Serve itself tells a replica nothing until its requests have ended, and kills it if that takes
longer than its own limit: their clients would see a connection that breaks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from outrider.actors.http.endpoints import Endpoints

POLL_S = 0.2
"""Between two looks at how many requests are still open."""
MARGIN_S = 10.0
"""Serve's own limit is so much longer: for requests that are cut, and for ranks that end."""


async def drain(endpoints: Endpoints, timeout_s: float) -> None:
    """Refuse new requests; those under way may go on for timeout_s, and end with an error then."""
    deadline_s = time.monotonic() + timeout_s
    while endpoints.drain() and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
    endpoints.drain(cut=True)


def on_shutdown(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do this when Serve begins to end the replica of this process, beside what Serve does."""
    from ray.serve._private.replica import Replica

    shut_down = Replica.perform_graceful_shutdown

    async def perform_graceful_shutdown(self: Replica) -> None:
        working = asyncio.ensure_future(work())
        await shut_down(self)
        working.cancel()

    Replica.perform_graceful_shutdown = perform_graceful_shutdown
