"""The errors that cross from the engine to whoever asked it.

    RequestError, QueueFullError: one request    EngineDeadError, EngineClosedError: the engine
Each travels by its class name and its message (driver/messages.py, `Failure`).
"""

from __future__ import annotations


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
