"""Every kernel compiles for the GPU it is made for, in a process that does not interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MAX_SPILLED = 32
"""Bytes of stack a thread of gemv: 8 of its 168 registers."""
SUM_BYTES = 16 * 8 * 4
"""Shared memory of a warp of gemv, which is for the sum over warps: no value of the weight or of
the rows goes through it."""


def test_every_kernel_compiles_for_capability_9() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.compile_kernels"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["all"]) >= 19
    assert report["compiled"] == report["all"]
    assert len(report["held"]) == 4
    for used in report["held"]:
        assert used["stack"] <= MAX_SPILLED, used
        assert used["shared"] == SUM_BYTES, used
        assert not used["shuffles"], used
