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
from parallel.device import Device, GdnLayer
from parallel.linear import ColumnLinear, RowLinear

CHUNK_ROWS = 64


class GatedDeltaNet:
    """Layer `index` of `states`; sharded by heads over `device.tp`."""

    def __init__(
        self, config: ModelConfig, params: Params, states: GdnStates, index: int, device: Device
    ) -> None:
        gdn, size = config.gdn, device.tp.size
        names = [f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        self.in_proj = ColumnLinear(torch.cat([params[name] for name in names]), device)
        self.out_proj = RowLinear(params["out_proj.weight"], device)
        self.layer = GdnLayer(
            num_k_heads=gdn.num_k_heads // size,
            num_v_heads=gdn.num_v_heads // size,
            head_k_dim=gdn.head_k_dim,
            head_v_dim=gdn.head_v_dim,
            conv_weight=params["conv1d.weight"].squeeze(1).t().contiguous(),
            rate=-params["A_log"].exp(),
            dt_bias=params["dt_bias"],
            norm_weight=params["norm.weight"],
            eps=config.rms_norm_eps,
            gate=gdn.gate,
            conv=states.conv[index],
            state=states.state[index],
            factors=states.factors[index],
        )
        self.ops = device.ops

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """x [B, R, H] -> [B, R, H]."""
        proj = self.in_proj(x)
        if rows.prefill:
            return self.out_proj(self._prefill(proj, rows))
        assert rows.fold is not None, "rows were not located (GdnStates.locate)"
        return self.out_proj(
            self.ops.gdn_verify(proj, self.layer, rows.slots, rows.fold, rows.waiting)
        )

    def _prefill(self, proj: Tensor, rows: Rows) -> Tensor:
        """Rows that are all kept, in chunks; state and window advance by `counts` of them."""
        ops, own, slots = self.ops, self.layer, rows.slots
        keys, values = (own.num_k_heads, own.head_k_dim), (own.num_v_heads, own.head_v_dim)
        u, z, b, a = proj.split(own.widths, -1)
        before = own.conv_weight.shape[0] - 1
        window = torch.cat((own.conv[:, :before].index_select(0, slots), u), 1)
        y = ops.causal_conv(window, own.conv_weight, u.shape[1])
        qk, v = y.split((2 * keys[0] * keys[1], values[0] * values[1]), -1)
        qk, v = ops.gdn_qk_norm(qk.unflatten(-1, (2, *keys))), v.unflatten(-1, values).float()
        g, beta = ops.gdn_gates(a, b, own.rate, own.dt_bias)
        state, outs = own.state.index_select(0, slots), []
        for start in range(0, u.shape[1], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            qk_part, g_part = qk[:, part], g[:, part]
            out, delta = ops.gdn_rows(qk_part, v[:, part], g_part, beta[:, part], state)
            real = (rows.counts - start).clamp(0, qk_part.shape[1])
            state = ops.gdn_fold(state, qk_part[:, :, 1], delta, g_part, real)
            outs.append(out)
        own.state.index_copy_(0, slots, state)
        index = rows.counts[:, None] + torch.arange(before, device=proj.device)
        last = window.gather(1, index.unsqueeze(-1).expand(-1, -1, window.shape[-1]))
        own.conv[:, :before].index_copy_(0, slots, last)
        out = torch.cat(outs, 1).to(z.dtype)
        z = z.unflatten(-1, values)
        return ops.gated_rms_norm(out, z, own.norm_weight, own.eps, own.gate).flatten(2)
