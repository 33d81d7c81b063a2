"""How a kernel starts: while the one before it still runs, where the device can do that.

    kernel[grid](..., **overlapped(x))        in the kernel: prefetch(weights); after_previous(PDL)

Programmatic dependent launch (capability 9.0): all programs of a kernel say at once that the next
may start, and wait for the kernel before to end only where they first touch what it wrote. So start
and drain of short kernels overlap, and a weight streams into the second-level cache meanwhile.
A kernel launched so must call after_previous before it reads or writes anything but weights, or
what lies still since an earlier iteration; one that loads those first calls its two halves.
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
    """Launch options on the device of x, with the constexpr PDL that the kernel takes."""
    if x.is_cuda and _has_dependent_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Let the next kernel start; then wait until the one before has ended and its writes show."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """First half of after_previous, for a kernel that has work before it waits."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Second half of after_previous."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(at, num_bytes, PDL: tl.constexpr):
    """Start bringing num_bytes (a multiple of 16) from each pointer of `at` to the L2 cache."""
    if PDL:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.b32 $0, 0;",
            "=r,l,r",
            [at.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
