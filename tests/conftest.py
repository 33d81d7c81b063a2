"""Fixtures and markers of every room.

`planted_tiny` is the folder of a checkpoint whose output is known (benchmarks/planted.py); `repo`
is the root of the repository; `cluster` is the one Ray cluster that tests share, and `tiny` an
engine on it with the bundled checkpoint. Tests marked cuda or npu are skipped where there is no
such device, tests marked slow unless --slow is given. Tests that use the cluster run last: it
starts once, after all tests that want no Ray in this process or one of their own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: test processes share few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub: no test uses the network

import pytest

if TYPE_CHECKING:
    from outrider.actors.engine import Engine


def pytest_configure(config: pytest.Config) -> None:
    """Engines that tests start see no other engines of this host, whose CPUs they would leave.

    Their claims and their sockets lie in the folder for temporary files; Ray's own files stay where
    they are, since its sockets need a short path.
    """
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="outrider-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


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
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


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


@dataclass(frozen=True)
class RunningCluster:
    """A Ray cluster that this process has started, and is connected to."""

    address: str
    """HOST:PORT, as `ray.address` of cluster.yaml or RAY_ADDRESS take it."""
    dashboard: str
    """URL that takes jobs."""

    def environ(self) -> dict[str, str]:
        """For a process that is to join: its token is in os.environ since the cluster started."""
        return {**os.environ, "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    """Ray with logical CPUs to spare, one emulated GPU, two emulated NPUs, and the dashboard."""
    import ray

    from outrider.actors.cluster.placement import RAY_ENV

    assert not ray.is_initialized(), "a test that had Ray for itself has left it running"
    for name, value in (*RAY_ENV.items(), ("RAY_AUTH_TOKEN", secrets.token_hex(32))):
        os.environ.setdefault(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # jobs' python
        context: Any = ray.init(
            address="local",
            num_cpus=12,
            num_gpus=1,
            resources={"NPU": 2},
            namespace="outrider",
            include_dashboard=True,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",  # it warns that tokens are on
        )
    address = context.address_info["gcs_address"]
    yield RunningCluster(address, f"http://{context.dashboard_url}")
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny(cluster: RunningCluster, repo: Path) -> Iterator[Engine]:
    """The bundled checkpoint on two ranks, five drafts an iteration unless a request says fewer."""
    from outrider.actors.engine import Engine

    model = str(repo / "examples" / "tiny")
    keys = {"draft_tokens": 5, "tensor_parallel": 2, "rank_cpus": None}  # CPUs: left to others
    with Engine.from_config(None, keys, model=model) as engine:
        yield engine
