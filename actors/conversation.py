"""A conversation with a running server over HTTP: what was said, and an answer while it comes.

    Server (url, key) -> events of a stream -> Conversation.ask -> Pieces of the answer
What was said of an answer that is stopped, or that the server cannot finish, stays in the history.
A turn without any answer leaves no trace there. Nothing here knows of terminals.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

SILENCE_S = 300.0
"""Longest wait for a server that has accepted the connection to say something."""
MAX_ERROR_BYTES = 1 << 16
BUSY = 429


class ServerError(RuntimeError):
    """The server does not answer, or ended an answer before its end."""


class RefusedError(ValueError):
    """The server refuses a request: it says the value and the rule."""


class Server:
    """An OpenAI server at a base URL such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: /v1 may be left out. key: of the API, where it wants one. ValueError for a URL that
        is none."""
        parts = urlsplit(url.strip().rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f'--url "{url}": expected http://HOST:PORT or https://HOST')
        self.url = parts.geturl() if parts.path else parts.geturl() + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        # The environment's proxies are for the world outside; a server of models is rarely there.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def models(self) -> list[str]:
        """The names of the models that it serves."""
        with self._open("/models", None) as response:
            try:
                return [str(one["id"]) for one in json.load(response)["data"]]
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self.url}/models: this is no OpenAI server") from None

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat. ServerError where it ends before [DONE]."""
        with self._open("/chat/completions", body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise ServerError(f"{self.url}: answers with {kind}, not with a stream of events")
            while line := self._line(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"the answer ended early: {_message(event)}")
                yield event
        raise ServerError("the answer ended early: the server has closed the connection")

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as problem:
            raise ServerError(f"the answer ended early: {_reason(problem)}") from None

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as refusal:
            with closing(refusal):
                raise _refusal(refusal) from None
        except (OSError, http.client.HTTPException) as problem:
            why = f"{self.url} does not answer: {_reason(problem)}"
            raise ServerError(f"{why}; start `outrider serve`, or name another --url") from None


def _refusal(error: urllib.error.HTTPError) -> ServerError | RefusedError:
    """What an answer other than 200 says."""
    try:
        said = _message(json.loads(error.read(MAX_ERROR_BYTES)))
    except (ValueError, OSError, http.client.HTTPException):
        said = error.reason
    if 400 <= error.code < 500 and error.code != BUSY:
        return RefusedError(f"{error.code}: {said}")
    wait_s = error.headers.get("retry-after")
    return ServerError(f"{error.code}: {said}" + (f"; try again in {wait_s} s" if wait_s else ""))


def _message(event: Any) -> str:
    """The message of an error in OpenAI's form, or all of it where it has another form."""
    error = event.get("error") if isinstance(event, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or event)


def _reason(problem: Exception) -> str:
    cause = getattr(problem, "reason", problem)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer. All of its tokens have one source."""

    text: str
    is_thought: bool
    """Whether it belongs to the thought before the answer."""
    source: Literal["draft", "correction", "target"]
    """An accepted draft, what the target says instead of a wrong draft, or any other of its own."""


@dataclass
class Counts:
    """Tokens and drafts: of one answer, or summed over several."""

    answers: int = 0
    tokens: int = 0
    """Of the answers, thoughts included."""
    first_s: float = 0.0
    """From the question to the first token."""
    later_s: float = 0.0
    """From the first token to the last."""
    drafted: list[int] = field(default_factory=list)
    """By position in an iteration: how many drafts were made."""
    accepted: list[int] = field(default_factory=list)

    def add_iteration(self, drafted: int, accepted: int) -> None:
        self.drafted = _sums(self.drafted, [1] * drafted)
        self.accepted = _sums(self.accepted, [1] * accepted)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            answers=self.answers + other.answers,
            tokens=self.tokens + other.tokens,
            first_s=self.first_s + other.first_s,
            later_s=self.later_s + other.later_s,
            drafted=_sums(self.drafted, other.drafted),
            accepted=_sums(self.accepted, other.accepted),
        )

    def line(self) -> str:
        """One line for people. The rate of tokens leaves the first of each answer out."""
        if not self.answers:
            return "none yet"
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        rates = itertools.zip_longest(self.accepted, self.drafted, fillvalue=0)
        by_position = "/".join(f"{100 * part / whole:.0f}" for part, whole in rates)
        parts = [
            f"{self.answers} answers" if self.answers > 1 else "",
            f"{self.tokens} tokens",
            f"{(self.tokens - self.answers) / self.later_s:.0f} tok/s" if self.later_s else "",
            f"first after {1000 * self.first_s / self.answers:.0f} ms",
            f"accepted {accepted} of {drafted} drafts" if drafted else "no drafts",
            f"by position {by_position} %" if drafted else "",
        ]
        return " | ".join(part for part in parts if part)


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]


class Conversation:
    """The messages so far. `ask` adds a question and its answer."""

    def __init__(
        self, server: Server, *, system: str | None = None, settings: Mapping[str, Any]
    ) -> None:
        """settings: fields of the body, such as model and temperature."""
        self._server, self._settings = server, settings
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        self.last, self.total = Counts(), Counts()
        """Of the last answer, and of all."""

    def reset(self) -> None:
        """Begin anew, behind the system's message."""
        self.messages: list[dict[str, str]] = [*self._beginning]

    def ask(self, text: str) -> Generator[Piece]:
        """The answer, as it comes. RefusedError, ServerError.

        Closing the iterator stops the answer.
        """
        question = {"role": "user", "content": text}
        body = {
            **self._settings,
            "messages": [*self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_draft_info": True,
        }
        said: list[str] = []
        counts = Counts(answers=1)
        try:
            with closing(self._server.stream(body)) as events:
                for piece in _pieces(events, counts):
                    if not piece.is_thought:
                        said.append(piece.text)
                    yield piece
        finally:
            if counts.tokens:
                self.last, self.total = counts, self.total + counts
                answer = {"role": "assistant", "content": "".join(said)}
                self.messages += [question, answer]


def _pieces(events: Iterator[dict[str, Any]], counts: Counts) -> Iterator[Piece]:
    """The text that events hold; what they count goes into `counts`."""
    asked_s = time.perf_counter()
    for event in events:
        tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        if tokens > counts.tokens:
            now_s = time.perf_counter() - asked_s
            if not counts.tokens:
                counts.first_s = now_s
            counts.later_s = now_s - counts.first_s
            counts.tokens = tokens
        for choice in event["choices"]:
            yield from _pieces_of(choice, counts)


def _pieces_of(choice: dict[str, Any], counts: Counts) -> Iterator[Piece]:
    info = choice.get("draft_info") or {}
    drafted, accepted = info.get("drafted") or 0, info.get("accepted") or 0
    counts.add_iteration(drafted, accepted)
    source = "draft" if info.get("source") == "draft" else "target"
    if source == "target" and accepted < drafted:
        source = "correction"
    delta = choice.get("delta", {})
    for name in ("reasoning_content", "content"):
        if text := delta.get(name):
            yield Piece(text, name == "reasoning_content", source)
