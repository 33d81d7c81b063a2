"""Options of a process group on NPUs.

    hccl_options(timeout) -> ProcessGroupHCCL.Options -> parallel/group.py
Not run on an NPU: compared with the real torch_npu package (tests/npu_contract.py).
"""

from __future__ import annotations

import math
from typing import Any

HCCL_BUFFER_MIB = 64


def hccl_options(timeout_s: float) -> Any:
    """Options of a process group: a small buffer, since the largest tensor is a prompt chunk, and
    an operation that ends on the device as late as on the host."""
    from torch_npu._C._distributed_c10d import (  # pyright: ignore[reportMissingImports]
        ProcessGroupHCCL,
    )

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {
        "hccl_buffer_size": HCCL_BUFFER_MIB,
        "hccl_exec_timeout": math.ceil(timeout_s),
    }
    return options
