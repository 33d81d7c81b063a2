"""Tiny random Qwen3.5 checkpoints for tests, written as real files, and the model behind them.

    config() -> random_weights(text) or varied_weights(text) -> write(folder, text, weights)

Every weight is random, norms too, so a wrong sign or order shows. Sizes are odd on purpose: fewer
key heads than value heads, dk != dv, a rotary part of the head. Tests that generate text take
varied_weights: a tied random model repeats its last token, whatever else is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BASE = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 160,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 159,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "float32",
}


def config(**changes: object) -> dict:
    """The base text config with changes; layer_types follow the interval."""
    text = {**BASE, **changes}
    interval, layers = text["full_attention_interval"], text["num_hidden_layers"]
    text["layer_types"] = [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    return text


def random_weights(text: dict, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a text checkpoint by its flat name (`model.` prefix, `mtp.`, `lm_head.`)."""
    generator = torch.Generator().manual_seed(seed)
    h, i, v = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    n, m, d = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    kh, vh = text["linear_num_key_heads"], text["linear_num_value_heads"]
    kd, vd = kh * text["linear_key_head_dim"], vh * text["linear_value_head_dim"]
    weights: dict[str, Tensor] = {}

    def add(name: str, *shape: int, std: float | None = None, mean: float = 0.0) -> None:
        scale = shape[-1] ** -0.5 if std is None else std
        weights[name] = torch.randn(*shape, generator=generator) * scale + mean

    def block(prefix: str, full: bool) -> None:
        add(prefix + "input_layernorm.weight", h, std=0.2)
        add(prefix + "post_attention_layernorm.weight", h, std=0.2)
        add(prefix + "mlp.gate_proj.weight", i, h)
        add(prefix + "mlp.up_proj.weight", i, h)
        add(prefix + "mlp.down_proj.weight", h, i, std=0.3 * i**-0.5)
        if full:
            own = prefix + "self_attn."
            add(own + "q_proj.weight", 2 * n * d, h)
            add(own + "k_proj.weight", m * d, h)
            add(own + "v_proj.weight", m * d, h)
            add(own + "o_proj.weight", h, n * d, std=0.5 * (n * d) ** -0.5)
            add(own + "q_norm.weight", d, std=0.3)
            add(own + "k_norm.weight", d, std=0.3)
            return
        own = prefix + "linear_attn."
        add(own + "in_proj_qkv.weight", 2 * kd + vd, h)
        add(own + "in_proj_z.weight", vd, h)
        add(own + "in_proj_b.weight", vh, h)
        add(own + "in_proj_a.weight", vh, h)
        add(own + "conv1d.weight", 2 * kd + vd, 1, text["linear_conv_kernel_dim"], std=0.5)
        weights[own + "A_log"] = torch.rand(vh, generator=generator) * 2.0 - 2.0
        add(own + "dt_bias", vh, std=1.0, mean=-1.0)
        add(own + "norm.weight", text["linear_value_head_dim"], std=0.2, mean=1.0)
        add(own + "out_proj.weight", h, vd, std=0.5 * vd**-0.5)

    add("model.embed_tokens.weight", v, h, std=0.5)
    for layer, kind in enumerate(text["layer_types"]):
        block(f"model.layers.{layer}.", kind == "full_attention")
    add("model.norm.weight", h, std=0.05, mean=-0.85)  # logits near 1
    if not text["tie_word_embeddings"]:
        add("lm_head.weight", v, h, std=0.5)
    if text["mtp_num_hidden_layers"]:
        add("mtp.fc.weight", h, 2 * h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            add(f"mtp.{name}.weight", h, std=0.2)
        block("mtp.layers.0.", full=True)
        if text.get("mtp_use_dedicated_embeddings"):
            add("mtp.embed_tokens.weight", v, h, std=0.5)
            if not text["tie_word_embeddings"]:
                add("mtp.lm_head.weight", v, h, std=0.1)
    return weights


def varied_weights(text: dict, seed: int = 11) -> dict[str, Tensor]:
    """Random weights of an untied model whose answers show what a test looks for.

    Greedy answers hold many distinct tokens and depend on the whole prompt through the delta-net
    states. The draft sees the token's own embedding plainly, so that about one draft in six is
    right; which ones depends on its keys and values. test_speculation.py asserts all this.
    """
    assert not text["tie_word_embeddings"], "a tied random model repeats one token"
    weights = random_weights(text, seed)
    weights["model.embed_tokens.weight"] *= 2.0
    for name in weights:
        if name.endswith("mlp.down_proj.weight"):
            weights[name] *= 0.5
    whole = torch.eye(text["hidden_size"])
    weights["mtp.fc.weight"] = torch.cat((whole, 0.3 * whole), 1)
    return weights


def write(
    folder: Path,
    text: dict,
    weights: dict[str, Tensor],
    *,
    nested: bool = True,
    num_files: int = 1,
    generation: dict | None = None,
) -> Path:
    """Write a checkpoint folder; nested adds the wrapper, its prefix and a vision tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    if nested:
        weights = {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in weights.items()
        }
        weights["model.visual.blocks.0.norm1.weight"] = torch.ones(8)
        root = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
    else:
        root = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    (folder / "config.json").write_text(json.dumps(root))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    names = sorted(weights)
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for part in range(num_files):
        file = f"model-{part + 1:05d}-of-{num_files:05d}.safetensors"
        chosen = names[part::num_files]
        save_file({n: weights[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def transformers_model(text: dict, weights: dict[str, Tensor]):
    """transformers' own model with the same weights, float32, on the CPU: the oracle."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    keys = {k: v for k, v in text.items() if k not in ("dtype",)}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**keys)).to(torch.float32).eval()
    own = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
    result = model.load_state_dict(own, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}, result.missing_keys
    model.tie_weights()
    return model
