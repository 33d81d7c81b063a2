"""Which device a process computes on: claim it, look at its memory, open it with its backend.

    claim_device(kind, index) -> free_device_bytes -> open_device(kind, index, group) -> Device
A backend is imported only when its kind is asked for.
"""

from __future__ import annotations

import torch

from outrider.parallel.device import Device, DeviceError
from outrider.parallel.group import Group, shm_available

DEVICE_KINDS = ("cpu", "cuda", "npu")


def claim_device(kind: str, index: int) -> None:
    """Make this device the process's own, before its group connects.

    kind: one of DEVICE_KINDS; index: which of the visible ones (unused on the CPU). Raises
    DeviceError when it is not there.
    """
    if kind == "cpu":
        return None
    if kind == "cuda":
        from outrider.parallel.backends.cuda import claim_cuda

        return claim_cuda(index)
    if kind == "npu":
        from outrider.parallel.backends.npu import claim_npu

        return claim_npu(index)
    raise DeviceError(
        f"device = {kind!r}: one of {', '.join(DEVICE_KINDS)} is needed (cluster.yaml: device)"
    )


def free_device_bytes(kind: str, index: int) -> int | None:
    """Memory that is free on a claimed device; None on the CPU, whose ranks share the host's."""
    return None if kind == "cpu" else getattr(torch, kind).mem_get_info(index)[0]


def open_device(kind: str, index: int, tp: Group) -> Device:
    """The device of this process, for layers to be built with. Raises DeviceError."""
    claim_device(kind, index)
    if kind == "cuda":
        from outrider.parallel.backends.cuda import open_cuda

        return open_cuda(index, tp)
    if kind == "npu":
        from outrider.parallel.backends.npu import open_npu

        return open_npu(index, tp)
    from outrider.parallel.backends.cpu import CpuOps

    return Device(torch_device=torch.device("cpu"), ops=CpuOps(), tp=tp)


def collective_kind(kind: str) -> str:
    """How ranks of a device kind meet unless cluster.yaml says otherwise."""
    if kind == "cpu":
        return "shm" if shm_available() else "gloo"
    return {"cuda": "peer", "npu": "hccl"}[kind]
