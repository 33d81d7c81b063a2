"""What a rank remembers of its slots: KV pages, GDN states, and the rows of one forward pass.

    Rows (who, where) + KvPages + GdnStates -> layers read and write -> commit(slots, kept)

A forward pass may write more than will be kept. KV: lengths rewind and stale rows are overwritten.
GDN: the state S_0 stays, the rows' factors wait beside it, and the next pass first folds `kept` of
them; the conv window keeps W-1 rows before them. The last slot, and page 0, are padding.
Shapes: S slots + 1 | B batch | R rows, X most rows a pass leaves | P pages | others: device.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.config import ModelConfig, RunConfig
from parallel.device import Device

NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass: R for each of B slots, the first `counts` of them real."""

    slots: Tensor
    """[B] int64"""
    positions: Tensor
    """[B, R] int64"""
    lengths: Tensor
    """[B] int64: valid keys once this pass has written its own"""
    block_table: Tensor
    """[B, N] int64"""
    kv_index: Tensor
    """[B, R] int64: page * page_tokens + offset; 0, in the null page, for padding rows"""
    counts: Tensor
    """[B] int64"""
    cos: Tensor
    sin: Tensor
    """[B, R, 1, rotary] float32"""
    waiting: int = 0
    """Most factor rows that any of the slots has waiting to be folded."""
    prefill: bool = False
    """True: every real row is kept, so states advance at once and no factors wait."""
    fold: Tensor | None = None
    """[B] int64: rows of the last pass to fold (GdnStates.locate)"""
    history: Tensor | None = None
    """[B, W-1] int64: where the conv rows before these lie (GdnStates.locate)"""


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
        self.history = gdn.conv_kernel - 1

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, slots, *shape, dtype=dtype, device=device.torch_device)

        self.widths = (key_heads * gdn.head_k_dim, heads * gdn.head_v_dim, heads)
        self.key_shape = (key_heads, gdn.head_k_dim)
        self.value_shape = (heads, gdn.head_v_dim)
        self.state = zeros(heads, gdn.head_k_dim, gdn.head_v_dim)
        self.factors = zeros(rows, sum(self.widths))  # k, delta and g of each waiting row
        self.conv = zeros(self.history + rows, channels, dtype=getattr(torch, run.dtype))
        self.kept = torch.zeros(slots, dtype=torch.int64, device=device.torch_device)
        self._taps = torch.arange(self.history, device=device.torch_device)

    def tensors(self) -> list[Tensor]:
        return [self.state, self.factors, self.conv]

    def reset(self, slot: int) -> None:
        """Forget a slot's last tenant: a new one starts from zero state and zero history."""
        for tensor in self.tensors():
            tensor[:, slot].zero_()
        self.kept[slot] = 0

    def commit(self, slots: Tensor, kept: Tensor) -> None:
        """slots [B], kept [B] with 1 <= kept <= rows of the last pass. Never clamped."""
        self.kept[slots] = kept

    def locate(self, rows: Rows) -> Rows:
        """Rows with what every layer needs of the slots' books, looked up once a pass."""
        kept = self.kept[rows.slots]
        first = rows.slots * self.conv.shape[2] + kept
        return replace(rows, fold=kept, history=first.unsqueeze(1) + self._taps)

    def window(self, layer: int, rows: Rows, u: Tensor) -> Tensor:
        """Pre-conv rows u [B, R, C] behind the W-1 kept rows before them: [B, W-1+R, C]."""
        return torch.cat((self.conv[layer].flatten(0, 1)[rows.history], u), 1)

    def settle(self, layer: int, rows: Rows, device: Device) -> Tensor:
        """Fold the kept rows of the last pass into the state; returns it [B, h, Dk, Dv]."""
        state = self.state[layer].index_select(0, rows.slots)
        if rows.waiting:
            waiting = self.factors[layer, :, : rows.waiting].index_select(0, rows.slots)
            k, delta, g = waiting.split(self.widths, -1)
            k, delta = k.unflatten(-1, self.key_shape), delta.unflatten(-1, self.value_shape)
            assert rows.fold is not None
            state = device.ops.gdn_fold(state, k, delta, g, rows.fold)
            self.state[layer].index_copy_(0, rows.slots, state)
        return state

    def leave_factors(
        self, layer: int, rows: Rows, window: Tensor, k: Tensor, delta: Tensor, g: Tensor
    ) -> None:
        """Keep this pass's rows beside the state until it is known how many survive."""
        packed = torch.cat((k.flatten(2), delta.flatten(2), g), -1)
        self.factors[layer, :, : k.shape[1]].index_copy_(0, rows.slots, packed)
        self.conv[layer, :, : window.shape[1]].index_copy_(0, rows.slots, window)

    def advance(self, layer: int, rows: Rows, window: Tensor, state: Tensor) -> None:
        """Prefill: the state already holds every real row; keep the W-1 rows before the next."""
        self.state[layer].index_copy_(0, rows.slots, state)
        index = rows.counts[:, None] + self._taps
        last = window.gather(1, index.unsqueeze(-1).expand(-1, -1, window.shape[-1]))
        self.conv[layer, :, : self.history].index_copy_(0, rows.slots, last)
