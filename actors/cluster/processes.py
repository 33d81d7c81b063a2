"""The processes of a server's own cluster: who takes SIGTERM, and that none of them stays.

    the server: sigterm_blocked() around the start of Ray, killed() around its end
    a replica: ignore_sigterm()
SIGTERM may come to all processes of a server at once, as systemd sends it. The server drains then.
Until the requests under way have ended it needs Ray, the replicas and their ranks; so they leave
the signal to it. HAProxy ignores it too (haproxy_start.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SERVERS = ("gcs_server", "raylet")
"""Processes of a cluster, in Ray's words, without which it is none."""
IGNORE = 1
"""SIG_IGN of signal(2)."""


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Processes that are started in the body never get SIGTERM, nor do theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm() -> None:
    """This process does nothing on SIGTERM, whichever of its threads lets signals through.

    Where the start of Ray did not block it, as on a cluster that is not a server's own, nothing is
    changed. multiprocessing unblocks it in whatever thread first starts a process; and Python sets
    what a signal does in the main thread alone, which is Ray's here.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(IGNORE))


def lost_process() -> str | None:
    """Why the private cluster of this process cannot go on, or None: which of its servers ended.

    A node ends with its dashboard agent, and its workers with their node.
    """
    from ray._private import worker

    node: Any = worker._global_node
    if node is None or not node.is_head():
        return None
    for kind, process in node.dead_processes():
        if kind in SERVERS:
            return f"Ray's {kind} (pid {process.pid}) has ended ({process.returncode}): start again"
    return None


@contextlib.contextmanager
def killed(*, first: bool = False) -> Iterator[None]:
    """The processes that descend from this one are killed behind the body, which ends Ray.

    first: before it, because they do not answer. Ray's own way is to send SIGTERM to one after the
    other and to wait a second for each; and of those that its raylet has started, some outlive a
    raylet that is killed.
    """
    from ray._private import worker

    node, ours = worker._global_node, _descendants(os.getpid())
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill(**{**how, "allow_graceful": False})
    if first:
        _kill(ours)
    yield
    _kill(ours)


def _kill(processes: Mapping[int, str]) -> None:
    """processes: their ids, and when each began; those that have ended since are left alone."""
    for pid, began in processes.items():
        if _stat(pid)[1:] == (began,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> dict[int, str]:
    """Processes that descend from `root`, and when each began, in the system's clock ticks."""
    stats = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    found, parents = {}, {root}
    while parents:
        children = {pid: stat[1] for pid, stat in stats.items() if stat and stat[0] in parents}
        found |= children
        parents = set(children)
    return found


def _stat(pid: int) -> tuple[int, str] | tuple[()]:
    """Parent of a process and when it began, or nothing if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ()
    fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
    return int(fields[1]), fields[19]
