"""config.json -> ModelConfig: both layouts, defaults and traps, and errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.model.config import ConfigError, load_config
from tests import checkpoints


def write(folder: Path, root: dict, generation: dict | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(root))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_nested_and_flat_give_the_same_numbers(tmp_path: Path) -> None:
    text = checkpoints.config()
    (tmp_path / "flat").mkdir()
    (tmp_path / "nested").mkdir()
    flat = load_config(write(tmp_path / "flat", {"architectures": ["Qwen3_5ForCausalLM"], **text}))
    nested = load_config(
        write(
            tmp_path / "nested",
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text},
        )
    )
    assert flat == nested
    assert flat.attention.rotary_dim == 8
    assert flat.full_layers == (3,)
    assert flat.gdn_layers == (0, 1, 2)


def test_layer_types_follow_the_interval_when_absent(tmp_path: Path) -> None:
    text = checkpoints.config(num_hidden_layers=8)
    del text["layer_types"]
    assert load_config(write(tmp_path, text)).full_layers == (3, 7)


def test_the_tie_is_read_from_either_place(tmp_path: Path) -> None:
    text = checkpoints.config(tie_word_embeddings=False)
    root = {"text_config": text, "tie_word_embeddings": True}
    assert load_config(write(tmp_path, root)).tie_word_embeddings


def test_both_files_give_end_ids(tmp_path: Path) -> None:
    folder = write(tmp_path, checkpoints.config(eos_token_id=5), {"eos_token_id": [7, 5]})
    assert load_config(folder).eos_ids == (5, 7)


def test_old_rope_keys_are_read_at_text_level(tmp_path: Path) -> None:
    text = checkpoints.config(rope_theta=5e5, partial_rotary_factor=0.5)
    del text["rope_parameters"]
    attention = load_config(write(tmp_path, text)).attention
    assert (attention.rope_theta, attention.rotary_dim) == (5e5, 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["llama", "Qwen3_5ForCausalLM"]),
        ({"hidden_size": 0}, ["hidden_size = 0"]),
        ({"head_dim": None}, ["head_dim = None"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads = '4'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "4"]),
        ({"layer_types": ["mamba"] * 4}, ["mamba"]),
        ({"output_gate_type": "gelu"}, ["output_gate_type", "gelu"]),
        ({"mamba_ssm_dtype": "float16"}, ["mamba_ssm_dtype", "float32 or bfloat16"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["yarn"]),
    ],
)
def test_a_key_that_cannot_be_run_is_named(tmp_path: Path, changes: dict, words: list) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, {**checkpoints.config(), **changes}))
    for word in [*words, str(tmp_path)]:
        assert word in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize(("size", "name"), [(3, "num_attention_heads = 4"), (8, "vocab")])
def test_ranks_that_do_not_divide_are_refused_with_the_counts(
    tmp_path: Path, size: int, name: str
) -> None:
    model = load_config(write(tmp_path, checkpoints.config(vocab_size=156)))
    model.check_divides(2)
    with pytest.raises(ConfigError, match=name) as caught:
        model.check_divides(size)
    assert "tensor_parallel" in str(caught.value)
