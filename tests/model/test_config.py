"""config.json -> ModelConfig: both layouts, defaults and traps, and errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from outrider.model.config import ConfigError, load_config
from outrider.model.step import Sampling
from tests import checkpoints

TINY = Path(__file__).parents[2] / "examples" / "tiny"


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
    assert flat.attention.rope.rotary_dim == 8
    assert flat.full_layers == (3,)
    assert flat.gdn_layers == (0, 1, 2)


def test_layer_types_follow_the_interval_when_absent(tmp_path: Path) -> None:
    text = checkpoints.config(num_hidden_layers=8)
    del text["layer_types"]
    assert load_config(write(tmp_path, text)).full_layers == (3, 7)


def test_layers_are_known_by_their_other_names(tmp_path: Path) -> None:
    """transformers, which reads the same list, is asked what it means."""
    names = ["mamba", "linear_attention", "attention", "full_attention"]
    theirs = Qwen3_5TextConfig(num_hidden_layers=4, layer_types=list(names)).layer_types
    model = load_config(write(tmp_path, {**checkpoints.config(), "layer_types": names}))
    assert model.layer_types == tuple(theirs)
    assert model.full_layers == (2, 3)


def test_yarn_gives_as_many_positions_as_it_stretches_to(tmp_path: Path) -> None:
    """The model cards of Qwen leave max_position_embeddings as it was; others raise it."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for stated in (512, 2048):
        text = checkpoints.config(rope_scaling=yarn, max_position_embeddings=stated)
        assert load_config(write(tmp_path, text)).max_position_embeddings == 2048


def test_the_tie_is_read_from_either_place(tmp_path: Path) -> None:
    text = checkpoints.config(tie_word_embeddings=False)
    root = {"text_config": text, "tie_word_embeddings": True}
    assert load_config(write(tmp_path, root)).tie_word_embeddings


