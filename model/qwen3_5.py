"""The target network: embedding, layers with delta nets and attention, final norm.

    tokens [B, R] -> embed -> 3 x delta net, attention, 3 x ... -> norm -> hidden [B, R, H]

The hidden after the final norm is what the LM head (parallel/vocab.py) and the draft (mtp.py) read.
Every rank has the whole embedding table, so that a lookup needs no communication.
"""

from __future__ import annotations

from torch import Tensor

from outrider.model.attention import Attention
from outrider.model.blocks import Block, Params, RmsNorm, under
from outrider.model.cache import GdnStates, KvPages
from outrider.model.config import ModelConfig
from outrider.model.gdn import GatedDeltaNet
from outrider.parallel.device import Device
from outrider.parallel.operands import Rows


class Qwen35:
    """One rank's share of the target. `params` have the names of model/rules.py."""

    def __init__(
        self, config: ModelConfig, params: Params, pages: KvPages, states: GdnStates, device: Device
    ) -> None:
        self.embed_tokens = params["embed_tokens.weight"]
        self.norm = RmsNorm(params["norm.weight"], config.rms_norm_eps, device)
        self.layers: list[Block] = []
        for i, kind in enumerate(config.layer_types):
            own = under(params, f"layers.{i}.")
            if kind == "full_attention":
                index = config.full_layers.index(i)
                mixer = Attention(config, under(own, "self_attn."), pages, index, device)
            else:
                index = config.gdn_layers.index(i)
                mixer = GatedDeltaNet(config, under(own, "linear_attn."), states, index, device)
            self.layers.append(Block(config, own, mixer, device))
        self.norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        """The norm that follows each layer: the input norm of the next, or the final norm."""

    def __call__(self, tokens: Tensor, rows: Rows) -> Tensor:
        """tokens [B, R] int64 -> hidden after the final norm [B, R, H]."""
        first = self.layers[0].input_layernorm
        normed, x = first.ops.embed_rms_norm(tokens, self.embed_tokens, first.scale, first.eps)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            part, x = layer(normed, x, rows)
            normed, x = norm.sum_add(part, x)
        return normed
