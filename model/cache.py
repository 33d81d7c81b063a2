"""What a rank remembers of its slots: KV pages, GDN states, and the rows of one forward pass.

    Rows (who, where) + KvPages + GdnStates -> layers read and write -> accept_commit (Ops)

A forward pass may write more than will be kept. KV: lengths rewind and stale rows are overwritten.
GDN: the state S_0 stays, the rows' factors wait beside it, and the next pass first folds `kept` of
them; the conv window keeps W-1 rows before them. The last slot, and page 0, are padding.
Shapes: S slots + 1 | B batch | R rows, X most rows a pass leaves | P pages | others: device.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model.config import ModelConfig, RunConfig
from outrider.parallel.device import Device

NULL_PAGE = 0


class KvPages:
    """Paged keys and values of `num_layers` layers with this rank's kv heads."""

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
    """States, waiting factors and conv windows of the GDN layers, by slot; float32 states."""

    def __init__(self, model: ModelConfig, run: RunConfig, device: Device) -> None:
        gdn, size = model.gdn, device.tp.size
        layers, slots, rows = len(model.gdn_layers), run.max_slots + 1, run.draft_tokens + 1
        key_heads, heads = gdn.num_k_heads // size, gdn.num_v_heads // size
        channels = (2 * gdn.key_dim + gdn.value_dim) // size

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, slots, *shape, dtype=dtype, device=device.torch_device)

        self.state = zeros(heads, gdn.head_k_dim, gdn.head_v_dim)
        width = key_heads * gdn.head_k_dim + heads * (gdn.head_v_dim + 1)
        self.factors = zeros(rows, width)  # k, delta and g of each waiting row
        self.conv = zeros(gdn.conv_kernel - 1 + rows, channels, dtype=getattr(torch, run.dtype))
        self.kept = torch.zeros(slots, dtype=torch.int64, device=device.torch_device)

    def tensors(self) -> list[Tensor]:
        return [self.state, self.factors, self.conv]

    def reset(self, slot: int) -> None:
        """Forget a slot's last tenant: a new one starts from zero state and zero history."""
        for tensor in self.tensors():
            tensor[:, slot].zero_()
        self.kept[slot] = 0
