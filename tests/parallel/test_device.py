"""Claiming a device: what is missing is said, in the driver's own words where it has some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.parallel.device import DeviceError
from outrider.parallel.devices import claim_device, free_device_bytes

OLD_DRIVER = """The NVIDIA driver on your system is too old (found version 11040).
Please update your GPU driver."""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch that reports two GPUs of capability 9.0; -> the indices that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_driver_too_old_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(torch.cuda, "init", init)
    says = r"driver on your system is too old \(found version 11040\).*torch .*device: cpu"
    with pytest.raises(DeviceError, match=says) as caught:
        claim_device("cuda", 0)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_an_error_that_says_so() -> None:
    with pytest.raises(DeviceError, match=r"cuda: .*(CUDA|driver|GPU).*Set device: cpu"):
        claim_device("cuda", 0)


def test_a_gpu_is_claimed_by_index(two_gpus: list[int]) -> None:
    claim_device("cuda", 1)
    assert two_gpus == [1]


def test_a_gpu_beyond_the_visible_ones_is_an_error(two_gpus: list[int]) -> None:
    with pytest.raises(DeviceError, match="#2: 2 are visible"):
        claim_device("cuda", 2)
    assert two_gpus == []


def test_a_gpu_too_old_for_the_kernels_is_an_error(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(DeviceError, match=r"#0 \(GPU\): capability 8.0"):
        claim_device("cuda", 0)


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 + index, 200))
    assert free_device_bytes("cuda", 1) == 101
    assert free_device_bytes("cpu", 0) is None


CPU_RUN = """
import sys
from outrider.model import runner
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone
open_device("cpu", 0, alone())
loaded = [m for m in sys.modules if m.split(".")[0] == "triton" or "parallel.backends" in m]
assert not loaded, loaded
"""


def test_the_cpu_imports_no_backend_and_no_triton(repo: Path) -> None:
    subprocess.run([sys.executable, "-c", CPU_RUN], cwd=repo, check=True, timeout=60)
