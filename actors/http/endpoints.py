"""The HTTP endpoints over a Driver: a plain ASGI application that knows nothing of Ray.

    AuthMiddleware -> BodyReader -> PromptEncoder -> Answering -> Driver
Each route says which body it takes and who writes its answer; every answer takes the same way, in
answering.py. Work that grows with a body is done beside the event loop: reading.py and prompts.py.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import outrider
from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.driver.driver import Driver
from outrider.actors.http import openapi, page
from outrider.actors.http.answering import Answering
from outrider.actors.http.bodies import (
    DEFAULTS,
    ApiError,
    BodyLimits,
    CompletionBody,
)
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.dialects.body import DialectT
from outrider.actors.http.dialects.messages_body import CountTokensBody, MessagesBody
from outrider.actors.http.dialects.messages_writer import MessagesWriter
from outrider.actors.http.dialects.responses_body import ResponsesBody
from outrider.actors.http.dialects.responses_writer import ResponsesWriter
from outrider.actors.http.metrics import Metrics
from outrider.actors.http.middleware import (
    AuthMiddleware,
    allow_origins,
    error_response,
    json_response,
)
from outrider.actors.http.prompts import PromptEncoder
from outrider.actors.http.reading import BodyReader
from outrider.actors.http.reply_reader import ReplyReader
from outrider.actors.http.responses import ResponseWriter
from outrider.actors.http.tokens import DetokenizeBody, TokenizeBody
from outrider.actors.http.writing import AnswerWriter
from outrider.model.text import Tokenizer


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
        instance: str | None = None,
    ) -> None:
        """about: what /health tells. keys: SHA-256 digests; with none of them everyone may ask.
        instance: what this server's HAProxy writes into each request; None: there is none."""
        self._driver, self._tokenizer, self._serve = driver, tokenizer, serve
        self._model, self._about = model, about
        self._created = int(time.time())
        limits = BodyLimits(
            max_choices=serve.max_choices,
            max_prompt_tokens=driver.limits.max_model_len - 1,
            chat_templates=serve.request_templates,
            ignore_unknown=serve.unknown_fields == "ignore",
        )
        self._bodies = BodyReader(limits)
        self._prompts = PromptEncoder(tokenizer, limits)
        self.metrics = Metrics(driver.stats)
        self._answers = Answering(driver, self._prompts, serve, self.metrics)
        with_docs = not keys if serve.docs == "auto" else serve.docs
        open_paths = ["/health", "/ping", *(openapi.PATHS if with_docs else ())]
        open_paths += [page.PATH] if serve.page else []
        guarded = AuthMiddleware(
            self._routes(with_docs),
            keys,
            serve,
            self.metrics.answered,
            open_paths=open_paths,
            instance=instance,
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
        shown = [(page.PATH, page.Page().response)] if self._serve.page else []
        for path, handler in (
            *shown,
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
                    include_in_schema=method == "GET" and path != page.PATH,
                )  # fmt: skip
        for path, handler in (
            ("/v1/completions", self._completions),
            ("/v1/chat/completions", self._chat),
            ("/v1/responses", self._responses),
            ("/v1/responses/input_tokens", self._input_tokens),
            ("/v1/messages", self._messages),
            ("/v1/messages/count_tokens", self._count_tokens),
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
            "/v1/responses": ResponsesBody,
            "/v1/responses/input_tokens": ResponsesBody,
            "/v1/messages": MessagesBody,
            "/v1/messages/count_tokens": CountTokensBody,
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
        return self._answers.drain(cut=cut)

    async def _health(self) -> Response:
        dead = self._driver.error
        status = "dead" if dead else "draining" if self._answers.is_draining else "ok"
        if status == "ok" and self._driver.is_recovering:
            status = "recovering"  # requests are taken, and wait for the ranks
        report = {"status": status, **self._about()} | ({"reason": str(dead)} if dead else {})
        return json_response(report, 200 if status in ("ok", "recovering") else 503)

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
        self._answers.check_draining()
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
        return await self._answers.answer(
            request, body, writer, prompts, "prompt", grammar=body.grammar
        )

    async def _chat(self, request: Request) -> Response:
        self._answers.check_draining()
        body = await self._bodies.read(ChatBody, await request.body())
        self._check_model(body.model)
        prompt = await self._prompts.encode_chat(body)
        writer = ResponseWriter(
            body=body, model=self._model, tokenizer=self._tokenizer, echoes=[body.echoed] * body.n,
            form=prompt.form,
        )  # fmt: skip
        return await self._answers.answer(
            request, body, writer, [prompt.ids], "messages", grammar=prompt.grammar
        )

    async def _responses(self, request: Request) -> Response:
        defaults = {**DEFAULTS, **self._driver.limits.sampling_defaults}

        def writer(body: ResponsesBody, reader: ReplyReader) -> AnswerWriter:
            return ResponsesWriter(body, self._model, reader, defaults)

        return await self._in_dialect(request, ResponsesBody, writer)

    async def _messages(self, request: Request) -> Response:
        def writer(body: MessagesBody, reader: ReplyReader) -> AnswerWriter:
            return MessagesWriter(self._model, reader)

        return await self._in_dialect(request, MessagesBody, writer)

    async def _in_dialect(
        self,
        request: Request,
        kind: type[DialectT],
        writer: Callable[[DialectT, ReplyReader], AnswerWriter],
    ) -> Response:
        """A chat in other words. writer: writes the answer to a body in these words."""
        self._answers.check_draining()
        body = await self._bodies.read(kind, await request.body())
        self._check_model(body.model)
        try:
            prompt = await self._prompts.encode_chat(body.chat)
            answer = writer(body, ReplyReader(body.chat, prompt.form, self._tokenizer))
            return await self._answers.answer(
                request, body.chat, answer, [prompt.ids], "messages", grammar=prompt.grammar
            )
        except ApiError as error:
            raise error.renamed(kind.names) from None

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._bodies.read(CountTokensBody, await request.body())
        self._check_model(body.model)
        return json_response({"input_tokens": await self._prompts.count_chat(body.chat)})

    async def _input_tokens(self, request: Request) -> Response:
        body = await self._bodies.read(ResponsesBody, await request.body())
        self._check_model(body.model)
        count = await self._prompts.count_chat(body.chat)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(TokenizeBody, await request.body())
        self._check_model(body.model)
        return Response(await self._prompts.tokenize(body), media_type="application/json")

    async def _detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(DetokenizeBody, await request.body())
        self._check_model(body.model)
        body.check_ids(self._driver.limits.vocab_size)
        return json_response({"prompt": await self._prompts.detokenize(body.tokens)})

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            raise ApiError(
                404, f"model {name!r} is not served here; {self._model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip
