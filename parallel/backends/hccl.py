"""Options of a process group on NPUs, where HCCL communicates.

    hccl_options(timeout) -> ProcessGroupHCCL.Options, for parallel/group.py
Not run on an NPU: compared with the torch_npu package (tests/npu_contract.py).
"""

from __future__ import annotations

import math
from typing import Any

HCCL_BUFFER_MIB = 64


def hccl_options(timeout_s: float) -> Any:
    """A small buffer, since no tensor is larger than a prompt chunk, and the same time limit for an
    operation on the device as on the host."""
    from torch_npu._C._distributed_c10d import (  # pyright: ignore[reportMissingImports]
        ProcessGroupHCCL,
    )

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {
        "hccl_buffer_size": HCCL_BUFFER_MIB,
        "hccl_exec_timeout": math.ceil(timeout_s),
    }
    return options
