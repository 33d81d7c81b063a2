"""The MTP layer in plain torch, float32: what a draft with an MLP or with experts must compute.

    draft_hidden(text, weights, hidden, tokens) -> m [T, H], after `mtp.norm`

It imports nothing of the engine and nothing of transformers, which has no such layer. The wiring is
that of vLLM's Qwen3.5 and Qwen3-Next drafts: the embedding comes first, the hidden is the target's
after its final norm, and a pair has the hidden's position.
Letters: T rows | H hidden | n query heads | m KV heads | d width of a head | E experts
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests import layouts


def draft_hidden(text: dict, weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    """m [T, H] of rows at positions 0 to T-1, which see those before them.

    hidden [T, H]: the target's, after its final norm; tokens [T] int64: those that follow it.
    """
    weights = {
        name.removeprefix("mtp."): tensor.float()
        for name, tensor in layouts.split_experts(weights).items()
        if name.startswith("mtp.") or name == "model.embed_tokens.weight"
    }
    layer = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in weights.items()
        if name.startswith("layers.0.")
    }
    eps = text["rms_norm_eps"]
    e = _norm(
        weights["model.embed_tokens.weight"][tokens], weights["pre_fc_norm_embedding.weight"], eps
    )
    n = _norm(hidden, weights["pre_fc_norm_hidden.weight"], eps)
    y = torch.cat((e, n), -1) @ weights["fc.weight"].t()
    y = y + _attention(text, layer, _norm(y, layer["input_layernorm.weight"], eps))
    normed = _norm(y, layer["post_attention_layernorm.weight"], eps)
    y = y + (mixture if "num_experts" in text else _mlp_of_layer)(text, layer, normed)
    return _norm(y, weights["norm.weight"], eps)


def mixture(text: dict, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """Experts of a layer, [T, H] -> [T, H], row by row: qwen3_5.md of the references, 3.5.

    The router's softmax is over all E; the weights of the chosen ones add up to 1 unless the config
    says norm_topk_prob false. The shared expert is scaled by the sigmoid of its gate.
    """
    probabilities = (x @ layer["mlp.gate.weight"].t()).softmax(-1)
    rows = []
    for row, chances in zip(x, probabilities, strict=True):
        order = chances.argsort(descending=True)[: text["num_experts_per_tok"]]
        total = chances[order].sum() if text.get("norm_topk_prob", True) else 1.0
        shared = torch.sigmoid(row @ layer["mlp.shared_expert_gate.weight"][0])
        out = shared * _mlp(layer, "mlp.shared_expert.", row)
        for expert in order.tolist():
            weight = chances[expert] / total
            out = out + weight * _mlp(layer, f"mlp.experts.{expert}.", row)
        rows.append(out)
    return torch.stack(rows)


def _mlp_of_layer(text: dict, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    return _mlp(layer, "mlp.", x)


def _mlp(layer: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (layer[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The zero-centred RMS norm: its weight is an offset from one."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


def _attention(text: dict, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal attention with an output gate; each head's query rows lie before its gate rows."""
    n, m, d = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    q, k, v, o = (layer[f"self_attn.{name}_proj.weight"] for name in "qkvo")
    eps, rows = text["rms_norm_eps"], len(x)
    queries, gate = (x @ q.t()).view(rows, n, 2, d).unbind(2)
    queries = _rotate(text, _norm(queries, layer["self_attn.q_norm.weight"], eps))
    keys = _rotate(text, _norm((x @ k.t()).view(rows, m, d), layer["self_attn.k_norm.weight"], eps))
    values = (x @ v.t()).view(rows, m, d)
    heads = []
    for head in range(n):
        of = head // (n // m)
        scores = queries[:, head] @ keys[:, of].t() * d**-0.5
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ values[:, of])
    out = torch.stack(heads, 1) * torch.sigmoid(gate)
    return out.reshape(rows, n * d) @ o.t()


def _rotate(text: dict, x: Tensor) -> Tensor:
    """Rotary positions on the first part of each head of [T, heads, d]; halves form the pairs."""
    rope = text.get("rope_parameters") or text
    width = int(text["head_dim"] * rope["partial_rotary_factor"])
    exponents = torch.arange(0, width, 2) / width
    angles = torch.arange(len(x))[:, None] * rope["rope_theta"] ** -exponents
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
