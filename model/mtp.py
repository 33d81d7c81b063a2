"""The draft: Qwen3.5's multi-token-prediction layer, which is one block with full attention.

    token x_{t+1}, hidden h_t -> embed, norms -> fc -> block with its own KV -> norm -> m_t

An LM head predicts x_{t+2} from m_t, and m_t takes the place of the hidden in the next pass. The
row of h_t and x_{t+1} has position t. With the draft whole on each rank (a group of one, the
default) nothing in here is communicated.
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
    """One rank's draft; `embedding` [V, H] is a table of its own or the target's."""

    def __init__(
        self, config: ModelConfig, params: Params, embedding: Tensor, pages: KvPages, device: Device
    ) -> None:
        eps = config.rms_norm_eps
        self.embed_tokens, self.fc, self.ops = embedding, params["fc.weight"], device.ops
        self.pre_fc_norm_embedding = RmsNorm(params["pre_fc_norm_embedding.weight"], eps, device)
        self.pre_fc_norm_hidden = RmsNorm(params["pre_fc_norm_hidden.weight"], eps, device)
        own = under(params, "layers.0.")
        self.attention = Attention(config, under(own, "self_attn."), pages, 0, device)
        self.layer = Block(config, own, self.attention, device)
        self.norm = RmsNorm(params["norm.weight"], eps, device)

    def __call__(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """hidden [B, R, H] after a final norm, and the tokens [B, R] int64 that followed its rows
        -> m [B, R, H]; writes the rows' keys and values."""
        x = self._input(hidden, tokens)
        part, x = self.layer(self.layer.input_layernorm(x), x, rows)
        return self.norm.sum_add(part, x)[0]

    def write_kv(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> None:
        """Only write the rows' keys and values, which later rows attend to.

        The layer is the only one, so they depend on each row's own token and hidden alone.
        """
        self.attention.write_kv(self.layer.input_layernorm(self._input(hidden, tokens)), rows)

    def _input(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        e, n = self.pre_fc_norm_embedding, self.pre_fc_norm_hidden
        pair = self.ops.mtp_input(tokens, self.embed_tokens, hidden, e.scale, n.scale, e.eps)
        return self.ops.linear(pair, self.fc)
