"""In front of the routes: checks the API key, and size and coding of a body; counts every answer.

    ASGI call -> allow_origins -> AuthMiddleware -> routes
Also here: how an error becomes an answer, in the form of the API that was asked.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.http.bodies import ApiError
from outrider.actors.http.dialects.messages_writer import error_object


class AuthMiddleware:
    """Passes a request on if its API key is right and its body is not too large."""

    def __init__(
        self,
        inner: ASGIApp,
        keys: Sequence[bytes],
        max_body_bytes: int,
        answered: Callable[[str, int], None],
        *,
        open_paths: Sequence[str],
    ) -> None:
        """keys: SHA-256 digests. answered: told of each answer's route and status. open_paths: what
        needs no key."""
        self._inner, self._keys = inner, keys
        self._max_body_bytes, self._answered = max_body_bytes, answered
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large()
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._answered(getattr(route, "path", "unknown"), message["status"])
            await send(message)

        length = headers.get(b"content-length", b"0")
        coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.endswith("/"):
            path = path.rstrip("/")
            scope = {**scope, "path": scope.get("root_path", "") + (path or "/")}
        if path not in self._open_paths and not self._is_allowed(headers):
            refusal = ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY or x-api-key",
                kind="authentication_error", code="invalid_api_key",
            )  # fmt: skip
        elif length.isdigit() and int(length) > self._max_body_bytes:
            refusal = self._too_large()
        elif coding.strip().lower() not in ("identity", ""):
            why = f"content-encoding {coding[:64]!r}: a body is read as it is sent, uncompressed"
            refusal = ApiError(415, why)
        else:
            await self._inner(scope, limited, counted)
            return
        await (await error_response(Request(scope), refusal))(scope, receive, counted)

    def _is_allowed(self, headers: Mapping[bytes, bytes]) -> bool:
        """Compares the digest with that of every key: the time it takes tells nothing of them."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), bearer if scheme.lower() == b"bearer" else b""]
        given = [hashlib.sha256(key.strip()).digest() for key in keys]
        equal = [hmac.compare_digest(one, digest) for one in given for digest in self._keys]
        return not self._keys or any(equal)

    def _too_large(self) -> ApiError:
        rule = f"serve.max_body_bytes = {self._max_body_bytes} is the most"
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
