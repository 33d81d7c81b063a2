"""Overwrite weights of a process from outside, as broken memory would.

    overwrite_weights(pid, folder) -> the number of copies that were found and hold NaN now
The memory of the process is searched for the bytes that the checkpoint holds; it needs no hook.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

NORM = "layers.0.input_layernorm.weight"
"""Of the first layer, so that what it spoils goes through sums over all ranks."""


def overwrite_weights(pid: int, folder: Path) -> int:
    """The first layer's norm, as float32 or bfloat16 and as stored or with 1 added, becomes NaN
    wherever the process holds it in memory that it may write to."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        (name,) = (name for name in file.keys() if name.endswith("model." + NORM))
        stored = file.get_tensor(name)
    forms = [stored.float(), stored.float() + 1, stored, (stored.float() + 1).to(stored.dtype)]
    count = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, stop in _writable(pid):
            try:
                memory.seek(start)
                data = memory.read(stop - start)
            except OSError:  # a mapping of a device, say
                continue
            for form in forms:
                pattern = form.view(torch.uint8).numpy().tobytes()
                nan = torch.full_like(form, float("nan")).view(torch.uint8).numpy().tobytes()
                place = data.find(pattern)
                while place >= 0:
                    memory.seek(start + place)
                    memory.write(nan)
                    count += 1
                    place = data.find(pattern, place + 1)
    return count


def _writable(pid: int) -> list[tuple[int, int]]:
    """Addresses of the memory that a process may write to: from, to."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        where, mode, *_ = line.split()
        if mode.startswith("rw"):
            start, stop = where.split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
