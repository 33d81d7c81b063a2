"""From a request whose prompts are token ids to its answer: admission, streams, errors, metrics.

    Settings, prompts -> Driver.submit -> Handle -> AnswerWriter -> Response
What cannot be taken now is a 429 or a 503 with Retry-After, before any byte of an answer. A client
that leaves ends its request. Which words the answer is written in, only its writer knows.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import Request
from fastapi.responses import Response

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.driver.handle import Handle, merge
from outrider.actors.driver.messages import Chunk, GenerationRequest
from outrider.actors.errors import (
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from outrider.actors.http.bodies import ApiError, Settings
from outrider.actors.http.metrics import Metrics
from outrider.actors.http.prompts import PromptEncoder
from outrider.actors.http.requests import EventStream, HttpRequest, best_answers
from outrider.actors.http.writing import AnswerWriter, encoded
from outrider.model.step import Grammar

log = logging.getLogger(__name__)


MAX_RETRY_S = 60
LONG_CHUNK_TOKENS = 256
"""Longer chunks are written in a thread: one for a slow client holds all since the one before."""


class Answering:
    """One server's: which requests are open, whether it takes more, and how long they take."""

    def __init__(
        self, driver: Driver, prompts: PromptEncoder, serve: ServeSpec, metrics: Metrics
    ) -> None:
        self._driver, self._prompts, self._serve = driver, prompts, serve
        self._metrics = metrics
        self.is_draining = False
        self._open: set[HttpRequest] = set()
        """Requests whose answers are not complete yet."""
        self._mean_request_s = 1.0
        """Moving average, for Retry-After."""

    def drain(self, *, cut: bool = False) -> int:
        """Refuse new requests with 503 from now on -> how many are still open; they go on.

        cut: end the open ones too; each answer ends with an error that says so.
        """
        self.is_draining = True
        if cut:
            for request in self._open:
                request.cut()
        return len(self._open)

    async def answer(
        self,
        request: Request,
        body: Settings,
        writer: AnswerWriter,
        prompts: Sequence[list[int]],
        param: str,
        *,
        grammar: Grammar | None,
    ) -> Response:
        """Queue, wait for a slot; then the answer, whole or as a stream. param: of the prompts.
        grammar: of the answers."""
        self.check_draining()
        handles = await self._submit(body, prompts, param, grammar)
        http_request = HttpRequest(self._driver, handles, prompts, body, self._open)
        try:
            await http_request.watching(request, self._wait_for_slot(http_request))
            if body.stream:
                return EventStream(self._events(http_request, writer), http_request)
            answers = await http_request.watching(request, http_request.results())
        except BaseException as error:
            http_request.close()
            raise self._refusal(error, param) from None
        http_request.close()
        self._record(http_request)
        answers = best_answers(answers, body.num_answers, body.n)
        content = await asyncio.to_thread(writer.whole, answers, http_request.usage())
        return Response(content, media_type="application/json")

    async def _submit(
        self, body: Settings, prompts: Sequence[list[int]], param: str, grammar: Grammar | None
    ) -> list[Handle]:
        """All choices of all prompts, or none."""
        changed, handles, limits = asyncio.Event(), [], self._driver.limits
        try:
            await self._driver.check_grammar(grammar)
        except RequestError as error:
            (name,) = body.grammar_fields
            why = str(error).replace("sampling.grammar", name, 1)
            raise ApiError(400, why, param=name) from None
        try:
            banned = self._prompts.banned(body.bad_words)
            self._driver.check_queue(len(prompts) * body.num_answers)
            for prompt in prompts:
                room = limits.room_for(len(prompt))
                defaults = limits.sampling_defaults
                for sampling in body.samplings(room, defaults, banned, grammar=grammar):
                    one = GenerationRequest(
                        prompt=prompt, sampling=sampling, stop=body.stops, priority=body.priority,
                        include_stop=body.include_stop_str_in_output,
                        show_special=not body.skip_special_tokens,
                        draft_info=body.return_draft_info,
                        cache_salt=body.cache_salt or "",
                    )  # fmt: skip
                    handles.append(self._driver.submit(one, changed))
                    await asyncio.sleep(0)  # the driver looks at each id of each choice
        except (ApiError, RequestError, EngineDeadError) as error:
            for handle in handles:
                self._driver.abort(handle.request.number)
            raise self._refusal(error, param) from None
        return handles

    async def _wait_for_slot(self, http_request: HttpRequest) -> None:
        """Returns when the first choice has a slot; ApiError 429 when none comes in time."""
        limit_s = self._serve.queue_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await http_request.handles[0].slot_or_end()
        except TimeoutError:
            raise self._too_busy(
                f"no slot came free within serve.queue_timeout_s = {limit_s:g} s", "queue_timeout"
            ) from None
        self._metrics.joined(time.perf_counter() - http_request.started_s)

    def _refusal(self, error: BaseException, param: str) -> BaseException:
        """The answer for what the driver raised; anything else as it is."""
        if isinstance(error, QueueFullError):
            return self._too_busy(str(error), "queue_full")
        if isinstance(error, RequestError):
            named = ("logit_bias", "stop", "allowed_token_ids", "bad_words", "logprob_token_ids")
            name = next((word for word in named if str(error).startswith(word)), param)
            is_long = isinstance(error, PromptTooLongError)
            code = "context_length_exceeded" if is_long else None
            return ApiError(400, str(error), param=name, code=code)
        if isinstance(error, RequestFailedError):
            return ApiError(500, str(error), kind="server_error", code="request_failed")
        if isinstance(error, EngineDeadError):
            return ApiError(503, str(error), kind="server_error", code="engine_dead")
        if isinstance(error, RequestAbortedError):
            limit_s = self._serve.drain_timeout_s
            rule = f"the answer took longer than serve.drain_timeout_s = {limit_s:g} s"
            return self._shutting_down(f"this server shuts down, and {rule}")
        return error

    def check_draining(self) -> None:
        if self.is_draining:
            raise self._shutting_down("this server shuts down: send the request again later")

    def _shutting_down(self, why: str) -> ApiError:
        wait_s = min(MAX_RETRY_S, max(1, math.ceil(self._serve.drain_timeout_s)))
        return ApiError(503, why, kind="server_error", code="draining", retry_after_s=wait_s)

    def _too_busy(self, why: str, code: str) -> ApiError:
        stats = self._driver.stats()
        rounds = (stats["queued"] + 1) / self._driver.limits.max_slots
        wait_s = min(MAX_RETRY_S, max(1, math.ceil(rounds * self._mean_request_s)))
        return ApiError(429, why, kind="rate_limit_error", code=code, retry_after_s=wait_s)

    async def _events(
        self, http_request: HttpRequest, writer: AnswerWriter
    ) -> AsyncIterator[bytes]:
        """Server-sent events; what ends the answer early ends them with an error event."""
        try:
            async for index, chunk in merge(http_request.handles):
                prompt = http_request.handles[index].request.prompt
                chunk = http_request.shown(chunk)
                write = functools.partial(_written, writer, index, chunk, prompt)
                num_tokens = len(chunk.token_ids) + len(chunk.prompt_logprobs)
                is_long = num_tokens > LONG_CHUNK_TOKENS
                if events := await asyncio.to_thread(write) if is_long else write():
                    yield events
        except (EngineDeadError, RequestFailedError, RequestAbortedError) as error:
            if isinstance(error, RequestAbortedError) and not http_request.was_cut:
                raise  # the client has closed the connection
            refusal = self._refusal(error, "")
            assert isinstance(refusal, ApiError)
            yield encoded(writer.error_events(refusal)) + writer.stream_end
            return
        self._record(http_request)
        yield encoded(writer.last_events(http_request.usage())) + writer.stream_end

    def _record(self, http_request: HttpRequest) -> None:
        """Metrics of an answered request, and its user in the log."""
        total_s = time.perf_counter() - http_request.started_s
        self._mean_request_s += (total_s - self._mean_request_s) / 16
        for one in http_request.requests:
            self._metrics.finished(one.stats(), total_s, len(one.prompt), len(one.emitted))
        if http_request.user is not None:
            choices = len(http_request.requests)
            log.info("answered user %.256r: choices: %d", http_request.user, choices)


def _written(writer: AnswerWriter, index: int, chunk: Chunk, prompt: Sequence[int]) -> bytes:
    return encoded(writer.events(index, chunk, prompt))
