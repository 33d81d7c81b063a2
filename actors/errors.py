"""The errors that cross from the engine to whoever asked it.

    RequestError, PromptTooLongError, QueueFullError: of one request that is not taken
    RequestAbortedError, RequestFailedError: of one that ended early
    EngineDeadError, EngineClosedError: of the engine
Each travels by its class name and its message (driver/messages.py, `Failure`).
"""

from __future__ import annotations


class RequestError(ValueError):
    """A request that this engine can never answer: says the value, the rule and what to change."""


class PromptTooLongError(RequestError):
    """No answer fits behind this prompt, in the context or in the cache."""


class QueueFullError(RequestError):
    """`limits.max_queue` requests wait already: try again later."""


class RequestAbortedError(RuntimeError):
    """The request was aborted by its caller."""


class DetailedError(RuntimeError):
    """An error whose cause lies in another process. `detail`: its traceback there, or empty."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.detail)


class RequestFailedError(DetailedError):
    """A fault of ours met one request, or it is one that ends the ranks. The engine and all other
    requests go on."""


class EngineDeadError(DetailedError):
    """The ranks are lost for good; every request that was not complete ends with this."""


class EngineClosedError(EngineDeadError):
    """The engine was closed before the request was complete, or before it came."""


class DivergenceError(RuntimeError):
    """Two ranks hold different slot tables: their tokens can no longer be trusted."""
