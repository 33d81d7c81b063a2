"""Connections between processes: typed msgpack messages over zmq PAIR sockets.

    Connector.listen() -> (Connection, Address)        Address -> Connector.connect() -> Connection
Every address is new, so a message for an engine that has ended cannot reach the next one. On one
machine the sockets are files in a private folder; between machines they are TCP, encrypted.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from asyncio import Future
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import zmq

T = TypeVar("T")
MESSAGE_LIMIT_BYTES = 64 << 20
"""No message to or from a rank is larger: a peer that sends more is cut off."""
LINGER_MS = 200
"""How long a closed socket still tries to deliver."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where one end of a connection listens."""

    endpoint: str
    """ipc:// or tcp://, as zmq writes it."""
    public_key: bytes = b""
    """CURVE key of a TCP listener. It travels over Ray only, so only its holders can connect."""


class Connector:
    """Makes the connections of one process: it holds their zmq context and their private folder.

    Sockets on one machine lie in a new folder of mode 0700 under random names. Once the peers are
    connected the folder can be removed (`remove_folder`); the connections stay, and even SIGKILL
    leaves no files behind.
    """

    def __init__(
        self,
        context: zmq.Context | None = None,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        folder: str | None = None,
    ) -> None:
        """limit_bytes: the longest message that may come in; -1: any. folder: that of the sockets,
        which must not exist yet; None: one with a random name."""
        self.context: zmq.Context[Any] = context or zmq.Context(io_threads=1)
        self._limit_bytes = limit_bytes
        self._wanted_folder, self._folder = folder, None
        self._sockets: list[zmq.Socket[Any]] = []

    def listen(self, host: str | None) -> tuple[Connection, Address]:
        """Wait for one peer. host None: it is on this machine; else: listen on this address, at a
        port that the system chooses."""
        socket = self._socket()
        if host is None:
            if self._folder is None:
                self._folder = self._new_folder()
            endpoint = f"ipc://{self._folder}/{os.urandom(8).hex()}"
            socket.bind(endpoint)
            return Connection(socket, self._limit_bytes), Address(endpoint=endpoint)
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret
        socket.bind(f"tcp://{host}:*")
        return Connection(socket, self._limit_bytes), Address(
            endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT), public_key=public
        )

    def _new_folder(self) -> str:
        if self._wanted_folder is None:
            return tempfile.mkdtemp(prefix="outrider-")
        os.mkdir(self._wanted_folder, 0o700)
        return self._wanted_folder

    def connect(self, address: Address) -> Connection:
        """The other end of a connection that listens at `address`."""
        socket = self._socket()
        if address.public_key:
            public, secret = zmq.curve_keypair()
            socket.curve_serverkey = address.public_key
            socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.connect(address.endpoint)
        return Connection(socket, self._limit_bytes)

    def remove_folder(self) -> None:
        """Once all peers are connected: nobody needs the socket files any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close_sockets(self) -> None:
        """Close the sockets. Only the thread that uses them may call it."""
        for socket in self._sockets:
            socket.close(LINGER_MS)
        self._sockets.clear()

    def close(self) -> None:
        """Close everything. Only where no other thread uses a connection."""
        self.close_sockets()
        self.remove_folder()
        self.context.term()

    def _socket(self) -> zmq.Socket[Any]:
        socket = self.context.socket(zmq.PAIR)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limit_bytes)
        # Memory is bounded by the work under way (slots x tokens); a full queue would stall ranks.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._sockets.append(socket)
        return socket


class Connection:
    """One end of a connection: typed messages, in order, each at most `limit_bytes` if not -1."""

    def __init__(self, socket: zmq.Socket[Any], limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self.socket = socket
        self._limit_bytes = limit_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks. ConnectionError when the other end is gone."""
        data = self._encoder.encode(message)
        if len(data) > self._limit_bytes > 0:
            raise ValueError(
                f"message of {len(data)} bytes: this connection takes {self._limit_bytes}"
            )
        try:
            sent = self.socket.send(data, zmq.NOBLOCK)
            if isinstance(sent, Future):  # of a zmq.asyncio socket: done at once
                sent.result()
        except zmq.Again:
            raise ConnectionError("the other end of this connection is gone") from None

    def ready(self) -> bool:
        """True when a message waits to be received."""
        return bool(cast(int, self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, kind: type[T], timeout_s: float | None = None) -> T:
        """The next message, which must be of this kind. TimeoutError after `timeout_s`."""
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
