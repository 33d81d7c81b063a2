"""Which CPUs a process may run on: ranges as text, an even split over ranks, and pinning.

    "0-3,8" -> parse_cpu_range -> {0, 1, 2, 3, 8} -> pin_process -> every thread of this process

The kernel pins threads, and a new thread inherits the CPUs of the one that started it. So a process
is pinned before torch is imported, whose threads and memory then lie near these CPUs, and again
after start-up, for the threads that were already there.
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
    """A CPU range that cannot be read, or CPUs that this process may not use."""


def parse_cpu_range(text: str) -> frozenset[int]:
    """The CPU numbers of a text such as "0-3,8", bounds included. Raises AffinityError."""
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
    """The shortest text for some CPUs, which parse_cpu_range reads back."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def can_pin() -> bool:
    """Whether a process of this system can choose its CPUs (on Linux yes, on macOS no)."""
    return hasattr(os, "sched_setaffinity")


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this thread may run on, which containers and pinning restrict."""
    if can_pin():
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def split_evenly(cpus: Iterable[int], parts: int) -> tuple[frozenset[int], ...]:
    """Split CPUs into sets of neighbours, whose sizes differ by at most 1. Raises AffinityError."""
    ordered = sorted(set(cpus))
    if not 1 <= parts <= len(ordered):
        raise AffinityError(f"{len(ordered)} CPUs cannot be split into {parts} parts")
    size, larger = divmod(len(ordered), parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(frozenset(ordered[a:b]) for a, b in pairwise(starts))


def npu_topology() -> str:
    """What `npu-smi info -t topo` prints; "" where there is no such tool or it fails."""
    if shutil.which("npu-smi") is None:
        return ""
    try:
        command = ["env", "LC_ALL=C", "npu-smi", "info", "-t", "topo"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def card_cpus(topology: str, allowed: Iterable[int]) -> dict[int, frozenset[int]]:
    """Allowed CPUs near each NPU, by its physical number.

    They are the last column ("0-23") of the rows NPU<n> of `topology` (npu_topology). NPUs with the
    same column split its CPUs evenly. An NPU whose column is no CPU range is left out.
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
    """The wanted CPUs that are allowed. Raises AffinityError where none is."""
    usable = frozenset(wanted) & frozenset(allowed)
    if not usable:
        raise AffinityError(
            f'CPUs "{format_cpus(wanted)}": none is available here; '
            f'this process may use "{format_cpus(allowed)}"'
        )
    return usable


def pin_process(cpus: Iterable[int]) -> int:
    """Pin every thread of this process to those of `cpus` that are allowed; -> how many threads.

    Raises AffinityError where none of them is allowed, or where the system cannot pin.
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
        pinned |= fresh  # look again: a thread that was not pinned yet may have started another
    return len(pinned)


def _pin_thread(thread: int, cpus: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:
        return  # the thread has ended meanwhile
