"""Processes of this machine, told from others that get their pids later.

    ProcessId.of_this() in a rank -> the driver: kill(), has_ended()
A pid alone names a process only as long as that lives. Needs Linux: /proc says when each started.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process, for ever."""

    pid: int
    started: int
    """When it was made, in clock ticks since the machine was started."""

    @classmethod
    def of_this(cls) -> ProcessId:
        """Of the process that calls."""
        started = _start_of(os.getpid())
        assert started is not None
        return cls(os.getpid(), started)

    def has_ended(self) -> bool:
        """Whether it is gone, or nothing but its exit status is left."""
        return _start_of(self.pid) != self.started

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process too. Nothing happens when it has ended."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _start_of(pid: int) -> int | None:
    """ProcessId.started of the process that has this pid now; None when there is none that runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
    return None if state in "ZX" else int(fields[18])
