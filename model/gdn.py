"""The gated delta net: linear attention, in three of every four Qwen3.5 layers.

    x -> in_proj (q k v | z | b | a) -> causal conv (q k v) -> gated delta rule -> norm * z -> out

A verify pass folds the kept rows of the last pass into the state, runs its own R rows and stores
their factors, since it is not known yet which of them are kept. A prompt's rows are folded at once.
Both are one operation each (Ops.gdn_verify, Ops.gdn_prefill), over the layer's part of GdnStates.
Shapes: B slots | R rows | H hidden
"""

from __future__ import annotations

from torch import Tensor

from outrider.model.blocks import Params
from outrider.model.cache import GdnStates
from outrider.model.config import ModelConfig
from outrider.parallel.device import Device
from outrider.parallel.formats import StackedMatrix
from outrider.parallel.linear import ColumnLinear, RowLinear
from outrider.parallel.operands import GdnLayer, PartialSum, Rows


class GatedDeltaNet:
    """This rank's heads of one layer, whose memory is layer `index` of `states`."""

    def __init__(
        self, config: ModelConfig, params: Params, states: GdnStates, index: int, device: Device
    ) -> None:
        gdn, size = config.gdn, device.tp.size
        weight = params["in_proj.weight"]
        if (narrow := params.get("in_proj_ba.weight")) is not None:
            weight = StackedMatrix((weight, narrow))
        self.in_proj = ColumnLinear(weight, device)
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
            coarse_state=gdn.coarse_state,
            rows_in_turn=gdn.rows_in_turn,
            conv=states.conv[index],
            state=states.state[index],
            factors=states.factors[index],
        )
        self.ops = device.ops

    def __call__(self, x: Tensor, rows: Rows) -> PartialSum:
        """x [B, R, H] -> this rank's part of [B, R, H]; advances the slots' states."""
        proj = self.in_proj(x)
        if rows.prefill:
            y = self.ops.gdn_prefill(proj, self.layer, rows.slots, rows.counts)
        else:
            assert rows.fold is not None, "a verify pass says how many rows to fold"
            y = self.ops.gdn_verify(proj, self.layer, rows.slots, rows.fold, rows.max_fold)
        return self.out_proj(y)
