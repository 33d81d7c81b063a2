"""Writes checkpoints in safetensors files, of which only a few pieces are in memory at a time.

    write_file(path, tensors)
    write_shards(folder, pieces, count) -> model-00001-of-0000N.safetensors, ..., and their index

The bytes are those of safetensors' own writer. This one copies a tensor at a time from the device,
and lets the disk work while the next tensors are made.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

MAX_WRITERS = 4
"""Files that are written at the same time, so many pieces are held at most beside the newest."""
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
"""dtype -> its name in the format. Wide types lie first in a file, so that all are aligned."""
ALIGNMENT = 8
"""Bytes that the header's length is a multiple of."""


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file. Tensors may lie on any device; KeyError for a dtype that CODES lacks."""
    widths = list(CODES)
    names = sorted(tensors, key=lambda name: (widths.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            numbers = tensors[name].cpu().contiguous().flatten().view(torch.uint8)
            file.write(numbers.numpy().data)


def write_shards(folder: Path, pieces: Iterator[dict[str, Tensor]], count: int) -> dict[str, str]:
    """Write a file for each of the `count` pieces, and the index; -> which name lies in which file.

    At most MAX_WRITERS pieces and the one that is being made are held.
    """
    weight_map: dict[str, str] = {}
    total_size = 0
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(MAX_WRITERS) as pool:
        for number, piece in enumerate(pieces, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            weight_map |= dict.fromkeys(piece, file)
            total_size += sum(t.numel() * t.itemsize for t in piece.values())
            pending.append(pool.submit(write_file, folder / file, piece))
            del piece
            if len(pending) == MAX_WRITERS:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return weight_map
