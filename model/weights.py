"""The files of a checkpoint -> the tensors of one rank.

    rules(model, run) -> names, shapes, cuts    Checkpoint -> headers    load(...) -> {name: share}

`rules` is the table of every tensor that a run needs. Each rank copies only its own bytes. Every
tensor of the files is used or known to be left out; an error lists all differences at once. Names
here are the checkpoint's without the prefix `model.language_model.`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.model.config import ConfigError, ModelConfig, RunConfig
from outrider.parallel.shard import WHOLE, Cut, Part, columns, rows

IGNORED_PREFIXES = ("model.visual.", "visual.")
"""The vision tower of multimodal checkpoints, which a text engine does not load."""
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096
"""Rows of embedding and head that are in memory at once while they are compared."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of the files (safetensors' names) whose values are the weights themselves."""
QUANTISED_SUFFIXES = {
    "weight_scale_inv": "FP8 with a scale for each block",
    "weight_offset": "integers with scales and offsets, as of Ascend tools",
    "weight_packed": "packed integers, as of compressed-tensors",
    "qweight": "packed integers, as of GPTQ and AWQ",
    "absmax": "bitsandbytes",
    "weight_scale": "integers or FP8 with scales",
}
"""Ends of the names that quantisation tools put beside or in place of a weight -> the method."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor: its whole shape, how `size` ranks share it, its dtype and the part it is of."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    size: int
    part: str
    float32: bool = False
    copies: int = 1
    """How often a rank holds it: a norm that heads share is stored once for each head."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one rank's share."""
        return self.cut.local_shape(self.shape, self.size)

    def num_bytes(self, run: RunConfig) -> int:
        """Bytes of one rank's share, in all its copies."""
        return math.prod(self.local_shape) * self.dtype(run).itemsize * self.copies

    def dtype(self, run: RunConfig) -> torch.dtype:
        """dtype in memory: the run's, or float32 where the rule says so."""
        return torch.float32 if self.float32 else getattr(torch, run.dtype)


def rules(model: ModelConfig, run: RunConfig) -> list[Rule]:
    """Every tensor that one rank of this run holds, in the order in which they are loaded."""
    size, h, v = run.tensor_parallel, model.hidden_size, model.vocab_size
    table = [Rule(EMBEDDING, (v, h), WHOLE, size, "embedding")]
    for i, kind in enumerate(model.layer_types):
        prefix = f"layers.{i}."
        table += _block(model, prefix, size, "target layers")
        if kind == "full_attention":
            table += _attention(model, f"{prefix}self_attn.", size, "target layers")
        else:
            table += _gdn(model, f"{prefix}linear_attn.", size)
    table.append(Rule("norm.weight", (h,), WHOLE, size, "target layers", float32=True))
    if not model.tie_word_embeddings:
        table.append(Rule(HEAD, (v, h), rows(v), size, "head"))
    if run.draft_tokens:
        table += _draft(model, run)
    return table


def _block(model: ModelConfig, prefix: str, size: int, part: str) -> list[Rule]:
    h, i = model.hidden_size, model.intermediate_size
    return [
        Rule(f"{prefix}input_layernorm.weight", (h,), WHOLE, size, part, float32=True),
        Rule(f"{prefix}post_attention_layernorm.weight", (h,), WHOLE, size, part, float32=True),
        Rule(f"{prefix}mlp.gate_proj.weight", (i, h), rows(i), size, part),
        Rule(f"{prefix}mlp.up_proj.weight", (i, h), rows(i), size, part),
        Rule(f"{prefix}mlp.down_proj.weight", (h, i), columns(i), size, part),
    ]


def _attention(model: ModelConfig, prefix: str, size: int, part: str) -> list[Rule]:
    h, a = model.hidden_size, model.attention
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    kv_rows = rows(kv, a.num_kv_heads)
    d, n, m = a.head_dim, a.num_heads // size, a.kv_heads_of(size)
    return [
        Rule(f"{prefix}q_proj.weight", (2 * q, h), rows(2 * q, a.num_heads), size, part),
        Rule(f"{prefix}k_proj.weight", (kv, h), kv_rows, size, part),
        Rule(f"{prefix}v_proj.weight", (kv, h), kv_rows, size, part),
        Rule(f"{prefix}o_proj.weight", (h, q), columns(q, a.num_heads), size, part),
        Rule(f"{prefix}q_norm.weight", (d,), WHOLE, size, part, float32=True, copies=n),
        Rule(f"{prefix}k_norm.weight", (d,), WHOLE, size, part, float32=True, copies=m),
    ]


