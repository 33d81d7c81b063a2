"""Fixtures and markers of every room.

`planted_tiny` is the folder of a checkpoint whose output is known (benchmarks/planted.py);
`repo` is the root of the repository. Tests marked cuda or npu are skipped where there is no such
device, tests marked slow unless --slow is given.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: test processes share few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub: no test uses the network

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = {item: {mark.name for mark in item.iter_markers()} for item in items}
    wanted = set().union(*marked.values()) & {"cuda", "npu"}
    missing = {kind for kind in wanted if not _has_device(kind)}
    for item, marks in marked.items():
        if "slow" in marks and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))
        for kind in sorted(marks & missing):
            item.add_marker(pytest.mark.skip(reason=f"no {kind} device here"))


def _has_device(kind: str) -> bool:
    import torch

    module = getattr(torch, kind, None)
    return module is not None and module.is_available()


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def planted_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Size tiny, accept 0.8425, seed 0; `planted.chain(1024, 0.8425, 0)` is its chain."""
    from outrider.benchmarks import planted

    folder = tmp_path_factory.mktemp("planted") / "tiny"
    planted.write(folder, "tiny", accept=0.8425, seed=0)
    return folder
