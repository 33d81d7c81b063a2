"""The driver in a process of its own, and the line that its caller speaks to it on.

    Engine -> Line (a thread) -- Ask --> Desk -> Driver        Line <-- Reply -- Desk
One wire carries every call of an Engine, numbered; each call of a Line waits for its own replies.
Ray carries birth, start-up errors and death. No actor method is async and run() is one long call:
a Ray worker whose main thread is free wakes a hundred times a second.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
import zmq.asyncio
from ray.util.placement_group import PlacementGroup

from actors.driver import Driver, Text
from actors.messages import (
    Address,
    Ask,
    Chunk,
    Completion,
    EngineClosedError,
    EngineDeadError,
    Failure,
    Hello,
    Postbox,
    Reply,
    Request,
    RequestError,
    Wire,
)
from actors.ranks import RankGroup
from actors.scheduler import Limits
from actors.spec import Spec
from model.config import RunConfig
from parallel.affinity import pin_process

HELLO = Hello(epoch=0, rank=-1)
REPORT_S = 0.2
"""Between two words on the loading progress."""


class Desk:
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


@dataclass(frozen=True, kw_only=True)
class DriverSetup:
    """All that a DriverActor is told."""

    spec: Spec
    run: RunConfig
    limits: Limits
    placement: PlacementGroup
    name: str


def assemble(setup: DriverSetup) -> tuple[RankGroup, Driver, list[str]]:
    """The driver of this process, pinned, and its ranks, not started; and what to warn of."""
    spec = setup.spec
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpus, mine = spec.rank_cpu_sets(), spec.driver_cpu_set()
    if mine is not None:
        pin_process(mine)
    ranks = RankGroup(spec, setup.run, setup.placement, cpus=cpus, name=setup.name)
    driver = Driver(
        setup.limits,
        ranks,
        watchdog_s=spec.ray.watchdog_s,
        load_text=lambda: load_text(Path(setup.run.model_dir)),
    )
    return ranks, driver, [str(warning.message) for warning in caught]


class DriverLife:
    """A Driver, its ranks and its desk, from open to stop."""

    async def open(self, here: bool, host: str) -> Address:
        self._post = Postbox(zmq.asyncio.Context(io_threads=1), limit_bytes=-1)
        self._wire, address = self._post.listen(None if here else host)
        return address

    async def start(self, setup: DriverSetup) -> list[str]:
        await self._wire.receive_async(Hello)
        self._post.hide()
        self._ranks, self._driver, notes = assemble(setup)
        desk = Desk(self._wire, self._driver, self._about)
        self._serving = asyncio.ensure_future(desk.serve())
        telling = asyncio.ensure_future(desk.report(lambda: self._ranks.loaded_bytes))
        starting = asyncio.ensure_future(self._driver.start())
        await asyncio.wait({starting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            raise EngineClosedError("the engine was closed while it started")
        starting.result()
        return notes + self._ranks.notes()

    async def run(self) -> None:
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
    """DriverLife in a Ray worker process, for scripts and jobs: open, start, run. Owns the ranks.

    A single async method would make Ray give it a loop of its own, and the main thread to itself.
    """

    _life: DriverLife
    _loop: asyncio.AbstractEventLoop

    def open(self, node: str) -> Address:
        """Where this driver listens for the process on Ray node `node`."""
        self._life, self._loop = DriverLife(), asyncio.new_event_loop()
        here = node == ray.get_runtime_context().get_node_id()
        return self._loop.run_until_complete(self._life.open(here, ray.util.get_node_ip_address()))

    def start(self, setup: DriverSetup) -> list[str]:
        """Returns when requests may come, with what the user should be warned of."""
        return self._loop.run_until_complete(self._life.start(setup))

    def run(self) -> None:
        """The one long call: until the caller says stop."""
        self._loop.run_until_complete(self._life.run())


def load_text(model_dir: Path) -> Text | None:
    """The checkpoint's tokenizer, or None where it has none (then prompts are token ids)."""
    from model.text import Tokenizer

    return Tokenizer(model_dir) if Tokenizer.exists(model_dir) else None


