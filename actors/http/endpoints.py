"""The HTTP endpoints over a Driver: a plain ASGI application that knows nothing of Ray.

    AuthMiddleware -> parse -> Driver.submit -> Handle -> one JSON object or server-sent events
A request ends with its client: when the connection goes, its handles are aborted. What cannot be
taken now is a 429 with Retry-After or a 503, before any byte of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.driver.handle import Handle, merge
from outrider.actors.driver.messages import Completion, GenerationRequest, RequestStats
from outrider.actors.errors import (
    EngineDeadError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)
from outrider.actors.http.bodies import ApiError, ChatBody, CompletionBody, Settings, parse
from outrider.actors.http.metrics import Metrics
from outrider.actors.http.middleware import AuthMiddleware, error_response, json_response
from outrider.actors.http.responses import ResponseWriter, usage_of
from outrider.model.config import ConfigError
from outrider.model.text import Tokenizer

T = TypeVar("T")


log = logging.getLogger(__name__)


DONE = b"data: [DONE]\n\n"


CLIENT_GONE = 499


LONG_TEXT = 20_000
"""Characters from which a prompt is tokenised in a thread, so that streams go on meanwhile."""


MOST_RETRY_S = 60


class Endpoints:
    """The routes and what they share. `app` is the ASGI application."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer | None,
        *,
        serve: ServeSpec,
        model: str,
        about: Callable[[], dict[str, Any]],
        keys: Sequence[bytes] = (),
    ) -> None:
        """model: its name. about: what /health tells. keys: SHA-256 of each API key; none: open."""
        self._driver, self._tokenizer, self._serve = driver, tokenizer, serve
        self._model, self._about = model, about
        self._created = int(time.time())
        self._draining = False
        self._mean_s = 1.0
        """Moving average of a request's time, for Retry-After."""
        self.metrics = Metrics(driver.stats)
        routes = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/stats", self._stats),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._one_model),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat),
        ):
            routes.add_api_route(path, handler, methods=[method], response_model=None)
        routes.add_exception_handler(ApiError, error_response)
        routes.add_exception_handler(HTTPException, error_response)
        self.app: ASGIApp = AuthMiddleware(
            routes, keys, serve.max_body_bytes, self.metrics.answered
        )

    def drain(self) -> None:
        """From now on new requests are refused with 503; those under way go on."""
        self._draining = True

    async def _health(self) -> Response:
        dead = self._driver.error
        status = "dead" if dead else "draining" if self._draining else "ok"
        report = {"status": status, **self._about()} | ({"reason": str(dead)} if dead else {})
        return json_response(report, 200 if status == "ok" else 503)

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _stats(self) -> Response:
        tasks = len(asyncio.all_tasks())
        return json_response(self._driver.stats() | {"tasks": tasks, "engine": self._about()})

    async def _models(self) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        length = self._driver.limits.max_model_len
        return {
            "id": self._model, "object": "model", "created": self._created,
            "owned_by": "outrider", "max_model_len": length,
        }  # fmt: skip

    async def _completions(self, request: Request) -> Response:
        body = parse(CompletionBody, await request.body())
        given = body.prompts()
        prompts = [await self._encode(prompt, "prompt") for prompt in given]
        echoes = []
        if body.echo:
            echoes = [p if isinstance(p, str) else self._decode(p) for p in given]
            echoes = [text for text in echoes for _ in range(body.n)]
        form = self._form(body, chat=False, echoes=echoes, logprobs=body.logprobs is not None)
        return await self._answer(request, body, form, prompts, "prompt")

    async def _chat(self, request: Request) -> Response:
        body = parse(ChatBody, await request.body())
        if self._tokenizer is None:
            raise ApiError(400, "this checkpoint has no tokenizer: use /v1/completions with ids")
        said = [message.plain() for message in body.messages]
        try:
            prompt = await _maybe_in_thread(
                sum(len(m["content"]) for m in said),
                lambda text: text.apply_chat_template(said, **(body.chat_template_kwargs or {})),
                self._tokenizer,
            )
        except ConfigError as error:  # the template's own refusal, without the folder's name
            raise ApiError(400, str(error).partition(": ")[2], param="messages") from None
        form = self._form(body, chat=True, echoes=(), logprobs=body.logprobs)
        return await self._answer(request, body, form, [prompt], "messages")

    def _form(
        self, body: Settings, *, chat: bool, echoes: Sequence[str], logprobs: bool
    ) -> ResponseWriter:
        return ResponseWriter(
            chat=chat,
            model=self._model,
            tokenizer=self._tokenizer,
            echoes=echoes,
            token_ids=body.return_token_ids,
            logprobs=logprobs,
            usage_last=bool(body.stream_options and body.stream_options.include_usage),
        )

    async def _answer(
        self,
        request: Request,
        body: Settings,
        form: ResponseWriter,
        prompts: Sequence[list[int]],
        param: str,
    ) -> Response:
        """Check, queue, wait for a slot; then the answer, whole or as a stream."""
        self._check_model(body.model)
        choices = len(prompts) * body.n
        if not 1 <= choices <= self._serve.max_choices:
            rule = f"1 to serve.max_choices = {self._serve.max_choices} may be asked for at once"
            raise ApiError(
                400, f"{len(prompts)} prompts x n = {body.n}: {choices} answers; {rule}",
                param="n" if prompts else param,
            )  # fmt: skip
        job = HttpRequest(self._driver, self._submit(body, prompts, param), prompts, body)
        try:
            await job.watching(request, self._wait_for_slot(job))
            if body.stream:
                return EventStream(self._events(job, form), job)
            answers = await job.watching(request, job.results())
        except BaseException as error:
            job.abort()
            raise self._refusal(error, param) from None
        self._book(job)
        return json_response(form.whole(answers, job.usage()))

    def _submit(self, body: Settings, prompts: Sequence[list[int]], param: str) -> list[Handle]:
        """All choices of all prompts, or none."""
        if self._draining:
            raise ApiError(
                503, "this server is shutting down", kind="server_error", code="draining"
            )
        changed, handles = asyncio.Event(), []
        try:
            self._driver.check_queue(len(prompts) * body.n)
            for prompt in prompts:
                for sampling in body.samplings(self._driver.limits.room_for(len(prompt))):
                    one = GenerationRequest(prompt=prompt, sampling=sampling, stop=body.stops)
                    handles.append(self._driver.submit(one, changed))
        except (ApiError, RequestError, EngineDeadError) as error:
            for handle in handles:
                self._driver.abort(handle.request.number)
            raise self._refusal(error, param) from None
        return handles

    async def _wait_for_slot(self, job: HttpRequest) -> None:
        """Until the first choice has a slot: QueueTimeout when none comes in time."""
        limit_s = self._serve.queue_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await job.handles[0].slot_or_end()
        except TimeoutError:
            raise self._later(
                f"no slot came free within serve.queue_timeout_s = {limit_s:g} s", "queue_timeout"
            ) from None
        self.metrics.joined(time.perf_counter() - job.started_s)

    def _refusal(self, error: BaseException, param: str) -> BaseException:
        """The answer for what the driver raised; anything else as it is."""
        if isinstance(error, QueueFullError):
            return self._later(str(error), "queue_full")
        if isinstance(error, RequestError):
            named = ("logit_bias", "stop")
            name = next((word for word in named if str(error).startswith(word)), param)
            return ApiError(400, str(error), param=name)
        if isinstance(error, RequestFailedError):
            return ApiError(500, str(error), kind="server_error", code="request_failed")
        if isinstance(error, EngineDeadError):
            return ApiError(503, str(error), kind="server_error", code="engine_dead")
        return error

    def _later(self, why: str, code: str) -> ApiError:
        stats = self._driver.stats()
        rounds = (stats["queued"] + 1) / self._driver.limits.max_slots
        wait_s = min(MOST_RETRY_S, max(1, math.ceil(rounds * self._mean_s)))
        return ApiError(429, why, kind="rate_limit_error", code=code, retry_after_s=wait_s)

    async def _events(self, job: HttpRequest, form: ResponseWriter) -> AsyncIterator[bytes]:
        """Server-sent events; what ends the answer early ends them with an error event."""
        try:
            async for index, chunk in merge(job.handles):
                ids = job.handles[index].request.prompt
                for event in form.piece(index, chunk, ids):
                    yield _event(event)
        except (EngineDeadError, RequestFailedError) as error:
            refusal = self._refusal(error, "")
            assert isinstance(refusal, ApiError)
            yield _event({"error": refusal.error})
            return
        self._book(job)
        if form.usage_last:
            yield _event(form.last(job.usage()))
        yield DONE

    def _book(self, job: HttpRequest) -> None:
        total_s = time.perf_counter() - job.started_s
        self._mean_s += (total_s - self._mean_s) / 16
        for request in job.requests:
            self.metrics.finished(
                request.stats(), total_s, len(request.prompt), len(request.emitted)
            )
        if job.user:
            log.info("answered %d choices for user %r", len(job.handles), job.user)

    async def _encode(self, prompt: str | list[int], param: str) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return await _maybe_in_thread(len(prompt), self._driver.encode, prompt)
        except RequestError as error:
            raise ApiError(400, str(error), param=param) from None

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            raise ApiError(400, "echo: this checkpoint has no tokenizer", param="echo")
        most = self._driver.limits.vocab_size
        return self._tokenizer.decode([i for i in ids if i < most])

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            raise ApiError(
                404, f"model {name!r} is not served here; {self._model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip


class HttpRequest:
    """The handles of one HTTP request; they end together when the client goes."""

    def __init__(
        self,
        driver: Driver,
        handles: Sequence[Handle],
        prompts: Sequence[list[int]],
        body: Settings,
    ) -> None:
        self._driver = driver
        self.handles = handles
        self.requests = [handle.request for handle in handles]
        self.user = body.user
        self.started_s = time.perf_counter()
        self._num_prompt_tokens = sum(map(len, prompts))

    def abort(self) -> None:
        """Does nothing to those that have ended."""
        for handle in self.handles:
            self._driver.abort(handle.request.number)

    async def results(self) -> list[Completion]:
        return [await handle.result() for handle in self.handles]

    def stats(self) -> list[RequestStats]:
        return [request.stats() for request in self.requests]

    def usage(self) -> dict[str, Any]:
        answered = sum(len(request.emitted) for request in self.requests)
        return usage_of(self._num_prompt_tokens, answered, self.stats())

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

    def __init__(self, events: AsyncIterator[bytes], job: HttpRequest) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._job = events, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_gone(receive))
        watch.add_done_callback(lambda done: None if done.cancelled() else self._job.abort())
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
            self._job.abort()


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _maybe_in_thread(length: int, work: Callable[[Any], T], argument: Any) -> T:
    if length < LONG_TEXT:
        return work(argument)
    return await asyncio.to_thread(work, argument)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
