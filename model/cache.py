"""The memory of a rank's layers: keys and values in pages, delta net states by slot.

    Rows (parallel/operands.py) -> layers read and write both -> Ops.accept_commit keeps some rows

A pass may write rows that are not kept afterwards. Of keys and values, the length of the slot
shrinks again and later rows overwrite them. Of a delta net, the state before the pass stays as it
is, with the factors of the pass's rows beside it; the next pass first folds those of the kept rows
into the state. The last slot and page 0 are padding.
Shapes: as in parallel/operands.py, with S = max_slots + 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model.config import ModelConfig, RunConfig
from outrider.parallel.device import Device

NULL_PAGE = 0


class KvPages:
    """Keys and values of some layers, with this rank's heads: k and v are [layers, pages,
    page_tokens, heads, head_dim]."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, run: RunConfig, device: Device
    ) -> None:
        shape = (num_layers, run.num_pages, run.page_tokens, num_kv_heads, head_dim)
        dtype = getattr(torch, run.dtype)
        self.k = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        self.v = torch.zeros(shape, dtype=dtype, device=device.torch_device)

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v]


class GdnStates:
    """Memory of the delta net layers, by layer and slot: GdnLayer says what each tensor holds."""

    def __init__(self, model: ModelConfig, run: RunConfig, device: Device) -> None:
        gdn, size = model.gdn, device.tp.size
        layers, slots, rows = len(model.gdn_layers), run.max_slots + 1, run.draft_tokens + 1
        key_heads, heads = gdn.num_k_heads // size, gdn.num_v_heads // size
        channels = (2 * gdn.key_dim + gdn.value_dim) // size

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, slots, *shape, dtype=dtype, device=device.torch_device)

        self.state = zeros(heads, gdn.head_k_dim, gdn.head_v_dim)
        width = key_heads * gdn.head_k_dim + heads * (gdn.head_v_dim + 1)
        self.factors = zeros(rows, width)
        self.conv = zeros(gdn.conv_kernel - 1 + rows, channels, dtype=getattr(torch, run.dtype))
        self.fold = torch.zeros(slots, dtype=torch.int64, device=device.torch_device)

    def tensors(self) -> list[Tensor]:
        return [self.state, self.factors, self.conv]

    def reset(self, slot: int) -> None:
        """Zero a slot's states and conv windows, for a new request."""
        for tensor in self.tensors():
            tensor[:, slot].zero_()
        self.fold[slot] = 0
