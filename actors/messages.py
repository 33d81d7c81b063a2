"""What the actors say to each other: requests and answers, orders, errors, and the wire.

    Engine -- Ask --> Driver -- Orders --> leader -- Plan --> followers
    Engine <-- Reply -- Driver <-- StepEvent -- leader
All of these travel as msgpack over zmq PAIR sockets (`Wire`), birth and death by Ray.
A wire lives for one epoch of the ranks (one life of the group): its address is new each time, so a
message of a dead epoch has no way to arrive and needs no number.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from asyncio import Future
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import zmq

from model.step import Join, Leave, Sampling

T = TypeVar("T")

WIRE_LIMIT_BYTES = 64 << 20
"""No message to or from a rank is larger: a peer that sends more is cut off."""
LINGER_MS = 200
"""How long a closed socket still tries to deliver."""


class RequestError(ValueError):
    """A request that this engine can never answer: says the value, the rule and what to change."""


class QueueFullError(RequestError):
    """`limits.max_queue` requests wait already: try again later."""


class EngineDeadError(RuntimeError):
    """The ranks are gone; every request that was under way ends with this. `detail`: traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.detail)


class EngineClosedError(EngineDeadError):
    """The engine was closed while the request was under way, or before it came."""


class RequestAbortedError(RuntimeError):
    """The request was aborted by its caller."""


class DivergenceError(RuntimeError):
    """Two ranks hold different slot tables: their tokens can no longer be trusted."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it."""

    prompt: str | list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end the answer before them; their tokens are among `token_ids`."""
    key: str = ""
    """Name under which the caller may abort it; empty: none."""


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """Counters and times of one request."""

    iterations: int = 0
    """Verify passes; the prefill, which yields the first token, is none."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the draft at position i (0 first) was accepted; as long as the engine's K."""
    ttft_s: float = 0.0
    """From submit to the first token."""
    tpot_s: float = 0.0
    """Mean time a token after the first step that yielded one; 0 when nothing followed it."""
    e2e_s: float = 0.0
    """From submit to the last token."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer. `token_ids` holds the stop token, `text` does not."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """As model.step.Progress.logprobs; empty unless sampling.logprobs asks for them."""
    finish_reason: str
    seed: int
    stats: RequestStats


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens since the chunk before. `finish_reason` and `stats` are set on the last one."""

    token_ids: list[int]
    text: str
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    at_s: float = 0.0
    """From submit to the newest of these tokens, on the driver's clock."""
    finish_reason: str | None = None
    stats: RequestStats | None = None


class Failure(msgspec.Struct, frozen=True):
    """One of the errors above, on its way to the caller."""

    kind: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error).__name__
        if kind in ERRORS:
            return cls(kind=kind, message=str(error), detail=getattr(error, "detail", ""))
        trace = "".join(traceback.format_exception(error))
        return cls(EngineDeadError.__name__, f"the driver failed: {kind}: {error}", trace)

    def error(self) -> Exception:
        kind = ERRORS[self.kind]
        if issubclass(kind, EngineDeadError):
            return kind(self.message, self.detail)
        return kind(self.message)


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        QueueFullError,
        EngineDeadError,
        EngineClosedError,
        RequestAbortedError,
    )
}


class Ask(msgspec.Struct, kw_only=True):
    """One call of an Engine: requests to answer whole or in pieces, stats, aborts, or the end."""

    call: int = 0
    """Its number, on every Reply to it; 0 wants none."""
    requests: list[Request] = []
    pieces: bool = False
    """The one request is answered Chunk by Chunk."""
    stats: bool = False
    abort: list[str] = []
    stop: bool = False


class Reply(msgspec.Struct, kw_only=True, frozen=True):
    """One of: all completions, a chunk, stats, a failure; or, unasked, how far loading is."""

    call: int
    completions: list[Completion] = []
    chunk: Chunk | None = None
    stats: dict[str, Any] | None = None
    failure: Failure | None = None
    loaded: tuple[int, int] | None = None


class Hello(msgspec.Struct, frozen=True):
    """First message each way: both ends of a wire belong to this epoch."""

    epoch: int
    rank: int
    """-1 is the driver."""


