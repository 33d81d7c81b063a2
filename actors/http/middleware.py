"""In front of the routes: checks the API key, and size, time and coding of a body; counts answers.

    ASGI call -> allow_origins -> AuthMiddleware -> routes
Also here: how an error becomes an answer, in the form of the API that was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.cluster.haproxy_start import INSTANCE_HEADER
from outrider.actors.cluster.spec import ServeSpec
from outrider.actors.http.bodies import ApiError
from outrider.actors.http.dialects.messages_writer import error_object


class ClientTooSlowError(OSError):
    """A client has read nothing of its answer for serve.reader_timeout_s."""


class AuthMiddleware:
    """Passes a request on if its API key is right and its body is not too large."""

    def __init__(
        self,
        inner: ASGIApp,
        keys: Sequence[bytes],
        serve: ServeSpec,
        answered: Callable[[str, int], None],
        *,
        open_paths: Sequence[str],
        instance: str | None = None,
    ) -> None:
        """keys: SHA-256 digests. answered: told of each answer's route and status. open_paths: what
        needs no key. instance: what INSTANCE_HEADER of every request must say; None: anything."""
        self._inner, self._keys = inner, keys
        self._serve, self._answered = serve, answered
        self._open_paths, self._instance = open_paths, instance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        limited = self._limited(receive)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._answered(getattr(route, "path", "unknown"), message["status"])
            try:
                async with asyncio.timeout(self._serve.reader_timeout_s):
                    await send(message)
            except TimeoutError:  # the server closes the connection then
                raise ClientTooSlowError from None

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.endswith("/"):
            path = path.rstrip("/") or "/"
            scope = {**scope, "path": scope.get("root_path", "") + path}
        refusal = self._refusal(path, headers)
        if refusal is None:
            with contextlib.suppress(ClientTooSlowError):
                await self._inner(scope, limited, counted)
        else:
            await (await error_response(Request(scope), refusal))(scope, receive, counted)

    def _limited(self, receive: Receive) -> Receive:
        """receive, until the body is whole: ApiError for one that is too large or too slow."""
        size, is_whole = 0, False
        deadline_s = time.monotonic() + self._serve.request_timeout_s

        async def limited() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                limit_s = self._serve.request_timeout_s
                why = f"the body took longer than serve.request_timeout_s = {limit_s:g} s"
                raise ApiError(408, why) from None
            size, is_whole = size + len(message.get("body", b"")), not message.get("more_body")
            if size > self._serve.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """What is wrong with a request that its headers tell, or None."""
        length = headers.get(b"content-length", b"0")
        coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        instance = headers.get(INSTANCE_HEADER.encode(), b"")
        if self._instance and not hmac.compare_digest(instance, self._instance.encode()):
            return ApiError(
                503, "this request came through another server's proxy: send it again later",
                kind="server_error", code="unavailable", retry_after_s=1,
            )  # fmt: skip
        if path not in self._open_paths and not self._is_allowed(headers):
            return ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY or x-api-key",
                kind="authentication_error", code="invalid_api_key",
            )  # fmt: skip
        if length.isdigit() and int(length) > self._serve.max_body_bytes:
            return self._too_large()
        if coding.strip().lower() not in ("identity", ""):
            why = f"content-encoding {coding[:64]!r}: a body is read as it is sent, uncompressed"
            return ApiError(415, why)
        return None

    def _is_allowed(self, headers: Mapping[bytes, bytes]) -> bool:
        """Compares the digest with that of every key: the time it takes tells nothing of them."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), bearer if scheme.lower() == b"bearer" else b""]
        given = [hashlib.sha256(key.strip()).digest() for key in keys]
        equal = [hmac.compare_digest(one, digest) for one in given for digest in self._keys]
        return not self._keys or any(equal)

    def _too_large(self) -> ApiError:
        rule = f"serve.max_body_bytes = {self._serve.max_body_bytes} is the most"
        return ApiError(413, f"the body is too large: {rule}")


def allow_origins(inner: ASGIApp, origins: Sequence[str] | Literal["*"]) -> ASGIApp:
    """Let web pages of these origins call `inner` from a browser, and read all of its answers.

    origins: serve.cors_origins; none of them adds nothing. Preflights are answered without a key,
    since browsers send none with them. Cookies play no part: a key is a header.
    """
    if not origins:
        return inner
    return CORSMiddleware(
        inner,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # from a public page to a server in the user's own network
        expose_headers=("retry-after",),
    )


async def error_response(request: Request, error: Exception) -> Response:
    """The answer for an ApiError, or for an error of the router (404, 405), in the form of the API
    that was asked."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    assert isinstance(error, ApiError)
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    in_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    told = error_object(error) if in_messages else {"error": error.error}
    answer = json_response(told, error.status)
    if error.retry_after_s is not None:
        answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
