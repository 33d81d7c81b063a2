"""The layouts in which releases of one model store its tensors, and the ways between them.

    checkpoints.random_weights -> released(text, weights) -> checkpoints.write

Experts lie one by one (`experts.N.gate_proj.weight` [I, H] and so on) or fused, all of a layer in
one tensor. The delta net's projections lie apart, or in Qwen3-Next packed by key head.
Letters: E experts | I width of an expert | H hidden
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

ONE_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def released(text: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the family's releases in bfloat16 store them.

    Qwen3.5-MoE fuses the target's experts, and leaves the draft's one by one. Qwen3-Next leaves all
    experts one by one and packs the delta net's projections.
    """
    if text["model_type"] == "qwen3_next":
        return pack_projections(text, weights)
    return fuse_experts(weights, prefix="model.")


def fuse_experts(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The same weights with fused experts in the layers whose names start with `prefix`.

    gate_up_proj [E, 2I, H] holds an expert's gate rows, then its up rows; down_proj is [E, H, I].
    """
    result, experts = {}, {}
    for name, tensor in weights.items():
        found = ONE_EXPERT.fullmatch(name)
        if found and name.startswith(prefix):
            layer, expert, kind = found.groups()
            experts.setdefault(layer, {})[int(expert), kind] = tensor
        else:
            result[name] = tensor
    for layer, parts in experts.items():
        count = len(parts) // 3
        result[layer + "gate_up_proj"] = torch.stack(
            [torch.cat((parts[e, "gate"], parts[e, "up"])) for e in range(count)]
        )
        result[layer + "down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
    return result


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with all experts one by one."""
    result = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor.unbind()):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for own, half in zip(kinds, halves, strict=True):
                result[f"{layer}.{expert}.{own}.weight"] = half.clone()
    return result


def pack_projections(text: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with in_proj_qkvz and in_proj_ba in place of the four in_proj_*.

    The rows of a key head lie together: its query, its key, the values of its value heads and
    their z; in in_proj_ba the b of its value heads, then their a. Packed ones stay as they are.
    """
    heads = text["linear_num_key_heads"]
    kd = heads * text["linear_key_head_dim"]
    result = dict(weights)
    for name in [name for name in weights if name.endswith("linear_attn.in_proj_qkv.weight")]:
        prefix = name.removesuffix("qkv.weight")
        qkv, z, b, a = (result.pop(f"{prefix}{part}.weight") for part in ("qkv", "z", "b", "a"))
        q, k, v = qkv.split((kd, kd, len(qkv) - 2 * kd))
        result[prefix + "qkvz.weight"] = _by_head(heads, q, k, v, z)
        result[prefix + "ba.weight"] = _by_head(heads, b, a)
    return result


def _by_head(heads: int, *parts: Tensor) -> Tensor:
    """[rows, H]: for each head its share of the rows of every part, one part after another."""
    shares = [part.view(heads, -1, part.shape[-1]) for part in parts]
    return torch.cat(shares, 1).flatten(0, 1)


def unpack_projections(text: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with the four in_proj_* apart; undoes pack_projections."""
    heads, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    dk, r = text["linear_key_head_dim"], values // heads
    dv = r * text["linear_value_head_dim"]
    result = dict(weights)
    for name in [name for name in weights if name.endswith("linear_attn.in_proj_qkvz.weight")]:
        prefix = name.removesuffix("qkvz.weight")
        qkvz, ba = result.pop(name), result.pop(prefix + "ba.weight")
        q, k, v, z = (t.flatten(0, 1) for t in _of_heads(heads, qkvz).split((dk, dk, dv, dv), 1))
        b, a = (t.flatten(0, 1) for t in _of_heads(heads, ba).split((r, r), 1))
        parts = {"qkv": torch.cat((q, k, v)), "z": z, "b": b, "a": a}
        result |= {f"{prefix}{part}.weight": tensor for part, tensor in parts.items()}
    return result


def _of_heads(heads: int, packed: Tensor) -> Tensor:
    return packed.view(heads, -1, packed.shape[-1])
