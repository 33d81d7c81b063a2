"""The tiny checkpoints keep their word: layouts, quantised forms, oracles, draft reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import checkpoints, layouts, quantised
from tests.draft_reference import draft_hidden

MIXTURE = checkpoints.mixture_config()
NEXT = checkpoints.next_config(mlp_only_layers=[1])
CONFIGS = {"dense": checkpoints.config(), "mixture": MIXTURE, "next": NEXT}
FILE = "model.safetensors"
IDS = torch.randint(0, 160, (1, 40), generator=torch.Generator().manual_seed(1))


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_the_layouts_hold_the_same_weights() -> None:
    weights = checkpoints.random_weights(NEXT)
    packed = layouts.pack_projections(NEXT, weights)
    assert not any("in_proj_z." in name for name in packed)
    assert_equal(layouts.unpack_projections(NEXT, packed), weights)
    fused = layouts.fuse_experts(weights)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in fused
    assert not any(layouts.ONE_EXPERT.fullmatch(name) for name in fused)
    assert_equal(layouts.split_experts(fused), weights)


def test_released_layouts_have_the_public_names(tmp_path: Path) -> None:
    """A mixture fuses the target's experts alone; Qwen3-Next is flat and names no layer types."""
    weights = layouts.released(MIXTURE, checkpoints.random_weights(MIXTURE))
    folder = checkpoints.write(tmp_path / "mixture", MIXTURE, weights)
    root, names = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    assert root["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert (root["model_type"], root["text_config"]["model_type"]) == (
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    )
    own = "model.language_model.layers.2.mlp."
    assert names[own + "experts.gate_up_proj"].shape == (8, 2 * 32, 64)
    assert names[own + "experts.down_proj"].shape == (8, 64, 32)
    assert names["mtp.layers.0.mlp.experts.7.down_proj.weight"].shape == (64, 32)

    weights = layouts.released(NEXT, checkpoints.random_weights(NEXT))
    folder = checkpoints.write(tmp_path / "next", NEXT, weights)
    root, names = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    assert (root["architectures"], root["model_type"]) == (["Qwen3NextForCausalLM"], "qwen3_next")
    assert "layer_types" not in root
    assert "mtp_num_hidden_layers" not in root
    assert names["model.layers.0.linear_attn.in_proj_qkvz.weight"].shape == (512, 64)
    assert names["model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (32, 64)
    assert "model.layers.1.mlp.gate_proj.weight" in names


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["released", "one by one", "fused"])
def test_oracles_load_every_layout(layout: str) -> None:
    """Packed by key head and flat, Qwen3-Next computes what a Qwen3.5-MoE of its weights does."""
    text = checkpoints.next_config()
    weights = checkpoints.random_weights(text)
    forms = {
        "released": layouts.released,
        "one by one": lambda text, weights: weights,
        "fused": lambda text, weights: layouts.fuse_experts(weights),
    }
    got = checkpoints.transformers_model(text, forms[layout](text, weights))(IDS).logits
    rope = {"rope_theta": text["rope_theta"], "partial_rotary_factor": 0.5, "rope_type": "default"}
    other = checkpoints.mixture_config(rope_parameters=rope)
    expected = checkpoints.transformers_model(other, forms[layout](other, weights))(IDS).logits
    assert expected.std() > 0.1
    assert torch.allclose(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dense", "mixture", "next"])
def test_the_draft_reference_equals_transformers_layer(name: str) -> None:
    """The layer between fc and norm is transformers' decoder layer with full attention."""
    text = CONFIGS[name] | {"tie_word_embeddings": False}
    weights = checkpoints.random_weights(text)
    model = checkpoints.transformers_model(text, weights)
    layer = model.model.layers[3]
    draft = {
        key.replace("mtp.layers.0.", ""): tensor
        for key, tensor in layouts.fuse_experts(weights).items()
        if key.startswith("mtp.layers.0.")
    }
    layer.load_state_dict(draft)
    hidden, tokens = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)), IDS[0]
    plain = {"mtp.norm.weight": torch.zeros(64), "mtp.fc.weight": weights["mtp.fc.weight"]}
    got = draft_hidden(text, weights | plain, hidden, tokens)

    def norm(x: Tensor, weight: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), 1 + weights[weight], text["rms_norm_eps"])

    e = norm(weights["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding.weight")
    n = norm(hidden, "mtp.pre_fc_norm_hidden.weight")
    y = torch.cat((e, n), -1) @ weights["mtp.fc.weight"].t()
    positions = torch.arange(40)[None]  # Qwen3.5 takes a row for each axis of an image
    positions = positions if name == "next" else positions.expand(3, 1, -1)
    rotary = model.model.rotary_emb(y[None], positions)
    mask = torch.full((40, 40), float("-inf")).triu(1)[None, None]
    out = layer(y[None], position_embeddings=rotary, attention_mask=mask)
    out = (out[0] if isinstance(out, tuple) else out).view(40, 64)
    expected = torch.nn.functional.rms_norm(out, (64,), eps=text["rms_norm_eps"])
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_files_hold_the_dequantised_weights(name: str) -> None:
    """Element by element: value times the scale of its block, blocks at the edges cut short."""
    text, block = CONFIGS[name], 20
    weights = layouts.released(text, checkpoints.random_weights(text))
    release = quantised.fp8(weights, block)
    scaled = [key for key in release.tensors if key.endswith("_scale_inv")]
    for key in scaled:
        scale, matrix = release.tensors[key], key.removesuffix("_scale_inv")
        values, plain = release.tensors[matrix], release.dequantised[matrix]
        assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
        rows, columns = torch.arange(plain.shape[0]), torch.arange(plain.shape[1])
        of_each = scale[rows[:, None] // block, columns[None] // block].float()
        assert torch.equal(plain, values.float() * of_each), key
        assert scale.max() > 1.5 * scale.min() or scale.numel() < 4, key
    originals = layouts.split_experts(weights)
    assert release.dequantised.keys() == originals.keys()
    for key, plain in release.dequantised.items():
        assert (plain - originals[key]).norm() < 0.05 * originals[key].norm(), key
    converted = {key.removesuffix("_scale_inv") for key in scaled}
    left = {key.split(".")[-2] for key in release.tensors.keys() - converted - set(scaled)}
    assert not left & set(quantised.MATRICES)
    assert {"embed_tokens", "conv1d", "fc", "norm", "q_norm"} <= left
    assert (name == "dense") or {"gate", "shared_expert_gate"} <= left
    assert ("in_proj_ba" if name == "next" else "in_proj_b") in left
    named = {module.split(".")[-1] for module in release.config["modules_to_not_convert"]}
    assert named - left == {"shared_expert_gates"}


@pytest.mark.parametrize("excluded", [quantised.GPTQ_EXCLUDED, ()])
def test_int4_files_hold_the_dequantised_weights(excluded: tuple[str, ...]) -> None:
    """Element by element, with the zero point that the files hold less one."""
    weights = checkpoints.random_weights(MIXTURE)
    release = quantised.gptq(weights, 24, excluded=excluded)
    packed = [key for key in release.tensors if key.endswith(".qweight")]
    for key in packed:
        name = key.removesuffix(".qweight")
        qweight, qzeros, scales, index = (
            release.tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        inputs, outputs = len(index), qweight.shape[1]
        k, o = torch.arange(inputs)[:, None], torch.arange(outputs)[None]
        value = (qweight[k // 8, o] >> (4 * (k % 8))) & 15
        zero = (qzeros[k // 24, o // 8] >> (4 * (o % 8))) & 15
        assert index.tolist() == [i // 24 for i in range(inputs)]
        expected = (value - (zero + 1)) * scales[k // 24, o].float()
        assert torch.equal(release.dequantised[f"{name}.weight"], expected.t()), name
        assert len(value.unique()) > 8, name
    modules = {key.removesuffix(".qweight") for key in packed}
    assert "model.layers.0.mlp.experts.3.up_proj" in modules
    assert ("model.layers.0.linear_attn.in_proj_qkv" in modules) == (not excluded)
    assert ("mtp.layers.0.mlp.experts.0.up_proj" in modules) == (not excluded)
    for key, plain in release.dequantised.items():
        assert (plain - weights[key]).norm() < 0.25 * weights[key].norm(), key
