"""Servers that give every connection the same answer: what may stand where a head should."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

GRPC = bytes.fromhex("00001204000000000000040040000000050040000000060000400000")[:27]
"""How a gRPC server begins: an HTTP/2 settings frame with three settings."""
WEB = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Yields HOST:PORT. Once a client has sent anything it gets the answer; b"": it gets none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as clients:
                while True:
                    client = clients.enter_context(listener.accept()[0])
                    if client.recv(1):
                        client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()
