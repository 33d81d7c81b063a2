"""What the processes of one engine or server have made on this machine, and whether it is gone.

    footprint = Footprint.of(pid, ...)      ...they end...      footprint.wait_until_gone()
Only what these processes hold is looked at, so other engines on the machine do not disturb.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray


@dataclass(frozen=True)
class Footprint:
    processes: list[psutil.Process]
    files: frozenset[Path]
    """Sockets in the file system and shared memory of ours; some are unlinked while in use."""

    @classmethod
    def of(cls, *pids: int) -> Footprint:
        """Of these processes and all their descendants."""
        family = {process.pid: process for pid in pids for process in _family(pid)}
        files: set[Path] = set()
        for process in family.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # HAProxy has just been replaced
                files |= _files(process)
        return cls(list(family.values()), frozenset(files))

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.processes}

    def wait_until_gone(self, timeout_s: float = 20.0) -> None:
        """Returns once no process lives and no file exists; AssertionError names the others."""
        _wait(lambda: [one for one in self.processes if _lives(one)], timeout_s)
        _wait(lambda: [path for path in self.files if path.exists()], timeout_s)


def held_cpus(groups: dict[str, Any]) -> float:
    """CPUs that the placement groups of a table hold."""
    bundles = [
        bundle
        for group in groups.values()
        if group["state"] != "REMOVED"
        for bundle in group["bundles"].values()
    ]
    return sum(bundle.get("CPU", 0) for bundle in bundles)


def wait_until_free(resource: str, amount: float) -> None:
    deadline_s = time.monotonic() + 10
    while ray.available_resources().get(resource) != amount:
        assert time.monotonic() < deadline_s, ray.available_resources()
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    """A zombie does not: it has ended, and its parent has not taken note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _files(process: psutil.Process) -> set[Path]:
    names = [str(one.laddr) for one in process.net_connections("unix")]
    sockets = {Path(name) for name in names if name.startswith("/")}
    maps = [part.path.removesuffix(" (deleted)") for part in process.memory_maps()]
    shared = {Path(name) for name in maps if name.startswith("/dev/shm/outrider-")}
    folders = {path.parent for path in sockets if path.parent.name.startswith("outrider-")}
    return sockets | shared | folders


def _wait(left: Callable[[], list[object]], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while still := left():
        assert time.monotonic() < deadline_s, f"still there: {still}"
        time.sleep(0.02)
