"""The numbers of a checkpoint, from its config.json, and the numbers that one run adds to them.

    config.json -> ModelConfig       cluster.yaml -> actors/cluster/spec.py -> RunConfig

Both are frozen. Every layer, byte count and page count is a function of these two alone.
The config.json of multimodal checkpoints has the text model's keys under `text_config`; that of
text-only checkpoints has them at the root. Both are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from outrider.model.quantisation import Quantisation, read_quantisation
from outrider.model.rope import Rope, read_rope
from outrider.model.step import Sampling

ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3NextForCausalLM",
}
TEXT_TYPES = {"qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next"}
LAYER_TYPES = {
    **dict.fromkeys(("full_attention", "attention"), "full_attention"),
    **dict.fromkeys(("linear_attention", "mamba"), "linear_attention"),
}
"""What config.json may call a layer -> what we do. The short names are those of SGLang and of
transformers before 5."""
GENERATION_FILE = "generation_config.json"
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of Sampling for which GENERATION_FILE may give a request's default."""


class ConfigError(ValueError):
    """A user's setting, or a checkpoint, that cannot be run. The message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Full attention with an output gate, grouped key-value heads and partial rotary."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope

    def kv_heads_of(self, size: int) -> int:
        """Key-value heads on each of `size` ranks: at least one, so some are held by several."""
        return max(1, self.num_kv_heads // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnConfig:
    """Sizes of the gated delta net; value head i uses key head i // (num_v_heads / num_k_heads)."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    gate: str
    """Activation of the output gate z: "silu" or "sigmoid"."""
    coarse_state: bool = False
    """True where the checkpoint allows states rounded to bfloat16 (its mamba_ssm_dtype)."""
    rows_in_turn: bool = False
    """RunConfig.pin_rows, for the layers."""

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of an MLP: each row takes top_k of num_experts, and the shared
    expert."""

    num_experts: int
    top_k: int
    width: int
    """MLP columns of an expert."""
    shared_width: int
    """MLP columns of the shared expert."""
    normalised: bool
    """Whether the weights of a row's experts are scaled to a sum of 1."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One Qwen3.5-class text model and its MTP draft."""

    hidden_size: int
    intermediate_size: int
    """MLP columns of the layers without experts; 0 where all have experts."""
    vocab_size: int
    layer_types: tuple[str, ...]
    """"full_attention" or "linear_attention" for each layer."""
    attention: AttentionConfig
    gdn: GdnConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    """True where the LM head is the embedding table. load_config gives what config.json says;
    weights.settle makes it False where the files hold a head that differs."""
    max_position_embeddings: int
    """Positions that a request may use; with YaRN those of pre-training times its factor."""
    num_mtp_layers: int
    mtp_dedicated_embeddings: bool
    eos_ids: tuple[int, ...]
    """Ids that end an answer, sorted."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What a request takes for fields of Sampling that it leaves open: those of MODEL_DEFAULTS that
    the checkpoint's generation_config.json gives."""
    experts: ExpertConfig | None = None
    """Those of the layers in expert_layers, and of the draft's layer."""
    expert_layers: frozenset[int] = frozenset()
    """Indices of the target's layers with experts."""
    quantisation: Quantisation | None = None
    """How the files store weights; None: as plain numbers."""
    source: str = field(default="config.json", compare=False)
    """Path of config.json, for error messages."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers with full attention."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @cached_property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a gated delta net."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    def check_divides(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise ConfigError unless every sharded count divides over `size` ranks.

        expert_parallel: whether they share the experts, instead of each expert's columns.
        """
        counts = {
            "num_attention_heads": self.attention.num_heads,
            "linear_num_key_heads": self.gdn.num_k_heads,
            "linear_num_value_heads": self.gdn.num_v_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
        }
        if self.experts:
            counts["shared_expert_intermediate_size"] = self.experts.shared_width
            if expert_parallel:
                counts["num_experts"] = self.experts.num_experts
            else:
                counts["moe_intermediate_size"] = self.experts.width
        wrong = [f"{name} = {n}" for name, n in counts.items() if n % size]
        kv = self.attention.num_kv_heads
        if kv % size and size % kv:
            wrong.append(f"num_key_value_heads = {kv}")
        if wrong:
            raise ConfigError(
                f"{self.source}: {', '.join(wrong)} cannot be split over {size} ranks. "
                f"Set parallel.tensor_parallel in cluster.yaml to a common divisor."
            )


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Slower behaviours with the same output (model/ablation.py), kept to be measured.

    Two more are settings of their own: speculation.draft_body and parallel.collective.
    """

    sync_each_draft: bool = False
    """Wait for the device after each draft pass; each pass is then a graph of its own."""
    merge_then_split: bool = False
    """Pack the results of the delta net's four projections by key head, and unpack them again."""
    greedy_probabilities: bool = False
    """Gather all logits of greedy rows, and compute and keep their probabilities."""
    gather_logits: bool = False
    """Gather all logits of greedy rows instead of one (value, id) pair from each rank."""
    argmax_drafts: bool = False
    """Draft each sampled request's likeliest token, instead of drawing with the target's noise."""
    no_graph: bool = False
    """Launch every operation from the host instead of replaying graphs."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one engine's settings add to the checkpoint; the same on every rank."""

    model_dir: str
    dtype: str = "float32"
    """"float32" or "bfloat16": dtype of weights, activations and KV. States are float32."""
    tensor_parallel: int = 1
    draft_tokens: int = 3
    """K, drafts an iteration. At 0 the draft is not loaded."""
    drafter: str = "mtp"
    """Where drafts come from: "mtp" (the checkpoint's MTP layer), "lookup" (what followed the last
    tokens where they stood before), or "both"."""
    auto_depth: bool = False
    """True where a StepPlan may ask for fewer drafts than draft_tokens."""
    expert_parallel: bool = False
    """Whether ranks share the experts of a mixture, instead of each expert's columns."""
    quantization: str = "model"
    """"model": weights are stored as in the checkpoint; "fp8": matrices that it has as plain
    numbers are rounded to FP8 with a scale for each block of 128 x 128."""
    draft_body: str = "local"
    """"local": the whole draft body on every rank; "sharded": over the target's group."""
    draft_head: str = "model"
    """Weights that score drafts: "model" (the checkpoint's), or "fp8" (a rounded copy)."""
    max_slots: int = 8
    max_model_len: int = 2048
    page_tokens: int = 16
    num_pages: int = 0
    """KV pages of a rank, including page 0, which holds no request's tokens."""
    num_snapshots: int = 0
    """Places for states of prompts' beginnings, which later prompts can start from."""
    prefill_chunk: int = 512
    batch_buckets: tuple[int, ...] = ()
    """Batch sizes that iterations are padded to. Empty: powers of two on devices with graphs, no
    padding on others."""
    coarse_state: bool = True
    """Let operations round states to bfloat16 as they compute, where the checkpoint allows it."""
    pin_rows: bool = False
    """Give every pass the same shapes, K+1 rows a slot and all pages that a slot may have, and run
    the delta net's rows in turn: a row's result then does not depend on what is drafted."""
    ablation: Ablation = Ablation()

    @property
    def uses_mtp(self) -> bool:
        """Whether the checkpoint's MTP layer is loaded."""
        return self.draft_tokens > 0 and self.drafter != "lookup"

    @property
    def uses_lookup(self) -> bool:
        """Whether the tokens of each request are looked through for drafts."""
        return self.draft_tokens > 0 and self.drafter != "mtp"

    @property
    def draft_size(self) -> int:
        """Ranks the draft body is sharded over."""
        return self.tensor_parallel if self.draft_body == "sharded" else 1


