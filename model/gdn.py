"""Gated DeltaNet: the linear attention in three of every four Qwen3.5 layers.

    x -> in_proj (q k v | z | b | a) -> causal conv (q k v) -> gated delta rule -> norm * z -> out

Verify: fold what the last pass kept, run R rows in chunk form, leave their factors waiting.
Prefill: the same rows in chunks, each folded at once. Memory: GdnStates.
Shapes: B slots | R rows | H hidden | k, h this rank's key and value heads | C = 2k Dk + h Dv
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.blocks import Params
from model.cache import GdnStates, Rows
from model.config import ModelConfig
from parallel.device import Device
from parallel.linear import ColumnLinear, RowLinear

CHUNK_ROWS = 64


class GatedDeltaNet:
    """Layer `index` of `states`; sharded by heads over `device.tp`."""

    def __init__(
        self, config: ModelConfig, params: Params, states: GdnStates, index: int, device: Device
    ) -> None:
        gdn, size = config.gdn, device.tp.size
        self.k, self.h = gdn.num_k_heads // size, gdn.num_v_heads // size
        self.dk, self.dv = gdn.head_k_dim, gdn.head_v_dim
        self.qk_shape = (2, self.k, self.dk)
        self.qkv_widths = (2 * self.k * self.dk, self.h * self.dv)
        self.widths = (sum(self.qkv_widths), self.h * self.dv, self.h, self.h)
        names = [f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        self.in_proj = ColumnLinear(torch.cat([params[name] for name in names]), device)
        self.out_proj = RowLinear(params["out_proj.weight"], device)
        self.conv = params["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.rate, self.dt_bias = -params["A_log"].exp(), params["dt_bias"]
        self.norm, self.eps, self.gate = params["norm.weight"], config.rms_norm_eps, gdn.gate
        self.states, self.index, self.device = states, index, device

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """x [B, R, H] -> [B, R, H]."""
        ops, num_rows = self.device.ops, x.shape[1]
        u, z, b, a = self.in_proj(x).split(self.widths, -1)
        window = self.states.window(self.index, rows, u)
        qk, v = ops.causal_conv(window, self.conv, num_rows).split(self.qkv_widths, -1)
        qk = ops.gdn_qk_norm(qk.unflatten(-1, self.qk_shape))
        v = v.unflatten(-1, (self.h, self.dv)).float()
        g, beta = ops.gdn_gates(a, b, self.rate, self.dt_bias)
        state = self.states.settle(self.index, rows, self.device)
        if rows.prefill:
            out, state = self._prefill(qk, v, g, beta, state, rows.counts)
            self.states.advance(self.index, rows, window, state)
        else:
            out, delta = ops.gdn_rows(qk, v, g, beta, state)
            self.states.leave_factors(self.index, rows, window, qk[:, :, 1], delta, g)
        z = z.unflatten(-1, (self.h, self.dv))
        y = ops.gated_rms_norm(out.to(x.dtype), z, self.norm, self.eps, self.gate)
        return self.out_proj(y.flatten(-2))

    def _prefill(
        self, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All rows in chunks; the state advances by the first `counts` [B] of them."""
        ops, outs = self.device.ops, []
        for start in range(0, qk.shape[1], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            qk_part, g_part = qk[:, part], g[:, part]
            out, delta = ops.gdn_rows(qk_part, v[:, part], g_part, beta[:, part], state)
            real = (counts - start).clamp(0, qk_part.shape[1])
            state = ops.gdn_fold(state, qk_part[:, :, 1], delta, g_part, real)
            outs.append(out)
        return torch.cat(outs, 1), state
