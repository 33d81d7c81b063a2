"""The HTTP endpoints over a Driver: a plain ASGI application that knows nothing of Ray.

    AuthMiddleware -> BodyReader -> PromptEncoder -> Driver.submit -> Handle -> ResponseWriter
What cannot be taken now is a 429 or a 503 with Retry-After, before any byte of an answer. Work that
grows with a body is done beside the event loop: reading.py and prompts.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import outrider
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
from outrider.actors.http import openapi
from outrider.actors.http.bodies import (
    DEFAULTS,
    ApiError,
    BodyLimits,
    CompletionBody,
    Settings,
)
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.metrics import Metrics
from outrider.actors.http.middleware import (
    AuthMiddleware,
    allow_origins,
    error_response,
    json_response,
)
from outrider.actors.http.prompts import PromptEncoder
from outrider.actors.http.reading import BodyReader
from outrider.actors.http.requests import EventStream, HttpRequest, best_answers
from outrider.actors.http.responses import ResponseWriter
from outrider.actors.http.tokens import DetokenizeBody, TokenizeBody
from outrider.actors.http.writing import AnswerWriter, encoded
from outrider.model.text import Tokenizer

log = logging.getLogger(__name__)


MAX_RETRY_S = 60
LONG_CHUNK_TOKENS = 256
"""Longer chunks are written in a thread: one for a slow client holds all since the one before."""


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
        """about: what /health tells. keys: SHA-256 digests; with none of them everyone may ask."""
        self._driver, self._tokenizer, self._serve = driver, tokenizer, serve
        self._model, self._about = model, about
        self._created = int(time.time())
        self._draining = False
        self._open: set[HttpRequest] = set()
        """Requests whose answers are not complete yet."""
        self._mean_request_s = 1.0
        """Moving average, for Retry-After."""
        limits = BodyLimits(
            max_choices=serve.max_choices,
            max_prompt_tokens=driver.limits.max_model_len - 1,
            chat_templates=serve.request_templates,
            ignore_unknown=serve.unknown_fields == "ignore",
        )
        self._bodies = BodyReader(limits)
        self._prompts = PromptEncoder(tokenizer, limits)
        self.metrics = Metrics(driver.stats)
        with_docs = not keys if serve.docs == "auto" else serve.docs
        guarded = AuthMiddleware(
            self._routes(with_docs),
            keys,
            serve.max_body_bytes,
            self.metrics.answered,
            open_paths=("/health", "/ping", *(openapi.PATHS if with_docs else ())),
        )
        self.app: ASGIApp = allow_origins(guarded, serve.cors_origins)

    def _routes(self, with_docs: bool) -> FastAPI:
        where = dict(zip(("openapi_url", "docs_url"), openapi.PATHS if with_docs else (None, None)))
        routes = FastAPI(
            title="Outrider",
            version=outrider.__version__,
            redoc_url=None,
            redirect_slashes=False,
            **where,
        )
        for path, handler in (
            ("/health", self._health),
            ("/ping", self._health),
            ("/version", self._version),
            ("/metrics", self._metrics),
            ("/v1/stats", self._stats),
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._one_model),
        ):
            for method in ("GET", "HEAD"):
                routes.add_api_route(
                    path, handler, methods=[method], response_model=None,
                    include_in_schema=method == "GET",
                )  # fmt: skip
        for path, handler in (
            ("/v1/completions", self._completions),
            ("/v1/chat/completions", self._chat),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/ping", self._health),
        ):
            routes.add_api_route(path, handler, methods=["POST"], response_model=None)
        routes.add_exception_handler(ApiError, error_response)
        routes.add_exception_handler(HTTPException, error_response)
        bodies = {
            "/v1/completions": CompletionBody,
            "/v1/chat/completions": ChatBody,
            "/tokenize": TokenizeBody,
            "/detokenize": DetokenizeBody,
        }
        routes.openapi = functools.partial(openapi.describe, routes, bodies)
        return routes

    def start(self) -> None:
        """Start what the first large body would else wait for."""
        self._bodies.start()

    def close(self) -> None:
        """The driver is somebody else's to close."""
        self._bodies.close()

    def drain(self, *, cut: bool = False) -> int:
        """Refuse new requests with 503 from now on -> how many are still open; they go on.

        cut: end the open ones too; each answer ends with an error that says so.
        """
        self._draining = True
        if cut:
            for request in self._open:
                request.cut()
        return len(self._open)

    async def _health(self) -> Response:
        dead = self._driver.error
        status = "dead" if dead else "draining" if self._draining else "ok"
        report = {"status": status, **self._about()} | ({"reason": str(dead)} if dead else {})
        return json_response(report, 200 if status == "ok" else 503)

    async def _version(self) -> Response:
        return json_response({"version": outrider.__version__})

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _stats(self) -> Response:
        tasks = len(asyncio.all_tasks())
        return json_response(self._driver.stats() | {"tasks": tasks, "engine": self._about()})

    async def _models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        limits = self._driver.limits
        return {
            "id": self._model, "object": "model", "created": self._created,
            "owned_by": "outrider", "max_model_len": limits.max_model_len,
            "generation_defaults": {**DEFAULTS, **limits.sampling_defaults},
        }  # fmt: skip

    async def _completions(self, request: Request) -> Response:
        self._check_draining()
        body = await self._bodies.read(CompletionBody, await request.body())
        self._check_model(body.model)
        prompts = await self._prompts.encode(body)
        is_cut = body.truncate_prompt_tokens is not None
        echoed = prompts if is_cut else body.prompt
        echoes = await self._prompts.texts(echoed) if body.echo else []
        echoes = [text for text in echoes for _ in range(body.n)]
        writer = ResponseWriter(
            body=body, model=self._model, tokenizer=self._tokenizer, echoes=echoes
        )
        return await self._answer(request, body, writer, prompts, "prompt")

    async def _chat(self, request: Request) -> Response:
        self._check_draining()
        body = await self._bodies.read(ChatBody, await request.body())
        self._check_model(body.model)
        prompt = await self._prompts.encode_chat(body)
        writer = ResponseWriter(
            body=body, model=self._model, tokenizer=self._tokenizer, echoes=[body.echoed] * body.n
        )
        return await self._answer(request, body, writer, [prompt], "messages")

    async def _tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(TokenizeBody, await request.body())
        self._check_model(body.model)
        return Response(await self._prompts.tokenize(body), media_type="application/json")

    async def _detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(DetokenizeBody, await request.body())
        self._check_model(body.model)
        body.check_ids(self._driver.limits.vocab_size)
        return json_response({"prompt": await self._prompts.detokenize(body.tokens)})

    async def _answer(
        self,
        request: Request,
        body: Settings,
        writer: AnswerWriter,
        prompts: Sequence[list[int]],
        param: str,
    ) -> Response:
        """Queue, wait for a slot; then the answer, whole or as a stream. param: of the prompts."""
        self._check_draining()
        handles = await self._submit(body, prompts, param)
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
        self, body: Settings, prompts: Sequence[list[int]], param: str
    ) -> list[Handle]:
        """All choices of all prompts, or none."""
        changed, handles, limits = asyncio.Event(), [], self._driver.limits
        try:
            await self._driver.check_grammar(body.grammar)
        except RequestError as error:
            (name,) = body.grammar_fields
            why = str(error).replace("sampling.grammar", name, 1)
            raise ApiError(400, why, param=name) from None
        try:
            banned = self._prompts.banned_ids(body.bad_words)
            self._driver.check_queue(len(prompts) * body.num_answers)
            for prompt in prompts:
                room = limits.room_for(len(prompt))
                for sampling in body.samplings(room, limits.sampling_defaults, banned):
                    one = GenerationRequest(
                        prompt=prompt, sampling=sampling, stop=body.stops, priority=body.priority,
                        include_stop=body.include_stop_str_in_output,
                        show_special=not body.skip_special_tokens,
                        draft_info=body.return_draft_info,
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
        self.metrics.joined(time.perf_counter() - http_request.started_s)

    def _refusal(self, error: BaseException, param: str) -> BaseException:
        """The answer for what the driver raised; anything else as it is."""
        if isinstance(error, QueueFullError):
            return self._too_busy(str(error), "queue_full")
        if isinstance(error, RequestError):
            named = ("logit_bias", "stop", "allowed_token_ids")
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

    def _check_draining(self) -> None:
        if self._draining:
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
            yield encoded(writer.error_events(refusal))
            return
        self._record(http_request)
        yield encoded(writer.last_events(http_request.usage())) + writer.stream_end

    def _record(self, http_request: HttpRequest) -> None:
        """Metrics of an answered request, and its user in the log."""
        total_s = time.perf_counter() - http_request.started_s
        self._mean_request_s += (total_s - self._mean_request_s) / 16
        for one in http_request.requests:
            self.metrics.finished(one.stats(), total_s, len(one.prompt), len(one.emitted))
        if http_request.user is not None:
            choices = len(http_request.requests)
            log.info("answered user %.256r: choices: %d", http_request.user, choices)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            raise ApiError(
                404, f"model {name!r} is not served here; {self._model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip


def _written(writer: AnswerWriter, index: int, chunk: Chunk, prompt: Sequence[int]) -> bytes:
    return encoded(writer.events(index, chunk, prompt))
