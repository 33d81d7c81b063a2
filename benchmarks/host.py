"""What a measurement ran on: command line, CPU, devices, versions, commit.

    describe() -> {"cpu": ..., "devices": [...], "driver": ..., "torch": ..., "commit": ...}

It asks the system and nvidia-smi, never a device runtime: this process holds no device context.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.parallel.affinity import allowed_cpus

PACKAGES = ("torch", "triton", "fla-core", "ray", "numpy")


def command() -> str:
    """This process's command line, as one would type it."""
    return shlex.join(["outrider", *sys.argv[1:]])


def describe() -> dict[str, Any]:
    """Facts of this machine; None for what is not here."""
    lines = [line.split(", ") for line in _ask(_NVIDIA).splitlines()]
    devices = [line for line in lines if len(line) == 3]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": len(allowed_cpus()),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "devices": [f"{name}, {memory}" for name, memory, _ in devices],
        "driver": devices[0][2] if devices else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _ask(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])
        or None,
    }


_NVIDIA = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def _ask(words: list[str]) -> str:
    """What a command prints; empty where it is absent, fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
