"""The memory of a rank's layers: keys and values in pages, delta net states by slot.

    Rows (parallel/operands.py) -> layers read and write both -> Ops.accept_commit keeps some rows

A pass may write rows that are not kept afterwards. Of keys and values, the length of the slot
shrinks again and later rows overwrite them. Of a delta net, the state before the pass stays as it
is, with the factors of the pass's rows beside it; the next pass first folds those of the kept rows
into the state. The last slot and page 0 are padding. Snapshots keep states behind the beginnings of
prompts, from which later prompts start.
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

    def copy(self, page: int, to: int) -> None:
        """Make page `to` a copy of another."""
        for tensor in self.tensors():
            tensor[:, to] = tensor[:, page]


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


class Snapshots:
    """Saved states of slots whose rows are all folded: what GdnStates holds of one, by place, and
    the target's hidden of its last row, which the draft needs with the token that follows."""

    def __init__(self, states: GdnStates, conv_rows: int, hidden_size: int, count: int) -> None:
        """conv_rows: W-1, the rows of a conv window that precede the next one."""

        def places(like: Tensor, *shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=like.dtype, device=like.device)

        layers, _, _, channels = states.conv.shape
        self.state = places(states.state, layers, *states.state.shape[2:])
        self.conv = places(states.conv, layers, conv_rows, channels)
        self.hidden = places(states.conv, hidden_size)

    def tensors(self) -> list[Tensor]:
        return [self.state, self.conv, self.hidden]

    def save(self, place: int, states: GdnStates, slot: int, hidden: Tensor) -> None:
        """hidden [H]: of the slot's last row."""
        self.state[place] = states.state[:, slot]
        self.conv[place] = states.conv[:, slot, : self.conv.shape[2]]
        self.hidden[place] = hidden

    def restore(self, place: int, states: GdnStates, slot: int) -> Tensor:
        """Bring back the states of a slot that was reset; -> the hidden [H] of its last row."""
        states.state[:, slot] = self.state[place]
        states.conv[:, slot, : self.conv.shape[2]] = self.conv[place]
        return self.hidden[place]
