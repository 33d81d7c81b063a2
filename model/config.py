"""config.json of a checkpoint -> frozen numbers; and the numbers one run adds to them.

    config.json -> ModelConfig       cluster.yaml -> (actors/spec.py) -> RunConfig

Nothing is decided later: a layer, a byte count or a page count is a function of these two.
Keys and their traps: https://huggingface.co/Qwen (Qwen3.5 config.json), nested or flat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
}
TEXT_TYPES = {"qwen3_5_text", "qwen3_5"}


class ConfigError(ValueError):
    """What a user wrote, or a checkpoint holds, cannot be run. The text says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Full attention with an output gate, grouped key-value heads and partial rotary."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    def kv_heads_of(self, size: int) -> int:
        """Key-value heads each of `size` ranks holds; below one they are repeated."""
        return max(1, self.num_kv_heads // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnConfig:
    """Gated DeltaNet geometry: each value head reads key head `head // (num_v // num_k)`."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    gate: str
    """Activation of the output gate z: "silu" or "sigmoid"."""
    coarse_state: bool = False
    """The checkpoint is content with a bfloat16 state (mamba_ssm_dtype)."""

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One Qwen3.5-class text model and its MTP draft."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[str, ...]
    """"full_attention" or "linear_attention", one a layer."""
    attention: AttentionConfig
    gdn: GdnConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_mtp_layers: int
    mtp_dedicated_embeddings: bool
    eos_ids: tuple[int, ...]
    source: str = field(default="config.json", compare=False)
    """Where the numbers came from, for error messages."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @cached_property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    def check_divides(self, size: int) -> None:
        """Raise ConfigError unless every sharded count divides over `size` ranks."""
        counts = {
            "num_attention_heads": self.attention.num_heads,
            "linear_num_key_heads": self.gdn.num_k_heads,
            "linear_num_value_heads": self.gdn.num_v_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
        }
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
    """Old behaviours (model/ablation.py), each slower and with the same output; for measurements.

    The two others are speculation.draft_body: sharded and parallel.collective.
    """

    sync_each_draft: bool = False
    """Wait for the device after each draft pass; the iteration is then a graph a pass."""
    merge_then_split: bool = False
    """Pack the delta net's four projections by key head, and unpack them again."""
    greedy_probabilities: bool = False
    """Make, gather and keep the probabilities of greedy rows."""
    gather_logits: bool = False
    """Gather whole logits instead of (value, id) pairs."""
    no_graph: bool = False
    """Launch every operation from the host."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one engine adds to the checkpoint; the same on every rank."""

    model_dir: str
    dtype: str = "float32"
    """dtype of weights, activations and KV: "float32" or "bfloat16". States stay float32."""
    tensor_parallel: int = 1
    draft_tokens: int = 3
    """K; 0 leaves the draft unloaded."""
    auto_depth: bool = False
    """K is the most; a Plan may say less."""
    draft_body: str = "local"
    """"local": the whole draft body on every rank; "sharded": over the target's group."""
    draft_head: str = "model"
    """Weights that score drafts: "model" (the checkpoint's), or "fp8" (a rounded copy)."""
    max_slots: int = 8
    max_model_len: int = 2048
    page_tokens: int = 16
    num_pages: int = 0
    """KV pages a rank holds, the null page included."""
    prefill_chunk: int = 512
    batch_buckets: tuple[int, ...] = ()
    """DecodeBatch sizes an iteration is padded to; empty: no padding."""
    coarse_state: bool = True
    """States may be rounded to bfloat16 on their way where the checkpoint is content with that."""
    pin_rows: bool = False
    """Run K+1 rows a slot even without drafts, so that kernels see the same shapes."""
    ablation: Ablation = Ablation()

    @property
    def draft_size(self) -> int:
        """Ranks the draft body is sharded over."""
        return self.tensor_parallel if self.draft_body == "sharded" else 1


def load_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` when present) of a Hugging Face folder.

    Raises ConfigError when a file is missing, is not JSON, lacks a key or describes a model
    outside the Qwen3.5 dense text family.
    """
    path = Path(model_dir) / "config.json"
    root = _read_json(path)
    text = root.get("text_config", root)
    names = root.get("architectures") or []
    if text.get("model_type") not in TEXT_TYPES and not ARCHITECTURES & set(names):
        raise ConfigError(
            f"{path}: model_type {text.get('model_type')!r}, architectures {names}: this is not a "
            f"Qwen3.5 dense text model. Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    need = _Keys(text, path)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{path}: rope_type {rope['rope_type']!r} is not supported: only default")
    head_dim = need("head_dim")
    theta = rope.get("rope_theta", text.get("rope_theta", 10_000.0))
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    eos = _eos_ids(text, Path(model_dir) / "generation_config.json")
    if text.get("attention_bias"):
        raise ConfigError(f"{path}: attention_bias true: Qwen3.5 has no biases, none are loaded")
    return ModelConfig(
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        layer_types=_layer_types(text, need("num_hidden_layers"), path),
        attention=AttentionConfig(
            num_heads=need("num_attention_heads"),
            num_kv_heads=need("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * factor),
            rope_theta=float(theta),
        ),
        gdn=GdnConfig(
            num_k_heads=need("linear_num_key_heads"),
            num_v_heads=need("linear_num_value_heads"),
            head_k_dim=need("linear_key_head_dim"),
            head_v_dim=need("linear_value_head_dim"),
            conv_kernel=need("linear_conv_kernel_dim"),
            gate=_gate(text.get("output_gate_type"), path),
            coarse_state=_coarse_state(text.get("mamba_ssm_dtype"), path),
        ),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(
            root.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
        ),
        max_position_embeddings=int(text.get("max_position_embeddings", 32768)),
        num_mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
        mtp_dedicated_embeddings=bool(text.get("mtp_use_dedicated_embeddings", False)),
        eos_ids=eos,
        source=str(path),
    )


class _Keys:
    """Positive whole numbers of a JSON object, or a ConfigError that names the key."""

    def __init__(self, table: dict[str, Any], path: Path) -> None:
        self.table, self.path = table, path

    def __call__(self, name: str) -> int:
        value = self.table.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {name} = {value!r}: a whole number above 0 is needed")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text())
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


def _layer_types(text: dict[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval") or 4
        given = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        ]
    kinds = {"full_attention", "linear_attention"}
    if len(given) != num_layers or not set(given) <= kinds:
        raise ConfigError(
            f"{path}: layer_types must hold num_hidden_layers = {num_layers} entries out of "
            f"{sorted(kinds)}; it holds {len(given)}: {sorted(set(map(str, given)))}"
        )
    return tuple(given)


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


def _eos_ids(text: dict[str, Any], generation: Path) -> tuple[int, ...]:
    """Ids of both files: generation_config lists the turn end, config.json the text end."""
    ids: set[int] = set()
    sources = [text.get("eos_token_id")]
    if generation.is_file():
        sources.append(_read_json(generation).get("eos_token_id"))
    for value in sources:
        ids.update(value if isinstance(value, list) else () if value is None else (value,))
    return tuple(sorted(int(i) for i in ids))
