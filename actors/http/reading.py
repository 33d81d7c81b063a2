"""Reads the bodies of requests: small ones at once, large ones in a process of their own.

    bytes -> BodyReader.read -> parse, here or in the process -> CompletionBody, ChatBody
JSON parsing and validation hold the interpreter lock, in a thread too: up to 4 s for a body of
4 MiB. In another process they leave the event loop free, so that streams and /health go on. Large
bodies are read one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from outrider.actors.http.bodies import ApiError, BodyLimits
from outrider.actors.http.parsing import BodyT, parse

log = logging.getLogger(__name__)
SMALL_BODY_BYTES = 8 << 10
"""Up to here a body is parsed in the event loop: at most 10 ms, whatever it holds."""
RELEASED_BODY_BYTES = 256 << 10
"""Beyond this size the memory of a body is given back at once, which takes some 50 ms."""


class BodyReader:
    """Start it once, so that the first large body need not wait for the process; close it once."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._pool = _new_pool()
        self._one_parse = asyncio.Lock()

    def start(self) -> None:
        """Start the process without waiting for it (it takes a second)."""
        self._pool.submit(os.getpid)

    async def read(self, kind: type[BodyT], data: bytes) -> BodyT:
        """The body, checked; ApiError."""
        if len(data) <= SMALL_BODY_BYTES:
            async with self._one_parse:  # one in a turn of the loop, though many come at once
                await asyncio.sleep(0)
                return parse(kind, data, self._limits)
        pool, loop = self._pool, asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool, _parse_and_release, kind, data, self._limits)
        except BrokenProcessPool as problem:
            log.error("the process that reads large bodies ended: %s", problem)
            if pool is self._pool:
                self._pool = _new_pool()
            why = "the process that reads large bodies ended; send the request again"
            raise ApiError(503, why, kind="server_error", retry_after_s=1) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _new_pool() -> ProcessPoolExecutor:
    """One process, started afresh: a fork would copy the threads' locks of this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_parent)


def _parse_and_release(kind: type[BodyT], data: bytes, limits: BodyLimits) -> BodyT:
    """`parse`, after which the process holds no more memory than before.

    The errors of a body of 4 MiB may take hundreds of MB. The C library keeps what is freed for
    later, in pieces between what is still in use, unless it is asked to give it back.
    """
    body, refusal = None, None
    try:
        body = parse(kind, data, limits)
    except ApiError as error:
        refusal = error.with_traceback(None)  # its frames and its context hold what was parsed
        refusal.__context__ = None
    if len(data) > RELEASED_BODY_BYTES:
        gc.collect()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
    if body is None:
        assert refusal is not None
        raise refusal
    return body


def _end_with_parent() -> None:
    """A killed parent cannot end its pool: its process watches for that itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
