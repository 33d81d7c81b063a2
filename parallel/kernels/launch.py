"""Launching a kernel while the one before it still runs, on devices that can do that.

    kernel[grid](..., **overlapped(x))        in the kernel: after_previous(PDL)

This is CUDA's programmatic dependent launch (capability 9.0). Each kernel at once permits the next
one to start, and waits for the one before only where it first needs its results. So short kernels
overlap at their start and end, and some load weights meanwhile. Before it has waited, a kernel may
read weights and what was last written in an earlier iteration, and nothing else. No kernel asks the
L2 cache for weights ahead: wherever that was tried it cost time or brought none.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlapped(x: Tensor) -> dict[str, Any]:
    """Launch options for the device of x, with the constexpr PDL that such a kernel takes."""
    if x.is_cuda and _has_dependent_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Permit the next kernel to start; then wait until the one before has ended and its writes can
    be read."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The first half of after_previous, for a kernel that has work to do before it waits."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """The second half of after_previous."""
    if PDL:
        gdc_wait()
