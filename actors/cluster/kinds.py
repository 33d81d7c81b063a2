"""What must be known of each kind of device before torch is loaded.

    its collectives, the variable that hides devices, the environment of a rank, limits of NPUs

For the CPU also: how much memory of the host is free. What stands here as well as in
parallel/backends/ is compared by a test.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

COLLECTIVES = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo"), "npu": ("hccl", "gloo")}
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
RANK_ENV = {
    # Peer memory needs every GPU visible, so a rank picks its own by index.
    "cuda": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
    "npu": {
        "HCCL_OP_EXPANSION_MODE": "AIV",  # small sums run on the vector cores, no AI CPU between
        "TASK_QUEUE_ENABLE": "1",  # launches overlap; level 2 also workspaces, for more memory
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1",  # the host only launches: a pool would sit in the way
    },
}
"""By device: variables of a rank's process, unless they are set where Ray was started."""
NPU_MAX_ROWS, NPU_PAGE_TOKENS = 16, 128
"""Most rows of a pass, and the number of tokens that a KV page's size is a multiple of, on NPUs."""


def visible_devices(device: str, text: str) -> list[str]:
    """The devices that a visible-devices variable names.

    CUDA reads its own up to the first entry that is neither an index nor a UUID: "0,-1,1" shows
    one device.
    """
    parts = [part.strip() for part in text.split(",")]
    if device != "cuda":
        return [part for part in parts if part]
    return list(takewhile(lambda part: part.isdecimal() or part[:4] in ("GPU-", "MIG-"), parts))


def free_host_bytes() -> int:
    """Bytes of host memory that are free for this process, within its container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" without a limit: ValueError
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit - used))
