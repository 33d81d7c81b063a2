"""The Engine's end of the connection to its driver, which lives in another process.

    caller's thread -> Call -> EngineClient's thread -> Connection -> driver
    driver -> Reply -> EngineClient's thread -> the queue of its call -> caller's thread
Calls block and may come from any thread; each has a number and waits for its own replies. The
client's own thread is the only one that touches the connection.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
import zmq.asyncio

from outrider.actors.driver.messages import (
    Abort,
    Answered,
    Call,
    Chunk,
    Completed,
    Completion,
    Failed,
    Failure,
    Generate,
    GenerationRequest,
    GetStats,
    LoadProgress,
    Reply,
    Stats,
    Stop,
    Stream,
    Streamed,
)
from outrider.actors.errors import EngineClosedError, EngineDeadError, RequestError
from outrider.actors.ranks.connection import Address, Connector
from outrider.actors.ranks.messages import DRIVER, Hello

Replies = queue.SimpleQueue[Answered | Completed | Streamed | Stats | Failed]


class EngineClient:
    """Open once it is made; close it once."""

    def __init__(self, address: Address) -> None:
        """address: where the driver listens."""
        self.loaded = (0, 0)
        """Bytes loaded and to load, over all ranks; zeros before they are known."""
        self._address = address
        self._replies: dict[int, Replies] = {}
        """Of the calls that still wait, by number."""
        self._numbers = itertools.count(1)
        self._dead: EngineDeadError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="outrider-client", daemon=True)
        self._thread.start()
        self._in_thread(self._connect)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Completion]]:
        """Each answer as soon as it is there, with the index of its request."""
        for reply in self._call(Generate(next(self._numbers), list(requests))):
            if isinstance(reply, Answered):
                yield reply.index, reply.completion

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for reply in self._call(Stream(next(self._numbers), request)):
            if isinstance(reply, Streamed):
                yield reply.chunk

    def stats(self) -> dict[str, Any]:
        for reply in self._call(GetStats(next(self._numbers))):
            if isinstance(reply, Stats):
                return reply.stats
        raise AssertionError("a GetStats ends with Stats or Failed")

    def abort(self, keys: Sequence[str]) -> None:
        """End requests by key, without waiting for it."""
        self._in_thread(lambda: self._send(Abort(list(keys))))

    def stop(self) -> None:
        """The driver ends everything and returns from start() or run()."""
        self._in_thread(lambda: self._send(Stop()))

    def watch(self, run: concurrent.futures.Future[Any]) -> None:
        """When the driver's run() ends, so does every call that still waits."""
        run.add_done_callback(lambda done: self._in_thread(lambda: self._fail(_why_ended(done))))

    def close(self) -> None:
        """Every open call ends with EngineClosedError. Twice does no harm."""
        if not self._thread.is_alive():
            return
        self._in_thread(lambda: self._fail(EngineClosedError("the engine was closed")))
        self._in_thread(self._loop.stop)
        self._thread.join()

    def _call(
        self, call: Generate | Stream | GetStats
    ) -> Iterator[Answered | Completed | Streamed | Stats]:
        """The replies to one call, up to the last. Nothing is sent before the first is wanted."""
        try:  # what cannot be decoded must not reach the driver
            msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call)
        except (TypeError, OverflowError, msgspec.ValidationError) as error:
            raise RequestError(f"this request is malformed: {error}") from None
        replies: Replies = queue.SimpleQueue()
        self._in_thread(lambda: self._begin(call, replies))
        while True:
            reply = replies.get()
            if isinstance(reply, Failed):
                raise reply.failure.error()
            yield reply
            if _is_last(reply):
                return

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Run in the client's thread, in order."""
        with contextlib.suppress(RuntimeError):  # it has ended, and its calls with it
            self._loop.call_soon_threadsafe(work)

    # The methods below run in the client's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._connector.close()
        self._loop.close()

    def _connect(self) -> None:
        self._connector = Connector(zmq.asyncio.Context(io_threads=1), limit_bytes=-1)
        self._connection = self._connector.connect(self._address)
        self._connection.send(Hello(rank=DRIVER))
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            reply: Reply = await self._connection.receive_async(cast(Any, Reply))
            if isinstance(reply, LoadProgress):
                self.loaded = (reply.done_bytes, reply.total_bytes)
            elif reply.call in self._replies:
                replies = self._replies[reply.call]
                if _is_last(reply):
                    del self._replies[reply.call]
                replies.put(reply)

    def _begin(self, call: Generate | Stream | GetStats, replies: Replies) -> None:
        if self._dead is not None:
            replies.put(Failed(call.call, Failure.of(self._dead)))
            return
        self._replies[call.call] = replies
        self._send(call)

    def _send(self, call: Call) -> None:
        try:
            self._connection.send(call)
        except ConnectionError as error:
            self._fail(EngineDeadError("the driver process is gone", str(error)))

    def _fail(self, error: EngineDeadError) -> None:
        """Every call that waits ends with `error`, and so does every later one."""
        self._dead = self._dead or error
        for number, replies in self._replies.items():
            replies.put(Failed(number, Failure.of(self._dead)))
        self._replies.clear()


def _is_last(reply: Answered | Completed | Streamed | Stats | Failed) -> bool:
    """True when no other reply to the same call follows."""
    if isinstance(reply, Streamed):
        return reply.chunk.finish_reason is not None
    return not isinstance(reply, Answered)


def _why_ended(run: concurrent.futures.Future[Any]) -> EngineDeadError:
    """What the end of the driver's run() means for the calls that wait."""
    error = None if run.cancelled() else run.exception()
    if error is None:
        return EngineClosedError("the engine was closed")
    return EngineDeadError("the driver process died", str(error))
