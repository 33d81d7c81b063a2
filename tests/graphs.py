"""Graphs on the CPU: work is recorded at its second run, and replayed into the same tensors.

    record(runner) -> the keys of what was captured, in order; the runner now captures its work

A replay that reads a tensor which the host has replaced, or writes one that nobody reads, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from outrider.model.runner import Runner
from outrider.parallel.device import Capabilities
from outrider.parallel.operands import GatheredSlots


def record(runner: Runner) -> Callable[[], list[Hashable]]:
    """From now on as on a device with graphs. The result lists the keys captured so far."""
    it = runner.executor
    owners = [it.slots, it.slots.sampling, it.states, it.pages]
    owners += [it.draft_pages, it.slots.backlog] if it.draft_pages else []
    memory = [t for owner in owners for t in vars(owner).values() if isinstance(t, Tensor)]

    def capture(work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
        """Run the work for its outputs, and take back what it did: capturing does nothing."""
        before = [tensor.clone() for tensor in memory]
        outputs = work()
        for tensor, old in zip(memory, before, strict=True):
            tensor.copy_(old)

        def replay() -> None:
            for old, fresh in zip(flat(outputs), flat(work()), strict=True):
                old.copy_(fresh)

        return replay, outputs, pool

    can = Capabilities(graphs=True)
    runner.use_device(replace(runner.device, capabilities=can, capture=capture))
    graphs = runner.graphs._graphs
    return lambda: [key for key, (replay, _) in graphs.items() if replay is not None]


def flat(outputs: Any) -> list[Tensor]:
    """Every tensor in what some work returned."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, GatheredSlots):
        outputs = [getattr(outputs, field.name) for field in fields(outputs)]
    return [t for part in outputs or () for t in flat(part)] if outputs is not None else []
