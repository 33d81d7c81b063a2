"""The draft: Qwen3.5's multi-token-prediction layer, one full-attention block.

    (embed(x_{t+1}), h_t) -> norms -> fc([e | n]) -> block with its own KV -> norm -> m_t

m_t predicts x_{t+2} through an LM head, and is the hidden of the next pass. Pair t sits at position
t, the hidden's. With a group of one (the default) no rank waits for another in here.
Shapes: B slots | R rows | H hidden
"""

from __future__ import annotations

from torch import Tensor

from outrider.model.attention import Attention
from outrider.model.blocks import Block, Params, RmsNorm, under
from outrider.model.cache import KvPages
from outrider.model.config import ModelConfig
from outrider.parallel.device import Device
from outrider.parallel.operands import Rows


class MtpDraft:
    """One rank's draft body; `embedding` [V, H] is its own table or the target's."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        embedding: Tensor,
        pages: KvPages,
        device: Device,
    ) -> None:
        eps = config.rms_norm_eps
        self.embed_tokens, self.fc, self.ops = embedding, params["fc.weight"], device.ops
        self.pre_fc_norm_embedding = RmsNorm(params["pre_fc_norm_embedding.weight"], eps, device)
        self.pre_fc_norm_hidden = RmsNorm(params["pre_fc_norm_hidden.weight"], eps, device)
        own = under(params, "layers.0.")
        self.attention = Attention(config, under(own, "self_attn."), pages, 0, device)
        self.layer = Block(own, self.attention, eps, device)
        self.norm = RmsNorm(params["norm.weight"], eps, device)

    def __call__(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """hidden [B, R, H] after a final norm, tokens [B, R] that follow it -> m [B, R, H]."""
        x = self._input(hidden, tokens)
        part, x = self.layer(self.layer.input_layernorm(x), x, rows)
        return self.norm.after(part, x)[0]

    def write_kv(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> None:
        """Only write the rows' keys and values, which later rows attend to.

        They follow from the pair alone, since the layer is the only one.
        """
        self.attention.write_kv(self.layer.input_layernorm(self._input(hidden, tokens)), rows)

    def _input(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        e, n = self.pre_fc_norm_embedding, self.pre_fc_norm_hidden
        pair = self.ops.mtp_input(tokens, self.embed_tokens, hidden, e.scale, n.scale, e.eps)
        return self.ops.linear(pair, self.fc)
