"""The caller's end of the connection to a driver in another process.

    Engine -> EngineClient -- Ask --> DriverServer        DriverServer -- Reply --> EngineClient
Its calls block and may come from any thread; each has a number and waits for its own replies. A
thread of its own owns the wire.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq.asyncio

from outrider.actors.driver.messages import Ask, Chunk, Completion, Failure, Reply, Request
from outrider.actors.errors import EngineClosedError, EngineDeadError, RequestError
from outrider.actors.ranks.messages import Hello
from outrider.actors.ranks.wire import Address, Postbox

HELLO = Hello(epoch=0, rank=-1)


class EngineClient:
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
