"""The noise of sampled rows, as other kernels add it to logits: a hash of (seed, position, id).

    slots, last -> slot_of, position_of a row -> row_keys -> noise of ids (parallel/sampling.py)

Kernels that use this are launched without contraction of products and sums (EXACT_SUMS), so that
the same logit and noise have the same sum in each of them.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

EXACT_SUMS: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product is rounded before it is added."""


@triton.jit
def slot_of(slots, row, R, inside):
    """The slot of a row: `slots` has one for each R rows."""
    return tl.load(slots + row // R, mask=inside, other=0)


@triton.jit
def position_of(last, row, shift, R, inside):
    """Where the token that a row makes will stand (operands.PickRows)."""
    return tl.load(last + row // R, mask=inside, other=0) + 1 + shift + row % R


@triton.jit
def row_keys(seed, position):
    """As sampling.row_keys; int64 seed and position -> two uint32."""
    low = _mix(seed.to(tl.uint32))
    high = _mix((seed >> 32).to(tl.uint32) + 0x9E3779B9)
    at = _mix(position.to(tl.uint32) + 0x7F4A7C15)
    first = _mix(_mix(low ^ high) + at)
    second = _mix(_mix(high + 0x85EBCA77) ^ _mix(first + at + 0x165667B1) ^ low)
    return first, second


@triton.jit
def noise(first, second, ids):
    """As sampling.gumbel, for ids int32 that broadcast with a row's two keys."""
    bits = _mix(_mix(ids.to(tl.uint32) + first) ^ second)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.9999999403953552)
    series = u * (1.0 + u * (0.5 + u * 0.3333333432674408))
    return -tl.log(tl.where(u < 0.00390625, series, -tl.log(1.0 - u)))


@triton.jit
def _mix(x):
    """As sampling.mix, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
