"""The engine's head: admits requests, sends orders to the ranks, hands tokens to whoever waits.

    submit(Request) -> Handle ... scheduler.admit -> Orders -> ranks -> StepEvent -> Handle -> Chunk
Plain asyncio: a DriverActor, a Serve replica or a test hosts it. It never waits for a rank within
an iteration. When the ranks die, or stand still for watchdog_s while there is work, it kills them
all and every open request ends with EngineDeadError. The scheduler keeps prompt and emitted tokens
of each request, so that fresh ranks could go on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from outrider.actors.driver.handle import Handle, Tally, Text
from outrider.actors.driver.messages import Completion, Request
from outrider.actors.driver.scheduler import Limits, Scheduler
from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    RequestAbortedError,
    RequestError,
)
from outrider.actors.ranks.group import Ranks
from outrider.actors.ranks.messages import Orders
from outrider.model.step import Join, Leave, Sampling, StepEvent

log = logging.getLogger(__name__)
ORDER_TOKENS = 1 << 20
"""Prompt tokens after which a batch of Joins is split, so that Orders fit a wire."""


class Driver:
    """start() once, then submit at will; close() once. All calls from one event loop."""

    def __init__(
        self,
        limits: Limits,
        ranks: Ranks,
        *,
        watchdog_s: float = 60.0,
        load_text: Callable[[], Text | None] = lambda: None,
    ) -> None:
        """load_text runs in a thread while the ranks load; None: prompts are token ids only."""
        self.limits = limits
        self._ranks = ranks
        self._watchdog_s = watchdog_s
        self._load_text = load_text
        self._text: Text | None = None
        self._scheduler = Scheduler(limits)
        self._handles: dict[int, Handle] = {}
        self._keys: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Future[None] | None = None
        self._dead: EngineDeadError | None = None
        self._due = asyncio.Event()
        self._leaves: list[Leave] = []
        self._working = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tally = Tally(limits.draft_tokens)
        self._counts = {"submitted": 0, "finished": 0, "aborted": 0, "failed": 0}
        self._steps = 0
        self._depth = limits.draft_tokens
        self._step_s = self._busy_s = 0.0
        self._started_s = self._alive_s = self._busy_since_s = time.monotonic()

    @property
    def error(self) -> EngineDeadError | None:
        """Why no request is taken any more."""
        return self._dead

    async def start(self) -> None:
        """Ready once a token has come through every rank and wire. ConfigError, EngineDeadError."""
        starting = asyncio.ensure_future(self._ranks.start())
        try:
            pages, self._text = await asyncio.gather(starting, asyncio.to_thread(self._load_text))
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._ranks.kill()
            raise
        if pages is not None:
            self.limits = replace(self.limits, num_pages=pages)
            self._scheduler = Scheduler(self.limits)
        for work in (
            self._pump(),
            self._dispatch_due(),
            self._watch_ranks(),
            self._watch_progress(),
        ):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)
        await self.submit(Request(prompt=[0], sampling=Sampling(max_tokens=1))).result()
        self._tally = Tally(self.limits.draft_tokens)
        self._counts = dict.fromkeys(self._counts, 0)
        self._steps, self._started_s = 0, time.monotonic()
        self._step_s = self._busy_s = 0.0

    def submit(self, request: Request, news: asyncio.Event | None = None) -> Handle:
        """Queue a request. RequestError (QueueFullError) or EngineDeadError at once.

        news: an event that several handles share, for `merge`.
        """
        if self._dead is not None:
            raise self._dead
        if request.key in self._keys:
            raise RequestError(f"key {request.key!r} names an unfinished request already")
        if request.stop and self._text is None:
            raise RequestError("this checkpoint has no tokenizer: use stop_ids, not stop strings")
        if not all(request.stop):
            raise RequestError(f"stop = {list(request.stop)}: an empty text stops nothing")
        if self._scheduler.queued >= self.limits.max_queue:
            self._dispatch()  # what can leave the queue does not fill it
        entry = self._scheduler.add(self.encode(request.prompt), request.sampling)
        handle = Handle(
            entry,
            request,
            draft_tokens=self.limits.draft_tokens,
            stream=None if self._text is None else self._text.stream(),
            news=news,
        )
        self._handles[entry.request] = handle
        if request.key:
            self._keys[request.key] = entry.request
        self._counts["submitted"] += 1
        self._note_work()
        self._due.set()
        return handle

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in order. Nothing runs when one of the requests is refused."""
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
            return list(await asyncio.gather(*(handle.result() for handle in handles)))
        except RequestError as error:
            if len(requests) == 1:
                raise
            where = f"prompt {len(handles) + 1} of {len(requests)}"
            raise type(error)(f"{where}: {error}") from None
        finally:
            for handle in handles:
                self.abort(handle.request)

    def encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least 1 token")
        if self._text is None:
            raise RequestError("this checkpoint has no tokenizer: give the prompt as token ids")
        return self._text.encode(prompt)

    def abort(self, which: int | str) -> None:
        """End a request by number or key: its handle raises RequestAbortedError. Unknown: no-op."""
        request = self._keys.get(which) if isinstance(which, str) else which
        handle = self._handles.get(request) if request is not None else None
        if handle is None or self._dead is not None:
            return
        self._leave(handle.request)
        handle.fail(RequestAbortedError(f"request {handle.request} was aborted"))
        self._forget(handle, "aborted")
        self._due.set()

    def stats(self) -> dict[str, Any]:
        """Sums since start. busy_s: there was work; step_s of it: the leader was in a step."""
        now, tally, books = time.monotonic(), self._tally, self._scheduler.books
        busy_s = self._busy_s + (now - self._busy_since_s if self._working.is_set() else 0.0)
        return {
            "uptime_s": now - self._started_s,
            "busy_s": busy_s,
            **{f"requests_{name}": count for name, count in self._counts.items()},
            "queued": self._scheduler.queued,
            "active": self._scheduler.active,
            "free_pages": books.free_pages,
            "num_pages": books.num_pages,
            "draft_depth": self._depth,
            "steps": self._steps,
            "step_s": self._step_s,
            "iterations": tally.iterations,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "accepted_per_position": list(tally.per_position),
            "tokens": tally.tokens,
            "tokens_per_s": tally.tokens / busy_s if busy_s else 0.0,
        }

    async def drain(self) -> None:
        """Waits until no request is left."""
        await self._idle.wait()

    async def close(self) -> None:
        """Open requests end with EngineClosedError; returns when the ranks are gone."""
        if self._ending is not None:
            await self._ending
        await self._end(EngineClosedError("the engine was closed"), self._ranks.stop)

    async def _pump(self) -> None:
        while True:
            event = await self._ranks.event()
            self._take(event)

    def _take(self, event: StepEvent) -> None:
        self._alive_s = time.monotonic()
        self._steps += 1
        self._step_s += event.step_s
        self._depth = self.limits.draft_tokens if event.depth is None else event.depth
        ended = False
        for progress in event.progress:
            entry = self._scheduler.advance(progress)
            handle = self._handles.get(progress.request)
            if entry is None or handle is None:
                continue  # aborted while this step ran
            booked = handle.push(progress)
            self._tally.add(booked)
            if booked.finish is not None:
                if entry.finish is None:  # a stop string: the ranks do not know of the end yet
                    self._leave(entry.request)
                entry.finish = booked.finish
                self._forget(handle, "finished")
                ended = True
        if ended:
            self._dispatch()

    async def _dispatch_due(self) -> None:
        """One dispatch for all that is submitted and aborted in a turn of the loop."""
        while True:
            await self._due.wait()
            self._due.clear()
            self._dispatch()

    def _dispatch(self) -> None:
        """Send the aborts, then whatever can be admitted: it may get what they gave back."""
        batch: list[Join | Leave] = list(self._leaves)
        self._leaves.clear()
        size = 0
        for join in self._scheduler.admit():
            batch.append(join)
            self._handles[join.request].joined.set()
            size += len(join.tokens)
            if size > ORDER_TOKENS:
                self._ranks.post(Orders(commands=batch))
                batch, size = [], 0
        if batch:
            self._ranks.post(Orders(commands=batch))

    def _leave(self, request: int) -> None:
        leave = self._scheduler.abort(request)
        if leave is not None:
            self._leaves.append(leave)

    def _forget(self, handle: Handle, why: str) -> None:
        self._counts[why] += 1
        del self._handles[handle.request]
        handle.joined.set()
        self._keys.pop(handle.key, None)
        self._note_work()

    def _note_work(self) -> None:
        """Keep the clocks of the watchdog and of busy time."""
        now, working = time.monotonic(), bool(self._handles)
        if working and not self._working.is_set():
            self._alive_s = self._busy_since_s = now
            self._working.set()
            self._idle.clear()
        elif not working and self._working.is_set():
            self._busy_s += now - self._busy_since_s
            self._working.clear()
            self._idle.set()

    async def _watch_ranks(self) -> None:
        raise await self._ranks.ended()

    async def _watch_progress(self) -> None:
        while True:
            await self._working.wait()
            left_s = self._alive_s + self._watchdog_s - time.monotonic()
            if left_s <= 0:
                raise EngineDeadError(
                    f"the ranks made no step for {self._watchdog_s:g} s with "
                    f"{self._scheduler.active} requests in work (ray.watchdog_s); they were killed"
                )
            await asyncio.sleep(left_s)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Whatever ends one of the background tasks ends the engine."""
        if task.cancelled() or self._dead is not None:
            return
        error = task.exception()
        if not isinstance(error, EngineDeadError):
            log.error("the driver failed", exc_info=error)
            error = EngineDeadError(f"the driver failed: {type(error).__name__}: {error}")
        self._ending = asyncio.ensure_future(self._end(error, self._ranks.kill))

    async def _end(
        self, error: EngineDeadError, finish: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        if self._dead is None:
            self._dead = error
            for handle in list(self._handles.values()):
                handle.fail(error)
                self._forget(handle, "failed")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await finish()
