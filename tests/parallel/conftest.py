"""Where there is no GPU, Triton kernels run interpreted, which is decided when they are defined."""

from __future__ import annotations

import importlib.util
import os

import torch


def _loops_of_measured_length() -> None:
    """Triton before 3.9 reads loop bounds from arrays of one element, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _loops_of_measured_length()