def _gdn(model: ModelConfig, prefix: str, size: int) -> list[Rule]:
    h, g, part = model.hidden_size, model.gdn, "target layers"
    kd, vd, heads = g.key_dim, g.value_dim, g.num_v_heads
    channels = 2 * kd + vd
    qkv = Cut(0, (Part(kd, g.num_k_heads), Part(kd, g.num_k_heads), Part(vd, heads)))
    by_head = rows(heads)
    return [
        Rule(f"{prefix}in_proj_qkv.weight", (channels, h), qkv, size, part),
        Rule(f"{prefix}in_proj_z.weight", (vd, h), rows(vd, heads), size, part),
        Rule(f"{prefix}in_proj_b.weight", (heads, h), by_head, size, part),
        Rule(f"{prefix}in_proj_a.weight", (heads, h), by_head, size, part),
        Rule(f"{prefix}conv1d.weight", (channels, 1, g.conv_kernel), qkv, size, part),
        Rule(f"{prefix}A_log", (heads,), by_head, size, part, float32=True),
        Rule(f"{prefix}dt_bias", (heads,), by_head, size, part),
        Rule(f"{prefix}norm.weight", (g.head_v_dim,), WHOLE, size, part, float32=True),
        Rule(f"{prefix}out_proj.weight", (h, vd), columns(vd, heads), size, part),
    ]


def _draft(model: ModelConfig, run: RunConfig) -> list[Rule]:
    h, v, size, part = model.hidden_size, model.vocab_size, run.draft_size, "draft body"
    table = [
        Rule("mtp.fc.weight", (h, 2 * h), WHOLE, size, part),
        Rule("mtp.pre_fc_norm_embedding.weight", (h,), WHOLE, size, part, float32=True),
        Rule("mtp.pre_fc_norm_hidden.weight", (h,), WHOLE, size, part, float32=True),
        Rule("mtp.norm.weight", (h,), WHOLE, size, part, float32=True),
        *_block(model, "mtp.layers.0.", size, part),
        *_attention(model, "mtp.layers.0.self_attn.", size, part),
    ]
    if model.mtp_dedicated_embeddings:
        table.append(Rule("mtp.embed_tokens.weight", (v, h), WHOLE, size, "draft embedding"))
        if not model.tie_word_embeddings:
            table.append(
                Rule("mtp.lm_head.weight", (v, h), rows(v), run.tensor_parallel, "draft head")
            )
    return table


class Checkpoint:
    """The safetensors files of a folder: which tensor lies in which file, from their headers alone.

    Raises ConfigError when there are none, when the index names a file that is not there, and when
    a file is incomplete.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = Path(model_dir)
        self.names: dict[str, tuple[Any, str]] = {}
        """Name without prefix -> the open file that holds the tensor, and its name there."""
        problems = []
        for path in self._paths():
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                problems.append(f"{path}: not a whole safetensors file ({error})")
                continue
            for full_name in file.keys():
                name = self._without_prefix(full_name)
                if name in self.names:
                    problems.append(f"{path}: {full_name} is stored a second time")
                self.names[name] = file, full_name
        if problems:
            raise ConfigError("; ".join(problems) + ". Download the checkpoint again.")

    def _paths(self) -> list[Path]:
        index = self.model_dir / INDEX_FILE
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (json.JSONDecodeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{index}: no readable weight_map ({error!r})") from None
            missing = [n for n in names if not (self.model_dir / n).is_file()]
            if missing:
                raise ConfigError(f"{index} names files that are not there: {', '.join(missing)}")
            return [self.model_dir / n for n in names]
        if (self.model_dir / SINGLE_FILE).is_file():
            return [self.model_dir / SINGLE_FILE]
        raise ConfigError(
            f"{self.model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. "
            f"`model` in cluster.yaml must name a folder with safetensors weights."
        )

    @staticmethod
    def _without_prefix(name: str) -> str:
        for prefix in ("model.language_model.", "language_model.", "model."):
            if name.startswith(prefix) and not name.startswith(IGNORED_PREFIXES):
                return name[len(prefix) :]
        return name

    def slice(self, name: str) -> Any:
        """safetensors' lazy slice of a tensor: its shape and dtype, and parts of it by index."""
        file, full_name = self.names[name]
        return file.get_slice(full_name)

    def check(self, model: ModelConfig, run: RunConfig) -> None:
        """Raise one ConfigError that lists every missing, unused and wrongly shaped tensor.

        A quantised checkpoint, and a draft that is missing as a whole, are one entry.
        """
        needed = {rule.name: rule for rule in rules(model, run)}
        present = sorted(name for name in self.names if not is_ignored(name, model, run))
        if quantisation := self._quantisation(present, needed):
            raise ConfigError(
                f"{self.model_dir}: this is a quantised checkpoint ({quantisation}). Set `model` "
                f"to the release without quantisation: {', '.join(PLAIN_DTYPES)} can be loaded."
            )
        missing = sorted(needed.keys() - self.names.keys())
        others = [name for name in missing if not name.startswith("mtp.")]
        if others != missing and not any(name.startswith("mtp.") for name in self.names):
            missing = [
                *others,
                f"every mtp.* tensor, so there is no draft, though config.json has one: set "
                f"speculation.draft_tokens: 0 in cluster.yaml "
                f"(now {'auto' if run.auto_depth else run.draft_tokens})",
            ]
        shapes = {n: list(self.slice(n).get_shape()) for n in needed if n in self.names}
        differences = {
            "missing": missing,
            "unused": [name for name in present if name not in needed],
            "shape": [
                f"{name} is {shape}, config.json says {list(needed[name].shape)}"
                for name, shape in shapes.items()
                if shape != list(needed[name].shape)
            ],
        }
        lines = [f"{title}: {', '.join(names)}" for title, names in differences.items() if names]
        if lines:
            raise ConfigError(f"{self.model_dir}: weights do not fit. " + "; ".join(lines))

    def _quantisation(self, present: Sequence[str], needed: Collection[str]) -> str:
        """How the needed tensors are quantised, by what is present; "" for plain numbers."""
        dtypes = {name: self.slice(name).get_dtype() for name in present if name in needed}
        codes = [f"{name} is {kind}" for name, kind in dtypes.items() if kind not in PLAIN_DTYPES]
        endings = {name.rpartition(".")[2] for name in present}
        methods = [method for suffix, method in QUANTISED_SUFFIXES.items() if suffix in endings]
        more = [f"{len(codes) - 1} more"] if len(codes) > 1 else []
        return "; ".join(methods[:1] + codes[:1] + more)


