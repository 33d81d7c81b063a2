"""The machine and the software that a measurement ran on, for its report.

    describe() -> {"cpu": ..., "devices": [...], "driver": ..., "torch": ..., "commit": ...}

The facts come from the system and from nvidia-smi. No device runtime is loaded, so that this
process takes no memory on a device.
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
NVIDIA_SMI = [
    "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader",
]  # fmt: skip


def command() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["outrider", *sys.argv[1:]])


def describe() -> dict[str, Any]:
    """Facts about this machine by name; None for what it does not have."""
    rows = [line.split(", ") for line in _output_of(NVIDIA_SMI).splitlines()]
    devices = [row for row in rows if len(row) == 3]
    folder = str(Path(__file__).parent)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": len(allowed_cpus()),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "devices": [f"{name}, {memory}" for name, memory, _driver in devices],
        "driver": devices[0][2] if devices else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _output_of(["git", "-C", folder, "rev-parse", "--short", "HEAD"]) or None,
    }


def _output_of(command: list[str]) -> str:
    """What a command prints; empty where it is not installed, fails or takes over 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
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
