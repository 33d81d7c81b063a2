"""Gated full attention, one of every four layers, and the draft's only one.

    x -> q, gate, k, v -> per-head norm -> rotary -> paged attention -> * sigmoid(gate) -> o_proj

q_proj holds, head by head, d rows of q and then d rows of gate. Memory: KvPages.
Shapes: B slots | R rows | H hidden | n query heads, m kv heads of this rank | d head width
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.blocks import Params, RmsNorm
from model.cache import KvPages, Rows
from model.config import ModelConfig
from parallel.device import Device
from parallel.linear import ColumnLinear, RowLinear


class Attention:
    """Layer `index` of `pages`; sharded by heads over `device.tp`."""

    def __init__(
        self, config: ModelConfig, params: Params, pages: KvPages, index: int, device: Device
    ) -> None:
        heads, size = config.attention, device.tp.size
        self.n, self.d = heads.num_heads // size, heads.head_dim
        self.m = heads.kv_heads_of(size)
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        self.qkv_proj = ColumnLinear(torch.cat([params[name] for name in names]), device)
        self.o_proj = RowLinear(params["o_proj.weight"], device)
        self.q_norm = RmsNorm(params["q_norm.weight"], config.rms_norm_eps, device)
        self.k_norm = RmsNorm(params["k_norm.weight"], config.rms_norm_eps, device)
        self.k_pages, self.v_pages = pages.k[index], pages.v[index]
        self.ops = device.ops

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """x [B, R, H] -> [B, R, H]; writes the rows' keys and values."""
        n, m, d = self.n, self.m, self.d
        ops = self.ops
        q_gate, k, v = self.qkv_proj(x).split((2 * n * d, m * d, m * d), -1)
        q, gate = q_gate.unflatten(-1, (n, 2, d)).unbind(-2)
        q = ops.rotary(self.q_norm(q), rows.cos, rows.sin)
        k = ops.rotary(self.k_norm(k.unflatten(-1, (m, d))), rows.cos, rows.sin)
        ops.kv_write(self.k_pages, k, rows.kv_index)
        ops.kv_write(self.v_pages, v.unflatten(-1, (m, d)), rows.kv_index)
        out = ops.paged_attention(
            q, self.k_pages, self.v_pages, rows.block_table, rows.positions, rows.lengths
        )
        return self.o_proj((out * torch.sigmoid(gate)).flatten(-2))