def is_ignored(name: str, model: ModelConfig, run: RunConfig) -> bool:
    """True for a tensor that a file may hold and this run does not load: the vision tower, a draft
    at K = 0, and a second copy of the embedding under the head's name."""
    return (
        name.startswith(IGNORED_PREFIXES)
        or (name.startswith("mtp.") and not run.draft_tokens)
        or (name == HEAD and model.tie_word_embeddings)
    )


def settle_head(model: ModelConfig, model_dir: Path) -> ModelConfig:
    """The model, untied where config.json ties the head but the files hold one that differs.

    The two tensors are read only where config.json ties the head and the files hold one. A folder
    without weights leaves the model as config.json has it.
    """
    has_weights = any((model_dir / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))
    if not model.tie_word_embeddings or not has_weights:
        return model
    checkpoint = Checkpoint(model_dir)
    if not {HEAD, EMBEDDING} <= checkpoint.names.keys():
        return model
    head, table = checkpoint.slice(HEAD), checkpoint.slice(EMBEDDING)
    shape = table.get_shape()
    is_copy = head.get_shape() == shape and all(
        torch.equal(head[a : a + COMPARED_ROWS].float(), table[a : a + COMPARED_ROWS].float())
        for a in range(0, shape[0], COMPARED_ROWS)
    )
    return model if is_copy else replace(model, tie_word_embeddings=False)


def check_weights(model_dir: Path, model: ModelConfig, run: RunConfig) -> None:
    """Compare the files' headers with what the run will load; reads no tensor.

    Raises ConfigError listing every difference, or when the ranks cannot share the model.
    """
    model.check_divides(run.tensor_parallel)
    if run.draft_tokens and not model.num_mtp_layers:
        raise ConfigError(
            f"{model.source}: mtp_num_hidden_layers = {model.num_mtp_layers}: this checkpoint has "
            f"no draft. Set speculation.draft_tokens: 0 in cluster.yaml (now {run.draft_tokens})."
        )
    Checkpoint(model_dir).check(model, run)


def load(
    model: ModelConfig,
    run: RunConfig,
    rank: int,
    device: torch.device,
    on_load: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """This rank's share of every tensor by its name without prefix, in the dtype of its rule.

    on_load is called with (bytes so far, bytes of all tensors) after each tensor. Raises
    ConfigError as check_weights does.
    """
    table = rules(model, run)
    checkpoint = Checkpoint(Path(run.model_dir))
    checkpoint.check(model, run)
    sizes = [rule.num_bytes(run) for rule in table]
    done, total, params = 0, sum(sizes), {}
    for rule, num_bytes in zip(table, sizes, strict=True):
        share = rank if rule.size > 1 else 0
        tensor = _read(checkpoint.slice(rule.name), rule, share, rule.dtype(run))
        params[rule.name] = tensor.to(device)
        done += num_bytes
        if on_load:
            on_load(done, total)
    return params


def _read(source: Any, rule: Rule, rank: int, dtype: torch.dtype) -> Tensor:
    """A copy of this rank's spans of a tensor; a view would keep the whole file mapped."""
    share = torch.empty(rule.local_shape, dtype=dtype)
    if rule.size == 1 or not rule.cut.parts:
        return share.copy_(source[:])
    start, dim = 0, rule.cut.dim
    for a, b in rule.cut.spans(rank, rule.size):
        share.narrow(dim, start, b - a).copy_(source[a:b] if dim == 0 else source[:, a:b])
        start += b - a
    return share


def head_share(table: Tensor, rank: int, size: int) -> Tensor:
    """This rank's rows of a tied head: a view [V / size, H] of the embedding table [V, H]."""
    return rows(table.shape[0]).take(table, rank, size)