def load_config(model_dir: Path) -> ModelConfig:
    """Read config.json of a Hugging Face folder, and from the files beside it which ids end an
    answer and how requests sample by default.

    Raises ConfigError when a file is not JSON or lacks a key, when the checkpoint is quantised in a
    way that cannot be run, and when it is no Qwen3.5 or Qwen3-Next text model.
    """
    folder = Path(model_dir)
    path = folder / "config.json"
    root = _read_json(path)
    text = root.get("text_config") or root
    _check_kind(root, text, path)

    def count(name: str) -> int:
        value = text.get(name)
        if not _is_int(value) or value < 1:
            raise ConfigError(f"{path}: {name} = {value!r}: a whole number above 0 is needed")
        return value

    num_layers = count("num_hidden_layers")
    experts, expert_layers = _experts(text, num_layers, count)
    head_dim, vocab_size = count("head_dim"), count("vocab_size")
    max_positions = count("max_position_embeddings")
    try:
        rope = read_rope(text, head_dim, max_positions)
    except ValueError as problem:
        raise ConfigError(f"{path}: {problem}") from None
    if rope.yarn:
        max_positions = int(rope.yarn.original_positions * rope.yarn.factor)
    return ModelConfig(
        hidden_size=count("hidden_size"),
        intermediate_size=count("intermediate_size") if len(expert_layers) < num_layers else 0,
        vocab_size=vocab_size,
        layer_types=_layer_types(text, num_layers, path),
        attention=AttentionConfig(
            num_heads=count("num_attention_heads"),
            num_kv_heads=count("num_key_value_heads"),
            head_dim=head_dim,
            rope=rope,
        ),
        gdn=GdnConfig(
            num_k_heads=count("linear_num_key_heads"),
            num_v_heads=count("linear_num_value_heads"),
            head_k_dim=count("linear_key_head_dim"),
            head_v_dim=count("linear_value_head_dim"),
            conv_kernel=count("linear_conv_kernel_dim"),
            gate=_gate(text.get("output_gate_type"), path),
            coarse_state=_coarse_state(text.get("mamba_ssm_dtype"), path),
        ),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(
            root.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
        ),
        max_position_embeddings=max_positions,
        num_mtp_layers=_num_mtp_layers(text),
        mtp_dedicated_embeddings=bool(text.get("mtp_use_dedicated_embeddings", False)),
        eos_ids=_eos_ids(root, text, folder, vocab_size),
        sampling_defaults=_sampling_defaults(folder),
        experts=experts,
        expert_layers=expert_layers,
        quantisation=_quantisation(root, text, path),
        source=str(path),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. `model` in cluster.yaml (or --model) must name a Hugging Face "
            f"model folder or hub id."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a JSON object is needed, found {type(table).__name__}")
    return table


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_kind(root: dict[str, Any], text: dict[str, Any], path: Path) -> None:
    """Raise ConfigError for a checkpoint that is of another kind than this engine runs."""
    names = root.get("architectures") or []
    if text.get("model_type") not in TEXT_TYPES and not ARCHITECTURES & set(names):
        raise ConfigError(
            f"{path}: model_type {text.get('model_type')!r}, architectures {names}: this is not a "
            f"Qwen3.5 or Qwen3-Next text model. Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    if text.get("attention_bias"):
        raise ConfigError(f"{path}: attention_bias true: Qwen3.5 has no biases, none are loaded")


def _experts(
    text: dict[str, Any], num_layers: int, count: Callable[[str], int]
) -> tuple[ExpertConfig | None, frozenset[int]]:
    """The experts, and the indices of the layers that have them."""
    if not text.get("num_experts"):
        return None, frozenset()
    dense = set(text.get("mlp_only_layers") or [])
    step = text.get("decoder_sparse_step") or 1
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    experts = ExpertConfig(
        num_experts=count("num_experts"),
        top_k=min(count("num_experts_per_tok"), count("num_experts")),
        width=count("moe_intermediate_size"),
        shared_width=count("shared_expert_intermediate_size"),
        normalised=bool(text.get("norm_topk_prob", True)),
    )
    return experts, layers


def _num_mtp_layers(text: dict[str, Any]) -> int:
    """Layers of the draft. Qwen3-Next's releases have one, which its config.json does not say."""
    if text.get("model_type") == "qwen3_next":
        return int(text.get("num_nextn_predict_layers", 1) or 0)
    return int(text.get("mtp_num_hidden_layers") or 0)


def _quantisation(root: dict[str, Any], text: dict[str, Any], path: Path) -> Quantisation | None:
    try:
        return read_quantisation(root.get("quantization_config") or text.get("quantization_config"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _layer_types(text: dict[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval") or 4
        given = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        ]
    names = [str(name) for name in given] if isinstance(given, list) else [str(given)]
    if len(names) != num_layers or not set(names) <= LAYER_TYPES.keys():
        raise ConfigError(
            f"{path}: layer_types must hold num_hidden_layers = {num_layers} entries out of "
            f"{sorted(LAYER_TYPES)}; it holds {len(names)}: {sorted(set(names))}"
        )
    return tuple(LAYER_TYPES[name] for name in names)


def _gate(value: str | None, path: Path) -> str:
    if value in (None, "swish", "silu"):
        return "silu"
    if value == "sigmoid":
        return value
    raise ConfigError(f"{path}: output_gate_type {value!r}: one of swish, silu, sigmoid is needed")


def _coarse_state(value: str | None, path: Path) -> bool:
    if value in (None, "float32", "bfloat16"):
        return value == "bfloat16"
    raise ConfigError(f"{path}: mamba_ssm_dtype {value!r}: float32 or bfloat16 is needed")


def _eos_ids(
    root: dict[str, Any], text: dict[str, Any], folder: Path, vocab_size: int
) -> tuple[int, ...]:
    """Ids that end an answer: the union of those that four places name.

    config.json, at its root and in text_config, usually names the end of a text. The tokenizer
    names the end of a chat turn. generation_config.json names both, but many releases lack it.
    """
    found = [(folder / "config.json", table.get("eos_token_id")) for table in (root, text)]
    generation = folder / GENERATION_FILE
    if generation.is_file():
        found.append((generation, _read_json(generation).get("eos_token_id")))
    found.append(_tokenizer_eos(folder))
    ids: set[int] = set()
    for path, value in found:
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not _is_int(token) or not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{path}: the end token has id {token!r}: a whole number from 0 to "
                    f"{vocab_size - 1}, the last of the vocabulary, is needed"
                )
            ids.add(token)
    return tuple(sorted(ids))


def _sampling_defaults(folder: Path) -> dict[str, float]:
    """Those of MODEL_DEFAULTS that generation_config.json gives.

    `do_sample` counts too: false makes temperature 0, true makes it 1 where the file has none,
    since transformers leaves a temperature of 1 out when it saves.
    """
    path = folder / GENERATION_FILE
    table = _read_json(path) if path.is_file() else {}
    found = {name: table[name] for name in MODEL_DEFAULTS if table.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            rule = f"a {'whole ' if whole else ''}number is needed"
            raise ConfigError(f"{path}: {name} = {value!r}: {rule}")
    if found.get("top_k") == -1:
        found["top_k"] = 0
    try:
        Sampling(**found)
    except ValueError as problem:
        raise ConfigError(f"{path}: {str(problem).removeprefix('sampling.')}") from None
    draws = table.get("do_sample")
    if draws not in (None, True, False):
        raise ConfigError(f"{path}: do_sample = {draws!r}: true or false is needed")
    if draws is False:
        found["temperature"] = 0.0
    elif draws:
        found.setdefault("temperature", 1.0)
    return found


def _tokenizer_eos(folder: Path) -> tuple[Path, int | None]:
    """The id of tokenizer_config.json's eos_token, and the file that gives it.

    None without an eos_token, and without a file that lists the tokens. Raises ConfigError where
    the files list tokens and the eos_token is none of them.
    """
    config, tokens = folder / "tokenizer_config.json", folder / "tokenizer.json"
    table = _read_json(config) if config.is_file() else {}
    eos = table.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is None:
        return config, None
    for token, entry in (table.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == eos:
            return config, int(token)
    if not tokens.is_file():
        for tokens in (folder / "added_tokens.json", folder / "vocab.json"):
            table = _read_json(tokens) if tokens.is_file() else {}
            if eos in table:
                return tokens, table[eos]
        return config, None
    table = _read_json(tokens)
    for entry in table.get("added_tokens") or []:
        if entry.get("content") == eos:
            return tokens, entry["id"]
    vocab = table.get("model", {}).get("vocab")
    if not isinstance(vocab, dict) or eos not in vocab:
        raise ConfigError(f"{config}: eos_token {eos!r} is not a token of {tokens}")
    return tokens, vocab[eos]
