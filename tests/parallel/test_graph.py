"""What Graphs does when an operation cannot be captured. Graphs themselves need a GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.parallel.device import Capabilities, Device
from outrider.parallel.graph import CaptureError, Graphs
from outrider.parallel.group import alone
from outrider.parallel.ops import Ops


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Graphs of a device whose capture runs the work, so that operations raise their own errors."""

    @contextlib.contextmanager
    def capture(graph: object, **_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    where, can = torch.device("cpu"), Capabilities(graphs=True)
    return Graphs(Device(torch_device=where, ops=Ops(), tp=alone(), capabilities=can))


class Work:
    """Runs once, then fails in an operation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        width = 3 if self.calls == 2 else 4
        return Ops().add_rms_norm(torch.ones(2, 4), torch.ones(2, width), torch.ones(4), 1e-6)[0]


def test_a_failed_capture_names_the_work_the_line_and_the_reason(graphs: Graphs) -> None:
    work = Work()
    graphs.run(("iteration", 8), work)
    says = r"\('iteration', 8\) cannot be captured: parallel/ops.py:\d+: total = x \+ .*size"
    with pytest.raises(CaptureError, match=says):
        graphs.run(("iteration", 8), work)


def test_work_that_can_do_without_runs_on_uncaptured(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    with caplog.at_level(logging.WARNING):
        for calls in (1, 3, 4):  # the second call fails in capture and is then run
            assert graphs.run("chunk", work, needed=False).shape == (2, 4)
            assert work.calls == calls
    assert sum("cannot be captured" in record.message for record in caplog.records) == 1
