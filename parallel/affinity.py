"""Which CPUs a process may run on: ranges as text, an even split over ranks, pinning.

    "0-3,8" -- parse_cpu_range --> {0, 1, 2, 3, 8} -- pin_process --> every thread of this process

The kernel pins threads, not processes: a thread inherits from the one that made it, so pin before
torch is imported (memory follows on first touch) and again after start-up, for the threads that
were there already. Remembers nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

_MAX_CPU = 1 << 16
_TASKS = Path("/proc/self/task")


class AffinityError(ValueError):
    """A CPU range that cannot be read, or that this machine does not have."""


def parse_cpu_range(text: str) -> frozenset[int]:
    """CPU numbers of "0-3,8" (bounds included). Raises AffinityError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise AffinityError(f'CPU range "{text}": expected numbers and ranges like "0-3,8"')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise AffinityError(f'CPU range "{text}": "{part.strip()}" runs backwards')
        if last >= _MAX_CPU:
            raise AffinityError(f'CPU range "{text}": CPU numbers end at {_MAX_CPU - 1}')
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest range text of some CPUs: the inverse of parse_cpu_range."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def can_pin() -> bool:
    """Whether this system lets a process choose its CPUs (Linux does, macOS does not)."""
    return hasattr(os, "sched_setaffinity")


def allowed_cpus() -> frozenset[int]:
    """CPUs that this thread may run on: the container's or the pinned ones, not the whole box."""
    if can_pin():
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def split_evenly(cpus: Iterable[int], parts: int) -> tuple[frozenset[int], ...]:
    """Neighbouring CPUs stay together; sizes differ by one at most. Raises AffinityError."""
    ordered = sorted(set(cpus))
    if not 1 <= parts <= len(ordered):
        raise AffinityError(f"{len(ordered)} CPUs cannot be split into {parts} parts")
    size, larger = divmod(len(ordered), parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(frozenset(ordered[a:b]) for a, b in pairwise(starts))


def npu_topology() -> str:
    """What `npu-smi info -t topo` prints; empty where there is no such tool or it fails."""
    if shutil.which("npu-smi") is None:
        return ""
    try:
        command = ["env", "LC_ALL=C", "npu-smi", "info", "-t", "topo"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def card_cpus(topology: str, allowed: Iterable[int]) -> dict[int, frozenset[int]]:
    """Allowed CPUs of each card, by physical number: the last column ("0-23") of the rows NPU<n>.

    Cards with one and the same list split it evenly. A card without a list is left out.
    """
    near: dict[frozenset[int], list[int]] = {}
    for row in topology.splitlines():
        match = re.fullmatch(r"\s*NPU(\d+)\s.*?\s(\d[\d,-]*)\s*", row)
        if match:
            near.setdefault(parse_cpu_range(match[2]), []).append(int(match[1]))
    cards: dict[int, frozenset[int]] = {}
    for cpus, numbers in near.items():
        usable = cpus & frozenset(allowed)
        if len(usable) >= len(numbers):
            cards |= zip(sorted(numbers), split_evenly(usable, len(numbers)))
    return cards


def usable_cpus(wanted: Iterable[int], allowed: Iterable[int]) -> frozenset[int]:
    """The wanted CPUs that are allowed. Raises AffinityError when none is."""
    usable = frozenset(wanted) & frozenset(allowed)
    if not usable:
        raise AffinityError(
            f'CPUs "{format_cpus(wanted)}": none is available here; '
            f'this process may use "{format_cpus(allowed)}"'
        )
    return usable


def pin_process(cpus: Iterable[int]) -> int:
    """Pin every thread of this process to the allowed ones of `cpus`; returns how many threads.

    Raises AffinityError when none of them is allowed, or where the system cannot pin.
    """
    if not can_pin():
        raise AffinityError(
            "this system cannot pin a process to CPUs (Linux only); "
            "set parallel.rank_cpus and parallel.driver_cpus to null"
        )
    usable = usable_cpus(cpus, allowed_cpus())
    pinned: set[int] = set()
    while fresh := {int(task.name) for task in _TASKS.iterdir()} - pinned:
        for thread in fresh:
            _pin_thread(thread, usable)
        pinned |= fresh  # look again: a thread not yet pinned may have made another
    return len(pinned)


def _pin_thread(thread: int, cpus: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:
        return  # it ended meanwhile
