"""One HTTP request while the driver works on it, and its answer as server-sent events.

    Answering -> HttpRequest (one Handle for each choice) -> EventStream -> ASGI send
A request ends with its client: when the connection closes, its handles are aborted. The server can
end it too (`cut`): then the client is told so. `open_requests` holds what is not answered yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.actors.driver.driver import Driver
from outrider.actors.driver.handle import Handle
from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.errors import RequestAbortedError
from outrider.actors.http.bodies import ApiError, Settings
from outrider.actors.http.responses import usage_of

T = TypeVar("T")
PartT = TypeVar("PartT", Chunk, Completion)


log = logging.getLogger(__name__)


CLIENT_GONE = 499
"""Status that nginx logs for a client that closed the connection; nobody receives it."""


class HttpRequest:
    """The handles of one HTTP request; they end together."""

    def __init__(
        self,
        driver: Driver,
        handles: Sequence[Handle],
        prompts: Sequence[list[int]],
        body: Settings,
        open_requests: set[HttpRequest],
    ) -> None:
        """open_requests: it is a member from now until `close`."""
        self._driver = driver
        self.handles = handles
        self.requests = [handle.request for handle in handles]
        self.user = body.user
        self._without_answer = body.max_answer_tokens == 0
        """The client wants the prompt's part alone; the ranks make one token at least."""
        self.was_cut = False
        self.started_s = time.perf_counter()
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_choices = len(handles) // len(prompts)
        self._open_requests = open_requests
        open_requests.add(self)

    def abort(self) -> None:
        """End the handles that have not ended."""
        for handle in self.handles:
            self._driver.abort(handle.request.number)

    def cut(self) -> None:
        """Abort because the server shuts down: the client is told."""
        self.was_cut = True
        self.abort()

    def close(self) -> None:
        """The answer is complete, or nobody waits for it any more."""
        self.abort()
        self._open_requests.discard(self)

    async def results(self) -> list[Completion]:
        return [self.shown(await handle.result()) for handle in self.handles]

    def shown(self, part: PartT) -> PartT:
        """What of an answer, or of a chunk of it, the client asked for."""
        if not self._without_answer:
            return part
        finish = part.finish_reason and "length"
        return replace(part, token_ids=[], text="", logprobs=[], finish_reason=finish)

    def usage(self) -> dict[str, Any]:
        answered = sum(len(request.emitted) for request in self.requests)
        answered = 0 if self._without_answer else answered
        stats = [request.stats() for request in self.requests]
        return usage_of(self._num_prompt_tokens, answered, stats, self._num_choices)

    async def watching(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the client goes first: ApiError 499, which nobody reads."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(CLIENT_GONE, "the client closed the connection")
            return task.result()
        finally:
            for one in (task, gone):
                one.cancel()


class EventStream(Response):
    """Server-sent events that end with the connection, also while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], request: HttpRequest) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._request = events, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_gone(receive))
        watch.add_done_callback(lambda done: None if done.cancelled() else self._request.abort())
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (RequestAbortedError, OSError):
            log.debug("the client closed the connection of a stream")
        finally:
            watch.cancel()
            self._request.close()


def best_answers(answers: Sequence[Completion], best_of: int, n: int) -> list[Completion]:
    """Of each prompt's best_of answers the n likeliest, by their mean log probability a token."""

    def mean_logprob(answer: Completion) -> float:
        rows = answer.logprobs
        return sum(row[0][1] for row in rows) / max(1, len(rows))

    if best_of == n:
        return list(answers)
    groups = (answers[start : start + best_of] for start in range(0, len(answers), best_of))
    return [one for group in groups for one in sorted(group, key=mean_logprob, reverse=True)[:n]]


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
