"""The life of the ranks: one group of them works at a time, and one that is lost is replaced.

    start -> group -> lost: a rank died, failed or makes no step -> killed -> next group -> ...
Each group has sockets of its own, so nothing that an old one says is ever read. What was to be done
goes on from what the driver holds (Scheduler.suspend_all). Too many losses within a while, or ranks
that cannot be started any more for a reason that the user must mend, end the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from outrider.actors.cluster.spec import RecoverySpec
from outrider.actors.errors import EngineDeadError
from outrider.actors.ranks.group import Ranks, RanksLostError
from outrider.actors.ranks.messages import Commands
from outrider.model.config import ConfigError
from outrider.model.step import StepEvent

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""While there is work: the longest time between two looks at whether a step is overdue. What limit
counts may change in between."""


class Work(Protocol):
    """What the ranks work for: the driver's side of each change."""

    @property
    def num_running(self) -> int:
        """Requests that the ranks have in their slots."""
        ...

    @property
    def prefilling(self) -> bool:
        """Whether one of those has got no token since it joined."""
        ...

    def apply(self, event: StepEvent) -> None: ...

    def lost(self, error: EngineDeadError) -> bool:
        """The ranks are gone; -> whether a request was found to blame. It has ended."""
        ...

    def ready(self, num_pages: int | None) -> None:
        """Commands may be sent. num_pages: that each rank holds; None: as planned."""
        ...


class Supervisor:
    """start() once, then run() until the end; close() or kill() once."""

    def __init__(self, new_ranks: Callable[[], Ranks], limits: RecoverySpec, work: Work) -> None:
        """new_ranks: a group that has not started, another one at each call."""
        self._new_ranks = new_ranks
        self._limits = limits
        self._work = work
        self.ranks = new_ranks()
        """The group that works, or is on its way."""
        self.is_ready = False
        """Whether commands may be sent."""
        self.num_recoveries = 0
        self.recovery_s = self.last_recovery_s = 0.0
        """From a loss to ranks that are ready again: of all recoveries, and of the last."""
        self._losses: deque[float] = deque()
        """Times of losses within window_s that no request was found to blame for."""
        self._last_sign_s = 0.0
        self._sent = asyncio.Event()
        """Something was sent since there was no work."""

    async def start(self) -> None:
        """Returns when commands may be sent. ConfigError, EngineDeadError.

        A rank that died or hung is started again; one that failed would fail again.
        """
        while True:
            try:
                return await self._begin()
            except RanksLostError as error:
                self._note_loss(error)
                self.ranks = self._new_ranks()

    async def run(self) -> None:
        """Keep the ranks at work. EngineDeadError when they are lost for good."""
        while True:
            error = await self._until_lost()
            started_s = time.monotonic()
            await self._recover(error)
            self.last_recovery_s = time.monotonic() - started_s
            self.recovery_s += self.last_recovery_s
            self.num_recoveries += 1
            log.warning("the ranks are ready again after %.1f s", self.last_recovery_s)

    def send(self, commands: Commands) -> None:
        assert self.is_ready, "no ranks are ready for commands"
        self._last_sign_s = time.monotonic()
        self._sent.set()
        self.ranks.send(commands)

    async def stop(self) -> None:
        """Let the ranks leave, or kill them. run() must have ended."""
        self.is_ready = False
        await self.ranks.stop()

    async def kill(self) -> None:
        """The same, without asking them."""
        self.is_ready = False
        await self.ranks.kill()

    async def _begin(self) -> None:
        """Start the ranks; if it fails, none is left."""
        try:
            pages = await self.ranks.start()
        except BaseException:
            await self.ranks.kill()
            raise
        self._last_sign_s = time.monotonic()
        self.is_ready = True
        self._work.ready(pages)

    async def _recover(self, error: EngineDeadError) -> None:
        """Kill what is left of the ranks and start others, until they are ready."""
        self.is_ready = False
        blamed = self._work.lost(error)
        killing = asyncio.ensure_future(self.ranks.kill())
        try:
            await asyncio.shield(killing)
        except asyncio.CancelledError:  # the engine is closed: not before they are gone
            await killing
            raise
        if blamed:
            self._losses.clear()
        else:
            self._note_loss(error)
        while True:
            self.ranks = self._new_ranks()
            try:
                return await self._begin()
            except ConfigError as refusal:
                raise EngineDeadError(f"the ranks cannot be started again: {refusal}") from None
            except EngineDeadError as problem:
                self._note_loss(problem)

    def _note_loss(self, error: EngineDeadError) -> None:
        """Log a loss. EngineDeadError when there were too many of late."""
        now, limits = time.monotonic(), self._limits
        self._losses.append(now)
        while self._losses[0] < now - limits.window_s:
            self._losses.popleft()
        if len(self._losses) > limits.max_losses:
            raise EngineDeadError(
                f"{error} (loss {len(self._losses)} of the ranks within recovery.window_s = "
                f"{limits.window_s:g} s: recovery.max_losses = {limits.max_losses})",
                error.detail,
            )
        log.warning("the ranks are lost and will be started again: %s", error)

    async def _until_lost(self) -> EngineDeadError:
        """Hand on the steps of the ranks until they are lost; -> why. Nothing of them is read after
        that."""
        watching = self.ranks.ended(), self._hang()
        tasks = [asyncio.ensure_future(self._pump()), *map(asyncio.ensure_future, watching)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self) -> EngineDeadError:
        while True:
            try:
                event = await self.ranks.event()
            except EngineDeadError as error:
                return error
            self._last_sign_s = time.monotonic()
            self._work.apply(event)

    async def _hang(self) -> EngineDeadError:
        """Returns when the ranks have had work and made no step for too long."""
        while True:
            running = self._work.num_running
            if not running:
                self._sent.clear()
                await self._sent.wait()
                continue
            key = "prefill_s" if self._work.prefilling else "decode_s"
            limit_s = getattr(self._limits, key)
            left_s = self._last_sign_s + limit_s - time.monotonic()
            if left_s <= 0:
                return EngineDeadError(
                    f"the ranks made no step for {limit_s:g} s with {running} requests running "
                    f"(recovery.{key}); they were killed"
                )
            await asyncio.sleep(min(left_s, LOOK_S))
