"""What an engine takes of a host that it shares with other engines: CPUs, and memory to plan with.

    claim_share(spec, group, engines) -> HostShare
A claim is a file that its process holds locked, in a folder of this user: engines of all Ray
clusters see it, and it ends with the process, also with one that is killed. Engines of one group
(the replicas of a server) divide CPUs and memory evenly; other engines keep off claimed CPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.actors.cluster.kinds import free_host_bytes
from outrider.actors.cluster.spec import Spec
from outrider.parallel import affinity


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """One engine's part of its host, until `release` or the end of this process."""

    cpus: frozenset[int]
    """Of its ranks, where rank_cpus is auto; empty: other engines have them, so pin nothing."""
    memory_bytes: int
    """That this engine's processes may plan with, before cache.max_memory_utilization."""
    claim: int
    """File descriptor of the locked claim."""

    def release(self) -> None:
        """Give the share back. The file stays until the next claim finds it unlocked."""
        os.close(self.claim)


def claim_share(spec: Spec, group: str, engines: int = 1, folder: Path | None = None) -> HostShare:
    """Take the first share of this host that no running engine has.

    group: name of the engines that divide the host; engines: how many there are at most. A group's
    memory is what was free before its first engine started, so that all get the same.
    """
    pins = spec.parallel.rank_cpus == "auto" and affinity.can_pin()
    cpus = affinity.allowed_cpus() if pins else frozenset()
    shares = affinity.split_evenly(cpus, engines) if len(cpus) >= engines else ()
    with _locked_folder(folder or _default_folder()) as home:
        others = list(_claims(home))
        taken = {cpu for other in others for cpu in other["cpus"]}
        mine = next((share for share in shares if not share & taken), frozenset[int]())
        free = free_host_bytes()
        before = [other["free_bytes"] for other in others if other["group"] == group]
        record = {"group": group, "cpus": sorted(mine), "free_bytes": (before or [free])[0]}
        claim, _ = tempfile.mkstemp(".claim", dir=home)
        fcntl.flock(claim, fcntl.LOCK_EX)
        os.write(claim, json.dumps(record).encode())
    return HostShare(
        cpus=mine, memory_bytes=min(free, record["free_bytes"] // engines), claim=claim
    )


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[Path]:
    """The folder of claims, made if need be, while no other process looks into it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(handle)


def _claims(folder: Path) -> Iterator[dict[str, Any]]:
    """Claims of processes that live; files of those that have ended are removed."""
    for file in folder.glob("*.claim"):
        with file.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield json.loads(handle.read())
            else:
                file.unlink()
