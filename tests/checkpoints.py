"""Tiny random checkpoints for tests, written as real files, and transformers' model of each.

    config() or mixture_config() or next_config() -> random_weights(text) or varied_weights(text)
      -> layouts.released(text, weights) -> write(folder, text, weights)

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

from tests import layouts

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


MIXTURE = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
"""What a mixture of experts has in place of intermediate_size."""
NEXT_ROPE = {"rope_theta": 3000.0, "partial_rotary_factor": 0.5, "rope_scaling": None}
"""Qwen3-Next's older spelling of rope_parameters, at the level of the text config. Its values are
nobody's defaults."""
WRAPPERS = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
"""model_type of a text config -> model_type and architecture of the multimodal layout around it."""
TEXT_ONLY = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""model_type of a text config -> architecture where config.json is the text config itself."""


def config(**changes: object) -> dict:
    """The base text config with changes; layer_types follow the interval."""
    text = {**BASE, **changes}
    return text | {"layer_types": layer_types(text)}


def mixture_config(**changes: object) -> dict:
    """The text config of a Qwen3.5-MoE: experts in every layer, untied unless changed."""
    text = config(**{"tie_word_embeddings": False, **MIXTURE, **changes})
    del text["intermediate_size"]
    return text


def next_config(**changes: object) -> dict:
    """The config of a Qwen3-Next, as its releases write it.

    They name no layer_types and no mtp_num_hidden_layers, though they hold a draft. Which layers
    have experts follows from decoder_sparse_step and mlp_only_layers.
    """
    absent = ("rope_parameters", "mtp_num_hidden_layers")
    text = {name: value for name, value in BASE.items() if name not in absent}
    own = {"model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": []}
    more = {"norm_topk_prob": True, "tie_word_embeddings": False}
    return {**text, **MIXTURE, **NEXT_ROPE, **own, **more, **changes}


def layer_types(text: dict) -> list[str]:
    """The kind of each layer: every `full_attention_interval`-th one is full attention."""
    interval, layers = text["full_attention_interval"], text["num_hidden_layers"]
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]


def has_experts(text: dict, layer: int) -> bool:
    """Whether a layer of the target is a mixture of experts; the draft of a mixture always is."""
    sparse = (layer + 1) % text.get("decoder_sparse_step", 1) == 0
    return "num_experts" in text and sparse and layer not in text.get("mlp_only_layers", [])


class _Drawn(dict[str, Tensor]):
    """Tensors by name, drawn in the order in which they are added."""

    def __init__(self, text: dict, seed: int) -> None:
        super().__init__()
        self.text, self.random = text, torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, std: float | None = None, mean: float = 0.0) -> None:
        """A normal tensor. std None: one over the root of the last size."""
        scale = shape[-1] ** -0.5 if std is None else std
        self[name] = torch.randn(*shape, generator=self.random) * scale + mean

    def block(self, prefix: str, *, full: bool, experts: bool) -> None:
        """A whole decoder layer. full: with full attention; experts: a mixture, not an MLP."""
        h = self.text["hidden_size"]
        self.add(prefix + "input_layernorm.weight", h, std=0.2)
        self.add(prefix + "post_attention_layernorm.weight", h, std=0.2)
        if experts:
            self.mixture(prefix + "mlp.")
        else:
            self.mlp(prefix + "mlp.", self.text["intermediate_size"])
        if full:
            self.attention(prefix + "self_attn.")
        else:
            self.delta_net(prefix + "linear_attn.")

    def mlp(self, prefix: str, width: int) -> None:
        h = self.text["hidden_size"]
        self.add(prefix + "gate_proj.weight", width, h)
        self.add(prefix + "up_proj.weight", width, h)
        self.add(prefix + "down_proj.weight", h, width, std=0.3 * width**-0.5)

    def mixture(self, prefix: str) -> None:
        """Experts one by one, the router, and the shared expert with its gate."""
        h, experts = self.text["hidden_size"], self.text["num_experts"]
        for expert in range(experts):
            self.mlp(f"{prefix}experts.{expert}.", self.text["moe_intermediate_size"])
        self.add(prefix + "gate.weight", experts, h)
        self.mlp(prefix + "shared_expert.", self.text["shared_expert_intermediate_size"])
        self.add(prefix + "shared_expert_gate.weight", 1, h)

    def attention(self, prefix: str) -> None:
        text, h = self.text, self.text["hidden_size"]
        n, m, d = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
        self.add(prefix + "q_proj.weight", 2 * n * d, h)
        self.add(prefix + "k_proj.weight", m * d, h)
        self.add(prefix + "v_proj.weight", m * d, h)
        self.add(prefix + "o_proj.weight", h, n * d, std=0.5 * (n * d) ** -0.5)
        self.add(prefix + "q_norm.weight", d, std=0.3)
        self.add(prefix + "k_norm.weight", d, std=0.3)

    def delta_net(self, prefix: str) -> None:
        text, h = self.text, self.text["hidden_size"]
        kh, vh = text["linear_num_key_heads"], text["linear_num_value_heads"]
        kd, vd = kh * text["linear_key_head_dim"], vh * text["linear_value_head_dim"]
        self.add(prefix + "in_proj_qkv.weight", 2 * kd + vd, h)
        self.add(prefix + "in_proj_z.weight", vd, h)
        self.add(prefix + "in_proj_b.weight", vh, h)
        self.add(prefix + "in_proj_a.weight", vh, h)
        kernel = text["linear_conv_kernel_dim"]
        self.add(prefix + "conv1d.weight", 2 * kd + vd, 1, kernel, std=0.5)
        self[prefix + "A_log"] = torch.rand(vh, generator=self.random) * 2.0 - 2.0
        self.add(prefix + "dt_bias", vh, std=1.0, mean=-1.0)
        self.add(prefix + "norm.weight", text["linear_value_head_dim"], std=0.2, mean=1.0)
        self.add(prefix + "out_proj.weight", h, vd, std=0.5 * vd**-0.5)


def random_weights(text: dict, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a text checkpoint by its flat name (`model.` prefix, `mtp.`, `lm_head.`).

    Experts are one by one and the delta net's projections apart, whatever the releases of the
    family do: layouts.released turns them into the released form.
    """
    h, v, draw = text["hidden_size"], text["vocab_size"], _Drawn(text, seed)
    draw.add("model.embed_tokens.weight", v, h, std=0.5)
    for layer, kind in enumerate(layer_types(text)):
        full = kind == "full_attention"
        draw.block(f"model.layers.{layer}.", full=full, experts=has_experts(text, layer))
    draw.add("model.norm.weight", h, std=0.05, mean=-0.85)  # logits near 1
    if not text["tie_word_embeddings"]:
        draw.add("lm_head.weight", v, h, std=0.5)
    if text.get("mtp_num_hidden_layers", 1):
        draw.add("mtp.fc.weight", h, 2 * h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            draw.add(f"mtp.{name}.weight", h, std=0.2)
        draw.block("mtp.layers.0.", full=True, experts="num_experts" in text)
        if text.get("mtp_use_dedicated_embeddings"):
            draw.add("mtp.embed_tokens.weight", v, h, std=0.5)
            if not text["tie_word_embeddings"]:
                draw.add("mtp.lm_head.weight", v, h, std=0.1)
    return dict(draw)


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
        if ".mlp." in name and name.endswith("down_proj.weight"):
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
    quantization: dict | None = None,
) -> Path:
    """Write a checkpoint folder with the tensors as they are.

    nested adds the wrapper, its prefix and a vision tensor where the family has a multimodal
    layout. quantization: the quantization_config, as tests.quantised makes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = WRAPPERS.get(text["model_type"]) if nested else None
    if wrapper:
        weights = {_nested(name): tensor for name, tensor in weights.items()}
        weights["model.visual.blocks.0.norm1.weight"] = torch.ones(8)
        root = {
            "architectures": [wrapper[1]],
            "model_type": wrapper[0],
            "text_config": text,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
    else:
        root = {"architectures": [TEXT_ONLY[text["model_type"]]], **text}
    if quantization:
        kept = quantization.get("modules_to_not_convert", [])
        renamed = [_nested(name) if wrapper else name for name in kept]
        changed = {"modules_to_not_convert": renamed} if kept else {}
        root["quantization_config"] = quantization | changed
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


def _nested(name: str) -> str:
    """A flat name as the multimodal layout writes it."""
    is_target = name.startswith("model.")
    return name.replace("model.", "model.language_model.", 1) if is_target else name


def transformers_model(text: dict, weights: dict[str, Tensor]):
    """transformers' own model with the same weights, float32, on the CPU: the oracle.

    The weights may be in any of the layouts on disk. Their mtp.* are left out: transformers has
    no draft.
    """
    import transformers

    kind = TEXT_ONLY[text["model_type"]]
    config_class = kind.replace("ForCausalLM", "TextConfig" if "3_5" in kind else "Config")
    keys = {k: v for k, v in text.items() if k not in ("dtype",)}
    settings = getattr(transformers, config_class)(**keys)
    settings._experts_implementation = "eager"
    model = getattr(transformers, kind)(settings).to(torch.float32).eval()
    own = {n: t.float() for n, t in weights.items() if not n.startswith("mtp.")}
    own = layouts.fuse_experts(own)
    if text["model_type"] == "qwen3_next":
        own = layouts.pack_projections(text, own)
    result = model.load_state_dict(own, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    tied = {"lm_head.weight"} if text["tie_word_embeddings"] else set()
    assert set(result.missing_keys) <= tied, result.missing_keys
    model.tie_weights()
    return model
