"""The device that a process computes on: claim it, read its free memory, open it.

    claim_device(kind, index) -> free_device_bytes -> open_device(kind, index, group) -> Device

A backend, and the device library that it imports, is imported only where its kind is asked for.
"""

from __future__ import annotations

import torch

from outrider.parallel.device import Device, DeviceError
from outrider.parallel.group import Group, shm_available
from outrider.parallel.ops import Ops

DEVICE_KINDS = ("cpu", "cuda", "npu")
MIN_CUDA_CAPABILITY = (8, 0)


def claim_device(kind: str, index: int) -> None:
    """Make this device the one that the process computes on, before its group connects.

    kind: one of DEVICE_KINDS; index: which of the visible ones (unused on the CPU). Raises
    DeviceError where it is not there or cannot be used.
    """
    if kind == "cpu":
        return None
    if kind == "cuda":
        return _claim_cuda(index)
    if kind == "npu":
        from outrider.parallel.backends.npu import claim_npu

        return claim_npu(index)
    raise DeviceError(
        f"device = {kind!r}: one of {', '.join(DEVICE_KINDS)} is needed (cluster.yaml: device)"
    )


def _claim_cuda(index: int) -> None:
    """Checked with torch alone: the backend needs Triton, which may be absent where no GPU is."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:  # no GPU, an old driver, torch without CUDA
        why = " ".join(str(problem).split()).rstrip(".")
        raise DeviceError(
            f"device: cuda: {why} (torch {torch.__version__}). Set device: cpu in cluster.yaml."
        ) from None
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"device: cuda #{index}: {count} are visible (CUDA_VISIBLE_DEVICES)")
    if torch.cuda.get_device_capability(index) < MIN_CUDA_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise DeviceError(f"device: cuda #{index} ({name}): capability 8.0 or newer is needed")
    torch.cuda.set_device(index)


def free_device_bytes(kind: str, index: int) -> int | None:
    """Bytes that are free on a claimed device; None on the CPU, where ranks share the host's."""
    return None if kind == "cpu" else getattr(torch, kind).mem_get_info(index)[0]


def open_device(kind: str, index: int, tp: Group) -> Device:
    """Claim a device and open it for layers to be built with. Raises DeviceError."""
    claim_device(kind, index)
    if kind == "cuda":
        from outrider.parallel.backends.cuda import open_cuda

        return open_cuda(index, tp)
    if kind == "npu":
        from outrider.parallel.backends.npu import open_npu

        return open_npu(index, tp)
    return Device(torch_device=torch.device("cpu"), ops=Ops(), tp=tp)


def collective_kind(kind: str) -> str:
    """How ranks sum and gather on devices of this kind, unless cluster.yaml says otherwise.

    A `kind` of group.connect.
    """
    if kind == "cpu":
        return "shm" if shm_available() else "gloo"
    return {"cuda": "peer", "npu": "hccl"}[kind]
