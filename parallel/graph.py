"""Work that is captured once and then replayed, in one launch for a whole iteration.

    Graphs.run(key, work) -> first time: run, then: capture and replay, later: replay

The tensors that captured work reads must stay, and a replay overwrites the tensors that the replay
before it returned for the same key. On a device without graphs the work runs each time. One graph
is kept for each key.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider.parallel.device import Device

T = TypeVar("T")
log = logging.getLogger(__name__)
ROOT, ROOMS = Path(__file__).parents[1], {"model", "parallel"}


class CaptureError(RuntimeError):
    """An operation cannot be captured; the text names it, the work's key, and torch's reason."""


class Graphs:
    """The captured graphs of one device, sharing one memory pool."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Hashable, tuple[Any, Any]] = {}
        self._eager: set[Hashable] = set()
        self._pool: Any = None

    def run(self, key: Hashable, work: Callable[[], T], *, needed: bool = True) -> T:
        """Do `work`, by a replay where it was captured under `key`.

        The first call runs the work itself, the second one captures it and replays it. Where it
        cannot be captured: raises CaptureError if that is `needed`; else warns, once a key, and
        runs the work from then on.
        """
        if not self._device.capabilities.graphs or key in self._eager:
            return work()
        if key not in self._graphs:
            self._graphs[key] = (None, None)
            return work()
        replay, outputs = self._graphs[key]
        if replay is None:
            try:
                replay, outputs = self._capture(key, work)
            except CaptureError as error:
                if needed:
                    raise
                log.warning("%s; it runs uncaptured, slower", error)
                self._eager.add(key)
                return work()
        replay()
        return outputs

    def is_eager(self, key: Hashable) -> bool:
        """Whether the work could not be captured, so that it makes new tensors each time."""
        return key in self._eager

    def _capture(self, key: Hashable, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        capture = self._device.capture or _capture_cuda
        try:
            replay, outputs, self._pool = capture(work, self._pool)
        except RuntimeError as error:
            raise CaptureError(
                f"the work {key} cannot be captured: {operation_of(error)}: {error}"
            ) from error
        self._graphs[key] = (replay, outputs)
        return replay, outputs


def _capture_cuda(work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = work()
    return graph.replay, outputs, pool or graph.pool()


def operation_of(error: BaseException) -> str:
    """The line of model/ or parallel/ that raised the error: "model/mtp.py:42: y = f(x)"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
            return f"{path.relative_to(ROOT)}:{frame.lineno}: {frame.line}"
    return "outside of model/ and parallel/"
