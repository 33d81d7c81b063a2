"""A device as the layers see it: where tensors lie, what computes on them, which ranks share them.

    devices.open_device("cpu", 0, group) -> Device(torch_device, ops, tp, capabilities)

Code asks a Device for its operations (parallel/ops.py) and for its capabilities, never for a chip.
Results go to the host in `fetch`, values come from the host in `send`, and neither waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.parallel.group import Group, alone
from outrider.parallel.ops import Ops


class DeviceError(ValueError):
    """The device that was asked for is not there, or cannot run this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do, and what it wants of its callers."""

    graphs: bool = False
    """Whether an iteration can be captured once and replayed."""
    run_ahead: int = 0
    """How many iterations may be enqueued before the results of an earlier one are read."""
    host_lengths: bool = False
    """Whether attention takes its lengths on the host (Rows.host_lengths)."""
    max_rows: int | None = None
    """The most rows a slot may have in a verify pass, K+1; None: any number."""
    page_multiple: int = 1
    """The number of tokens of a page must be a multiple of this."""

    @property
    def prompt_graphs(self) -> bool:
        """Whether prompt chunks can be captured: nothing about them is decided on the host."""
        return self.graphs and not self.host_lengths

    @property
    def sampled_graphs(self) -> bool:
        """Whether iterations are captured also where slots need logits, by how many they are."""
        return self.prompt_graphs


Capture = Callable[[Callable[[], Any], Any], tuple[Callable[[], None], Any, Any]]
"""(work, memory pool or None) -> (function that replays it, what the work returned, the pool)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Results on their way to the host."""

    copies: list[Tensor]
    event: Any
    """The device reaches this event once the copies are complete. None on the CPU."""

    def wait(self) -> list[Tensor]:
        """Wait for the event; -> the results as CPU tensors."""
        if self.event is not None:
            self.event.synchronize()
        return self.copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What every layer is built with. `tp` is the group of ranks that share sharded tensors."""

    torch_device: torch.device
    ops: Ops
    tp: Group
    capabilities: Capabilities = Capabilities()
    capture: Capture | None = None
    """How work is captured; None: as a CUDA graph (parallel/graph.py)."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Start copying results to the host, behind the work that is enqueued now."""
        if self.torch_device.type == "cpu":
            return Fetched(list(tensors), None)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.get_device_module(self.torch_device).Event()
        event.record()
        return Fetched(copies, event)

    def send(self, values: Tensor) -> Tensor:
        """A CPU tensor as one on the device, copied behind the work that is enqueued now."""
        if self.torch_device.type == "cpu":
            return values
        return values.pin_memory().to(self.torch_device, non_blocking=True)

    def synchronise(self) -> None:
        """Wait until all enqueued work is done. For measurements: no iteration needs it."""
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def local(self) -> Device:
        """The same device with a group of one: for modules that every rank holds whole."""
        return replace(self, tp=alone())