def test_the_bundled_checkpoint_ends_chats_without_its_generation_config(tmp_path: Path) -> None:
    """config.json has the end of a text, 0; the end of a chat turn, 2, is the tokenizer's eos."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    assert load_config(tmp_path).eos_ids == load_config(TINY).eos_ids == (0, 2)


def test_end_ids_are_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    root = {"text_config": checkpoints.config(eos_token_id=5), "eos_token_id": [9, 5]}
    folder = write(tmp_path, root, {"eos_token_id": [7, 5]})
    assert load_config(folder).eos_ids == (5, 7, 9)
    with_eos(folder, eos_token="<end>", added_tokens_decoder={"11": {"content": "<end>"}})
    assert load_config(folder).eos_ids == (5, 7, 9, 11)


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "lstrip": False}])
@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 3, "content": "<x>"}, {"id": 13, "content": "<end>"}]},
        {"added_tokens": [], "model": {"vocab": {"a": 0, "<end>": 13}}},
    ],
)
def test_the_tokenizers_end_is_looked_up_in_its_files(
    tmp_path: Path, eos: object, tokenizer: dict
) -> None:
    folder = with_eos(write(tmp_path, checkpoints.config(eos_token_id=5)), eos_token=eos)
    assert load_config(folder).eos_ids == (5,), "no file says which id it has"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_config(folder).eos_ids == (5, 13)


@pytest.mark.parametrize("file", ["added_tokens.json", "vocab.json"])
def test_the_tokenizers_end_is_looked_up_in_the_files_of_older_forms(
    tmp_path: Path, file: str
) -> None:
    folder = with_eos(write(tmp_path, checkpoints.config(eos_token_id=5)), eos_token="<end>")
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / file).write_text('{"<end>": 13}')
    assert load_config(folder).eos_ids == (5, 13)


def test_a_tokenizer_without_an_end_adds_none(tmp_path: Path) -> None:
    folder = with_eos(write(tmp_path, checkpoints.config(eos_token_id=None)), eos_token=None)
    assert load_config(folder).eos_ids == ()


def test_an_end_that_is_no_token_is_named(tmp_path: Path) -> None:
    folder = with_eos(write(tmp_path, checkpoints.config()), eos_token="<end>")
    (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {}}}')
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: eos_token '<end>' is not a"):
        load_config(folder)


@pytest.mark.parametrize("value", [160, -1, "2", True, [1, 2.0]])
def test_an_end_outside_the_vocabulary_is_refused(tmp_path: Path, value: object) -> None:
    folder = write(tmp_path, checkpoints.config(), {"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config.json: .* from 0 to 159"):
        load_config(folder)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"eos_token_id": 5, "max_new_tokens": 9}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        ),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
)
def test_a_requests_defaults_are_those_of_generation_config(
    tmp_path: Path, generation: dict, defaults: dict
) -> None:
    model = load_config(write(tmp_path, checkpoints.config(), generation))
    assert model.sampling_defaults == defaults
    assert Sampling().with_defaults(defaults) == Sampling(**defaults)


def test_without_generation_config_a_request_has_no_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, checkpoints.config())).sampling_defaults == {}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -1, "must lie in [0, 100]"),
        ("temperature", float("nan"), "must lie in [0, 100]"),
        ("temperature", "hot", "a number is needed"),
        ("top_k", 2.5, "a whole number is needed"),
        ("top_k", True, "a whole number is needed"),
        ("top_k", -2, "must be 0 (off) or more"),
        ("top_p", 0, "must lie in (0, 1]"),
        ("min_p", 1.5, "must lie in [0, 1]"),
        ("repetition_penalty", 0, "must lie in (0, 10]"),
        ("do_sample", "yes", "true or false is needed"),
    ],
)
def test_a_default_out_of_range_is_named_with_its_file(
    tmp_path: Path, name: str, value: object, rule: str
) -> None:
    folder = write(tmp_path, checkpoints.config(), {name: value})
    with pytest.raises(ConfigError) as error:
        load_config(folder)
    assert str(error.value) == f"{folder}/generation_config.json: {name} = {value!r}: {rule}"


def with_eos(folder: Path, **table: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "ours", "bits": 4}, ("quant_method 'ours'", "only fp8", "without quant")),
        ({"quant_method": "awq", "bits": 4}, ("quant_method 'awq'", "gptq")),
        ({"bits": 4}, ("quant_method None",)),
        ("int8", ("'int8'", "a JSON object is needed")),
        ({"quant_method": "fp8"}, ("weight_block_size None", "[128, 128]")),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size [128]",)),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, ("weight_block_size [128, 0]",)),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
            ("fmt 'e5m2'", "e4m3"),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
            ("bits = 8 (4 is", "group_size = -1", "sym = None (true", "desc_act = True (false"),
        ),
    ],
)
def test_a_quantisation_that_cannot_be_run_is_one_line(
    tmp_path: Path, table: object, words: tuple[str, ...], nested: bool
) -> None:
    root: dict = {"text_config": checkpoints.config()}
    (root["text_config"] if nested else root)["quantization_config"] = table
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, root))
    for words_of_it in (*words, str(tmp_path)):
        assert words_of_it in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_plain_modules_are_read_in_every_spelling(tmp_path: Path) -> None:
    """Lists hold whole names with a prefix, and modules above the ones that are meant."""
    names = ["lm_head", "model.language_model.layers.0.mlp.gate", "mtp.fc", "model.visual"]
    table = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = checkpoints.config(quantization_config=table | {"modules_to_not_convert": names})
    quantisation = load_config(write(tmp_path, text)).quantisation
    assert quantisation is not None
    plain = ["lm_head.weight", "layers.0.mlp.gate.weight", "mtp.fc.weight"]
    coded = ["layers.0.mlp.gate_proj.weight", "layers.10.mlp.gate.weight", "mtp.layers.0.a.weight"]
    assert not any(map(quantisation.covers, plain))
    assert all(map(quantisation.covers, coded))
    table = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    text = checkpoints.config(quantization_config=table | {"dynamic": {r"-:.*self_attn.*": {}}})
    quantisation = load_config(write(tmp_path, text)).quantisation
    assert quantisation is not None
    assert quantisation.block == (1, 128)
    assert not quantisation.covers("layers.3.self_attn.q_proj.weight")
    assert quantisation.covers("layers.3.mlp.up_proj.weight")


def test_old_rope_keys_are_read_at_text_level(tmp_path: Path) -> None:
    text = checkpoints.config(rope_theta=5e5, partial_rotary_factor=0.5)
    del text["rope_parameters"]
    rope = load_config(write(tmp_path, text)).attention.rope
    assert (rope.theta, rope.rotary_dim) == (5e5, 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["llama", "Qwen3_5ForCausalLM"]),
        ({"hidden_size": 0}, ["hidden_size = 0"]),
        ({"head_dim": None}, ["head_dim = None"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads = '4'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "4"]),
        ({"layer_types": ["conv"] * 4}, ["conv"]),
        ({"layer_types": "attention"}, ["layer_types", "attention"]),
        ({"output_gate_type": "gelu"}, ["output_gate_type", "gelu"]),
        ({"mamba_ssm_dtype": "float16"}, ["mamba_ssm_dtype", "float32 or bfloat16"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["factor = None"]),
        ({"rope_parameters": {}}, ["rope_theta = None: a number"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings = None"]),
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
    model = load_config(write(tmp_path, checkpoints.config(vocab_size=156, eos_token_id=155)))
    model.check_divides(2)
    with pytest.raises(ConfigError, match=name) as caught:
        model.check_divides(size)
    assert "tensor_parallel" in str(caught.value)
