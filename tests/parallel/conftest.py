"""Where there is no GPU, Triton kernels run interpreted; set before any of them is decorated."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