class Line:
    """The caller's end. Its calls block, from any thread; a thread of its own owns the wire."""

    def __init__(self, address: Address) -> None:
        self.loaded = (0, 0)
        """Bytes loaded and to load, over all ranks; zeros before they know."""
        self._address = address
        self._replies: dict[int, queue.SimpleQueue[Reply]] = {}
        self._last = 0
        self._dead: EngineDeadError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="outrider-line", daemon=True)
        self._thread.start()
        self._do(self._connect)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        (reply,) = self._call(Ask(requests=list(requests)))
        return reply.completions

    def stream(self, request: Request) -> Iterator[Chunk]:
        for reply in self._call(Ask(requests=[request], pieces=True)):
            assert reply.chunk is not None
            yield reply.chunk

    def stats(self) -> dict[str, Any]:
        (reply,) = self._call(Ask(stats=True))
        assert reply.stats is not None
        return reply.stats

    def abort(self, keys: Sequence[str]) -> None:
        """End requests by key, without waiting for it."""
        self._do(lambda: self._send(Ask(abort=list(keys))))

    def stop(self) -> None:
        """The driver ends everything and returns from start() or run()."""
        self._do(lambda: self._send(Ask(stop=True)))

    def watch(self, run: concurrent.futures.Future[Any]) -> None:
        """When the driver's run() ends, so does every call that still waits."""
        run.add_done_callback(lambda done: self._do(lambda: self._fail(_why(done))))

    def close(self) -> None:
        """Every open call ends with EngineClosedError. Twice does no harm."""
        if not self._thread.is_alive():
            return
        self._do(lambda: self._fail(EngineClosedError("the engine was closed")))
        self._do(self._loop.stop)
        self._thread.join()

    def _call(self, ask: Ask) -> Iterator[Reply]:
        """The replies to one ask, up to the last. Nothing is sent before the first is wanted."""
        try:  # an ask that cannot be read must not reach the desk
            msgspec.msgpack.decode(msgspec.msgpack.encode(ask), type=Ask)
        except (TypeError, OverflowError, msgspec.ValidationError) as error:
            raise RequestError(f"this request is malformed: {error}") from None
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._do(lambda: self._begin(ask, replies))
        while True:
            reply = replies.get()
            if reply.failure is not None:
                raise reply.failure.error()
            yield reply
            if reply.chunk is None or reply.chunk.finish_reason is not None:
                return

    def _do(self, work: Callable[[], None]) -> None:
        """Run in the thread of the wire, in order."""
        with contextlib.suppress(RuntimeError):  # it has ended, and its calls with it
            self._loop.call_soon_threadsafe(work)

    # From here on in the line's own thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._post.close()
        self._loop.close()

    def _connect(self) -> None:
        self._post = Postbox(zmq.asyncio.Context(io_threads=1), limit_bytes=-1)
        self._wire = self._post.connect(self._address)
        self._wire.send(HELLO)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            reply = await self._wire.receive_async(Reply)
            if reply.loaded is not None:
                self.loaded = reply.loaded
                continue
            replies = self._replies.get(reply.call)
            if replies is None:
                continue
            ended = reply.chunk is None or reply.chunk.finish_reason is not None
            if ended:
                del self._replies[reply.call]
            replies.put(reply)

    def _begin(self, ask: Ask, replies: queue.SimpleQueue[Reply]) -> None:
        if self._dead is not None:
            replies.put(Reply(call=0, failure=Failure.of(self._dead)))
            return
        self._last += 1
        self._replies[self._last] = replies
        ask.call = self._last
        self._send(ask)

    def _send(self, ask: Ask) -> None:
        try:
            self._wire.send(ask)
        except ConnectionError as error:
            self._fail(EngineDeadError("the driver process is gone", str(error)))

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        for replies in self._replies.values():
            replies.put(Reply(call=0, failure=Failure.of(self._dead)))
        self._replies.clear()


def _why(run: concurrent.futures.Future[Any]) -> EngineDeadError:
    error = None if run.cancelled() else run.exception()
    if error is None:
        return EngineClosedError("the engine was closed")
    return EngineDeadError("the driver process died", str(error))