class Loading(msgspec.Struct, frozen=True):
    """How far the leader's weights are, before its first StepEvent."""

    done_bytes: int
    total_bytes: int
    ended: bool = False
    """True on the last one: weights loaded, warmed up."""


class Orders(msgspec.Struct, frozen=True):
    """The driver's word to the leader: commands in order; `stop` ends every rank's run()."""

    commands: list[Join | Leave] = []
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a wire listens. `secret`: CURVE public key of a TCP listener, told over Ray only."""

    endpoint: str
    secret: bytes = b""


class Postbox:
    """A process's zmq context and the private folder of its sockets.

    ipc sockets lie in a fresh 0700 folder under random names; `hide()` removes the folder once the
    peers are connected (the connections stay), so that even SIGKILL leaves nothing behind.
    """

    def __init__(
        self, context: zmq.Context | None = None, limit_bytes: int = WIRE_LIMIT_BYTES
    ) -> None:
        """limit_bytes: of a message that comes in; -1: none."""
        self.context: zmq.Context[Any] = context or zmq.Context(io_threads=1)
        self._limit_bytes = limit_bytes
        self._folder: str | None = None
        self._sockets: list[zmq.Socket[Any]] = []

    def listen(self, host: str | None) -> tuple[Wire, Address]:
        """host None: a peer on this machine (ipc); else TCP on that address, port from the OS."""
        socket = self._socket()
        if host is None:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="outrider-")
            endpoint = f"ipc://{self._folder}/{os.urandom(8).hex()}"
            socket.bind(endpoint)
            return Wire(socket, self._limit_bytes), Address(endpoint=endpoint)
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret
        socket.bind(f"tcp://{host}:*")
        return Wire(socket, self._limit_bytes), Address(
            endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT), secret=public
        )

    def connect(self, address: Address) -> Wire:
        socket = self._socket()
        if address.secret:
            public, secret = zmq.curve_keypair()
            socket.curve_serverkey = address.secret
            socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.connect(address.endpoint)
        return Wire(socket, self._limit_bytes)

    def hide(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def drop(self) -> None:
        """Close the sockets. Only the thread that uses them may call it."""
        for socket in self._sockets:
            socket.close(LINGER_MS)
        self._sockets.clear()

    def close(self) -> None:
        self.drop()
        self.hide()
        self.context.term()

    def _socket(self) -> zmq.Socket[Any]:
        socket = self.context.socket(zmq.PAIR)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limit_bytes)
        # Memory is bounded by the work under way (slots x tokens); a full queue would stall ranks.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._sockets.append(socket)
        return socket


class Wire:
    """One end of a connection: typed messages, in order, each at most `limit_bytes` if not -1."""

    def __init__(self, socket: zmq.Socket[Any], limit_bytes: int = WIRE_LIMIT_BYTES) -> None:
        self.socket = socket
        self._limit_bytes = limit_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks. ConnectionError when the other end is gone."""
        data = self._encoder.encode(message)
        if len(data) > self._limit_bytes > 0:
            raise ValueError(f"message of {len(data)} bytes: this wire takes {self._limit_bytes}")
        try:
            sent = self.socket.send(data, zmq.NOBLOCK)
            if isinstance(sent, Future):  # of a zmq.asyncio socket: done at once
                sent.result()
        except zmq.Again:
            raise ConnectionError("the other end of this wire is gone") from None

    def ready(self) -> bool:
        """A message waits."""
        return bool(cast(int, self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, kind: type[T], timeout_s: float | None = None) -> T:
        """Waits without CPU use. TimeoutError after `timeout_s`."""
        if timeout_s is not None and not self.socket.poll(round(timeout_s * 1000)):
            raise TimeoutError(f"no {kind.__name__} within {timeout_s:g} s")
        return self._decode(kind, self.socket.recv())

    async def receive_async(self, kind: type[T]) -> T:
        """The same on a socket of a zmq.asyncio context."""
        return self._decode(kind, await cast(Awaitable[bytes], self.socket.recv()))

    def _decode(self, kind: type[T], data: bytes) -> T:
        if kind not in self._decoders:
            self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        return self._decoders[kind].decode(data)
