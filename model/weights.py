"""Checkpoint files -> this rank's tensors, by a table that names every tensor and its cut.

    rules(model, run) -> names, shapes, cuts    Checkpoint -> headers    load(...) -> {name: share}

Each rank copies only its own bytes. Every tensor of the files is used once or named as ignored; an
error lists all differences. Names here are the checkpoint's without `model.language_model.`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.model.config import ConfigError, ModelConfig, RunConfig
from outrider.parallel.shard import WHOLE, Cut, Part, columns, rows

IGNORED_PREFIXES = ("model.visual.", "visual.")
"""Vision tower of the nested checkpoints: this is a text engine."""
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor: whole shape, how it is cut over `size` ranks, dtype and what it belongs to."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    size: int
    part: str
    float32: bool = False
    copies: int = 1
    """How often it lies in memory: a norm shared by heads is laid out once a head."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.cut.local_shape(self.shape, self.size)

    def num_bytes(self, run: RunConfig) -> int:
        """Bytes that a rank holds of it once the layers are built."""
        return math.prod(self.local_shape) * self.dtype(run).itemsize * self.copies

    def dtype(self, run: RunConfig) -> torch.dtype:
        return torch.float32 if self.float32 else getattr(torch, run.dtype)


def rules(model: ModelConfig, run: RunConfig) -> list[Rule]:
    """Every tensor that one rank of this run holds, in loading order."""
    size, h, v = run.tensor_parallel, model.hidden_size, model.vocab_size
    table = [Rule("embed_tokens.weight", (v, h), WHOLE, size, "embedding")]
    for i, kind in enumerate(model.layer_types):
        prefix = f"layers.{i}."
        table += _block(model, prefix, size, "target layers")
        if kind == "full_attention":
            table += _attention(model, f"{prefix}self_attn.", size, "target layers")
        else:
            table += _gdn(model, f"{prefix}linear_attn.", size)
    table.append(Rule("norm.weight", (h,), WHOLE, size, "target layers", float32=True))
    if not model.tie_word_embeddings:
        table.append(Rule("lm_head.weight", (v, h), rows(v), size, "head"))
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
    """The safetensors files of a folder: which tensor lies where, from their headers alone.

    Raises ConfigError when there are none, an index names an absent file, or a file is cut short.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = Path(model_dir)
        self.files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        problems = []
        for path in self._paths():
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                problems.append(f"{path}: not a whole safetensors file ({error})")
                continue
            self._open[path] = handle
            self.files.update({self._plain(name): path for name in handle.keys()})
        if problems:
            raise ConfigError("; ".join(problems) + ". Download the checkpoint again.")
        self._names = {self._plain(n): n for f in self._open.values() for n in f.keys()}

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
    def _plain(name: str) -> str:
        for prefix in ("model.language_model.", "language_model.", "model."):
            if name.startswith(prefix) and not name.startswith(IGNORED_PREFIXES):
                return name[len(prefix) :]
        return name

    def slice(self, name: str) -> Any:
        """safetensors' lazy slice of a tensor by its plain name."""
        return self._open[self.files[name]].get_slice(self._names[name])

    def check(self, table: Iterable[Rule], ignored: Callable[[str], bool]) -> None:
        """One ConfigError that lists every missing, unused and wrongly shaped tensor."""
        wanted = {rule.name: rule for rule in table}
        missing = sorted(wanted.keys() - self.files.keys())
        unused = sorted(n for n in self.files.keys() - wanted.keys() if not ignored(n))
        shaped = [
            f"{name} is {found}, config.json says {list(rule.shape)}"
            for name, rule in wanted.items()
            if name in self.files
            and (found := list(self.slice(name).get_shape())) != list(rule.shape)
        ]
        lines = [
            f"{title}: {', '.join(names)}"
            for title, names in (("missing", missing), ("unused", unused), ("shape", shaped))
            if names
        ]
        if lines:
            raise ConfigError(f"{self.model_dir}: weights do not fit. " + "; ".join(lines))


def is_ignored(name: str, model: ModelConfig, run: RunConfig) -> bool:
    """Tensors that a file may hold and this run leaves alone: vision, an unloaded draft, ties."""
    return (
        name.startswith(IGNORED_PREFIXES)
        or (name.startswith("mtp.") and not run.draft_tokens)
        or (name == "lm_head.weight" and model.tie_word_embeddings)
    )


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
    checkpoint = Checkpoint(model_dir)
    checkpoint.check(rules(model, run), lambda name: is_ignored(name, model, run))


def load(
    model: ModelConfig,
    run: RunConfig,
    rank: int,
    device: torch.device,
    on_load: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """This rank's share of every tensor, by plain name, in the run's dtype.

    on_load is called with (bytes read, bytes in all) after each tensor.
    """
    table = rules(model, run)
    checkpoint = Checkpoint(Path(run.model_dir))
    checkpoint.check(table, lambda name: is_ignored(name, model, run))
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
    """Copy this rank's spans out of the file: a slice alone would keep all of it mapped."""
    share = torch.empty(rule.local_shape, dtype=dtype)
    if rule.size == 1 or not rule.cut.parts:
        return share.copy_(source[:])
    start, dim = 0, rule.cut.dim
    for a, b in rule.cut.spans(rank, rule.size):
        share.narrow(dim, start, b - a).copy_(source[a:b] if dim == 0 else source[:, a:b])
        start += b - a
    return share


def head_share(table: Tensor, rank: int, size: int) -> Tensor:
    """The head slice of a tied table [V, H]: a view, no second copy."""
    return rows(table.shape[0]).take(table, rank, size)


def resolve_model(name_or_dir: str) -> Path:
    """A local folder as it is; a hub id through huggingface_hub (its cache first).

    Raises ConfigError when the folder is missing, or the hub cannot be reached.
    """
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        return path.resolve()
    looks_local = name_or_dir.startswith(("/", ".", "~")) or name_or_dir.count("/") != 1
    if looks_local or (path.parent.is_dir() and str(path.parent) != "."):
        raise ConfigError(
            f"model = {name_or_dir!r}: no such folder. Set `model` in cluster.yaml or --model to a "
            f"Hugging Face model folder, or to a hub id like owner/name."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model = {name_or_dir!r}: neither a local folder nor in the hub's cache, and the hub "
            f"could not be reached, or refused ({type(error).__name__}: {str(error)[:200]}). "
            f"Download it on a machine with a network and set `model` to the folder."
        ) from None
