"""Gated full attention: one of every four layers of the target, and the only one of the draft.

    x -> q, k, v, gate -> norm by head -> rotary -> paged attention -> * sigmoid(gate) -> o_proj

The checkpoint's q_proj holds, for each head, d rows of q and then d rows of gate. They are loaded
into one matrix [q | k | v | gate], so that one operation norms and rotates both q and k. Keys and
values are written to KvPages.
Shapes: B slots | R rows | H hidden | n query heads, m kv heads of this rank | d head width
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model.blocks import Params
from outrider.model.cache import KvPages
from outrider.model.config import ModelConfig
from outrider.parallel.device import Device
from outrider.parallel.formats import row_range
from outrider.parallel.linear import ColumnLinear, RowLinear
from outrider.parallel.operands import PartialSum, Rows


class Attention:
    """This rank's heads of one layer, whose keys and values are layer `index` of `pages`."""

    def __init__(
        self, config: ModelConfig, params: Params, pages: KvPages, index: int, device: Device
    ) -> None:
        heads, size = config.attention, device.tp.size
        self.n, self.d = heads.num_heads // size, heads.head_dim
        self.m = heads.kv_heads_of(size)
        n, m, d = self.n, self.m, self.d
        in_proj = params["in_proj.weight"]
        self.in_proj = ColumnLinear(in_proj, device)
        self.widths = ((n + m) * d, m * d, n * d)
        self.o_proj = RowLinear(params["o_proj.weight"], device)
        scales = [params["q_norm.weight"].expand(n, -1), params["k_norm.weight"].expand(m, -1)]
        self.scale, self.eps = torch.cat(scales) + 1.0, config.rms_norm_eps
        self.kv_weight = row_range(in_proj, n * d, (n + 2 * m) * d)
        self.k_scale = self.scale[n:]
        self.k_pages, self.v_pages = pages.k[index], pages.v[index]
        self.ops = device.ops

    def __call__(self, x: Tensor, rows: Rows) -> PartialSum:
        """x [B, R, H] -> this rank's part of [B, R, H]; writes the rows' keys and values."""
        n, m, d = self.n, self.m, self.d
        qk, v, gate = self.in_proj(x).split_with_sizes(self.widths, -1)
        q = self._write(qk.unflatten(-1, (n + m, d)), v.unflatten(-1, (m, d)), self.scale, rows)
        return self.o_proj(self.ops.paged_attention(q, self.k_pages, self.v_pages, rows, gate))

    def write_kv(self, x: Tensor, rows: Rows) -> None:
        """x [B, R, H]: only write the rows' keys and values."""
        m, d = self.m, self.d
        kv = self.ops.linear(x, self.kv_weight).unflatten(-1, (2 * m, d))
        k, v = kv.split_with_sizes((m, m), -2)
        self._write(k, v, self.k_scale, rows)

    def _write(self, qk: Tensor, v: Tensor, scale: Tensor, rows: Rows) -> Tensor:
        """-> q [B, R, n, d], normed and rotated."""
        pages = self.k_pages, self.v_pages
        return self.ops.qk_norm_rope_write(qk, v, scale, self.eps, *pages, rows)
