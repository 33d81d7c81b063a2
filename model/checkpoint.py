"""The safetensors files of a folder, as the weights of a model, from their headers alone.

    files -> Checkpoint -> weights by name, without prefix -> StoredWeight.read(rows, columns)

Savers write the same weights in several layouts: experts fused or one by one, Qwen3-Next's
projections packed by key head, weights in codes with tables of scales beside them. A StoredWeight
has one name and one shape whatever the layout, and knows where in the files its rows lie.
Letters: O rows and K columns of a weight | E experts | I MLP columns | H hidden
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.model.config import ConfigError, ModelConfig
from outrider.model.quantisation import PREFIXES, Quantisation
from outrider.parallel.formats import INT4_ZERO

IGNORED_PREFIXES = ("model.visual.", "visual.")
"""The vision tower of multimodal checkpoints, which a text engine does not load."""
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of the files (safetensors' names) whose values are the weights themselves."""
FP8_DTYPE, FP8_SCALES = "F8_E4M3", "_scale_inv"
GPTQ_TABLES = ("qweight", "qzeros", "scales", "g_idx")
CODES_IN_WORD = 8
"""Codes of 4 bits in a 32-bit number, the first in its lowest bits."""

Span = tuple[int, int]
"""(start, stop) of rows or columns."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file."""

    file: Any
    name: str

    @property
    def slice(self) -> Any:
        """safetensors' lazy slice: its shape and dtype, and parts of it by index."""
        return self.file.get_slice(self.name)

    @property
    def shape(self) -> list[int]:
        return self.slice.get_shape()

    @property
    def dtype(self) -> str:
        return self.slice.get_dtype()

    def read(self, rows: Span, columns: Span | None = None, index: int | None = None) -> Tensor:
        """A copy of some rows, and columns, of the tensor, or of the index-th of its matrices."""
        where: list[Any] = [] if index is None else [index]
        where.append(slice(*rows))
        if columns is not None:
            where.append(slice(*columns))
        return self.slice[tuple(where)]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of a weight from `first` on, which lie in a file one after another from row `at` on."""

    first: int
    length: int
    source: Stored
    at: int = 0
    index: int | None = None
    """Which of the file's matrices, where it holds one for each expert in one tensor."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of the model, wherever its rows lie."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the type; that of the codes where there are any."""
    runs: tuple[RowRun, ...]
    quantisation: Quantisation | None = None
    """How its codes are read; None: it is plain."""
    tables: dict[str, Stored] = field(default_factory=dict)
    """Tensors beside the codes: "scales" and, of GPTQ, "qzeros" and "g_idx"."""

    def read(self, rows: Span, columns: Span | None = None) -> Tensor:
        """Rows a..b (and columns) in the files' type: plain numbers, or FP8 codes."""
        parts = []
        for run, (a, b) in self._runs_of(rows):
            at = run.at + a - run.first
            parts.append(run.source.read((at, at + b - a), columns, run.index))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_plain(self, rows: Span, columns: Span | None = None) -> Tensor:
        """As read, with codes made plain: then float32."""
        if self.quantisation is None:
            return self.read(rows, columns)
        columns = columns or (0, self.shape[1])
        if self.quantisation.method == "fp8":
            codes = self.read(rows, columns).float()
        else:
            codes = self.read_int4(rows, columns).float() - INT4_ZERO
        return codes * self.read_scales(range(*rows), range(*columns))

    def read_scales(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """The scale float32 [len(rows), len(columns)] of the number at each row and column; both
        rise."""
        assert self.quantisation is not None, "only codes have scales"
        table, (block_rows, block_columns) = self.tables["scales"], self.quantisation.block
        wanted = torch.tensor(columns) // block_columns
        a, b = int(wanted[0]), int(wanted[-1]) + 1
        parts = []
        for run, (start, stop) in self._runs_of((rows[0], rows[-1] + 1)):
            own = torch.tensor([row for row in rows if start <= row < stop])
            at = (own + run.at - run.first) // block_rows
            first, last = int(at[0]), int(at[-1]) + 1
            if self.quantisation.method == "gptq":  # [K / group, O]
                part = table.read((a, b), (first, last)).float().t()
            else:
                part = table.read((first, last), (a, b), run.index).float()
            parts.append(part[at - first][:, wanted - a])
        return torch.cat(parts)

    def read_int4(self, rows: Span, columns: Span) -> Tensor:
        """GPTQ's codes uint8 [rows, columns], where INT4_ZERO stands for zero (check_tables)."""
        assert self.quantisation is not None, "only codes are unpacked"
        first, last = columns[0] // CODES_IN_WORD, -(-columns[1] // CODES_IN_WORD)
        parts = []
        for run, (a, b) in self._runs_of(rows):
            at = run.at + a - run.first
            parts.append(run.source.read((first, last), (at, at + b - a)))  # int32 [K / 8, O]
        words = torch.cat(parts, 1)
        shifts = torch.arange(0, 32, 32 // CODES_IN_WORD, dtype=torch.int32)
        codes = (words.unsqueeze(1) >> shifts[:, None]) & 15  # [K / 8, 8, O]
        start = columns[0] - first * CODES_IN_WORD
        return codes.flatten(0, 1)[start : start + columns[1] - columns[0]].t().to(torch.uint8)

    def check_tables(self) -> None:
        """Read the small tables beside GPTQ's codes. ConfigError where they say that another code
        than INT4_ZERO stands for zero, or that groups of columns are not in order."""
        if self.quantisation is None or self.quantisation.method != "gptq":
            return
        zeros, order = self.tables.get("qzeros"), self.tables.get("g_idx")
        name, group = self.runs[0].source.name, self.quantisation.block[1]
        zero = INT4_ZERO + self.quantisation.zero_offset
        if zeros is not None:
            word = sum(zero << shift for shift in range(0, 32, 4))
            found = zeros.slice[:]
            if not bool((found.to(torch.int64) & 0xFFFFFFFF == word).all()):
                raise ConfigError(
                    f"{name}: its qzeros are not all {zero}, though quantization_config has sym "
                    f"true: asymmetric GPTQ weights are not supported"
                )
        if order is not None:
            expected = torch.arange(self.shape[1]) // group
            if not torch.equal(order.slice[:].to(torch.int64), expected):
                raise ConfigError(
                    f"{name}: its g_idx reorders columns, though quantization_config has desc_act "
                    f"false: such GPTQ weights are not supported"
                )

    def _runs_of(self, rows: Span) -> list[tuple[RowRun, Span]]:
        """The runs that hold rows a..b, and which of them."""
        found = []
        for run in self.runs:
            a, b = max(rows[0], run.first), min(rows[1], run.first + run.length)
            if a < b:
                found.append((run, (a, b)))
        return found


class Checkpoint:
    """The files of a folder. Raises ConfigError when there are none, when the index does not fit
    them, when a tensor is stored twice and when a file is incomplete."""

    def __init__(self, model_dir: Path, model: ModelConfig) -> None:
        self.model_dir = Path(model_dir)
        self.weights: dict[str, StoredWeight] = {}
        """Every weight by its name without prefix."""
        tensors = self._open_files()
        self._collect(tensors, model)

    def _open_files(self) -> dict[str, Stored]:
        """Every tensor of the files, by its name without prefix."""
        paths, listed = self._paths()
        tensors: dict[str, Stored] = {}
        problems = []
        has_draft = False
        for path in [*paths, *self._other_files(paths)]:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                if path not in paths:
                    continue  # nobody has said that this file belongs to the model
                problems.append(f"{path}: not a whole safetensors file ({error})")
                continue
            names = set(file.keys())
            if path not in paths and (has_draft or not all(map(_is_drafts, names))):
                continue
            problems += _index_problems(path, names, listed) if path in paths else []
            for full_name in sorted(names):
                name = without_prefix(full_name)
                has_draft = has_draft or _is_drafts(full_name)
                if name in tensors:
                    problems.append(f"{path}: {full_name} is stored a second time")
                tensors[name] = Stored(file, full_name)
        if problems:
            raise ConfigError("; ".join(problems) + ". Download the checkpoint again.")
        return tensors

    def _paths(self) -> tuple[list[Path], dict[str, str]]:
        """The model's files, and which of them the index says holds each tensor."""
        index = self.model_dir / INDEX_FILE
        if index.is_file():
            try:
                listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{index}: no readable weight_map ({error!r})") from None
            names = sorted(set(listed.values()))
            missing = [n for n in names if not (self.model_dir / n).is_file()]
            if missing:
                raise ConfigError(f"{index} names files that are not there: {', '.join(missing)}")
            return [self.model_dir / n for n in names], listed
        if (self.model_dir / SINGLE_FILE).is_file():
            return [self.model_dir / SINGLE_FILE], {}
        raise ConfigError(
            f"{self.model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. "
            f"`model` in cluster.yaml must name a folder with safetensors weights."
        )

    def _other_files(self, paths: Sequence[Path]) -> list[Path]:
        """Files beside the model's: some savers put the draft into one of its own."""
        return sorted(set(self.model_dir.glob("*.safetensors")) - set(paths))

    def _collect(self, tensors: dict[str, Stored], model: ModelConfig) -> None:
        """Fill self.weights: first codes with their tables, then what lies in other layouts."""
        rest = dict(tensors)
        for name in tensors:
            module, _, ending = name.rpartition(".")
            if model.quantisation is None:
                break
            if model.quantisation.method == "gptq" and ending == "qweight":
                tables = {k: rest.pop(f"{module}.{k}", None) for k in GPTQ_TABLES}
                self._add_gptq(f"{module}.weight", tables, model)
            elif model.quantisation.method == "fp8" and name.endswith(FP8_SCALES):
                codes = name.removesuffix(FP8_SCALES)
                if codes in rest:
                    self._add(codes, rest.pop(codes), model, rest.pop(name))
        for name, tensor in rest.items():
            self._add(name, tensor, model, None)

    def _add_gptq(self, name: str, tables: dict[str, Stored | None], model: ModelConfig) -> None:
        quantisation = model.quantisation
        assert quantisation is not None, "such codes are read where the config has them"
        codes, scales = tables.pop("qweight"), tables["scales"]
        if codes is None or scales is None:
            raise ConfigError(f"{self.model_dir}: {name}: GPTQ's scales are missing beside qweight")
        words, rows = codes.shape
        columns, group = words * CODES_IN_WORD, quantisation.block[1]
        wanted = [-(-columns // group), rows]
        if scales.shape != wanted:
            raise ConfigError(
                f"{self.model_dir}: {scales.name} is {scales.shape}, {wanted} is needed"
            )
        present = {key: table for key, table in tables.items() if table is not None}

        def add(name: str, runs: Sequence[RowRun]) -> None:
            num_rows = sum(run.length for run in runs)
            self.weights[name] = StoredWeight(
                (num_rows, columns), codes.dtype, tuple(runs), quantisation, present
            )

        if not self._add_packed(name, codes, rows, model, add):
            add(name, [RowRun(0, rows, codes)])

    def _add(self, name: str, tensor: Stored, model: ModelConfig, scales: Stored | None) -> None:
        """The weights that a tensor of the files holds."""
        shape, dtype, tables = tensor.shape, tensor.dtype, {}
        if scales is not None:
            assert model.quantisation is not None, "scales are read where the config has them"
            self._check_scales(tensor, scales, model.quantisation)
            tables = {"scales": scales}
        quantisation = model.quantisation if scales is not None else None
        module, _, ending = name.rpartition(".")
        is_fused = len(shape) == 3 and ending in ("gate_up_proj", "down_proj")

        def add(name: str, runs: Sequence[RowRun]) -> None:
            rows, columns = sum(run.length for run in runs), shape[2 if is_fused else 1 :]
            self.weights[name] = StoredWeight(
                (rows, *columns), dtype, tuple(runs), quantisation, tables
            )

        if is_fused:
            for expert in range(shape[0]):
                parts = ("gate_proj", "up_proj") if ending == "gate_up_proj" else ("down_proj",)
                rows = shape[1] // len(parts)
                for number, part in enumerate(parts):
                    run = RowRun(0, rows, tensor, number * rows, expert)
                    add(f"{module}.{expert}.{part}.weight", [run])
        elif not self._add_packed(name, tensor, shape[0] if shape else 1, model, add):
            add(name, [RowRun(0, shape[0] if shape else 1, tensor)])

    def _add_packed(
        self,
        name: str,
        tensor: Stored,
        num_rows: int,
        model: ModelConfig,
        add: Callable[[str, Sequence[RowRun]], None],
    ) -> bool:
        """Add the weights of a packed projection, each of which takes some rows of every key head.

        num_rows: those of the tensor. False where it is no packed projection.
        """
        heads = model.gdn.num_k_heads
        for packed, parts in _packed_parts(model).items():
            if not name.endswith(f".{packed}.weight"):
                continue
            prefix, unit = name.removesuffix(f"{packed}.weight"), num_rows // heads
            for part, taken in parts.items():
                runs, first = [], 0
                for start, width in taken:
                    for head in range(heads):
                        runs.append(RowRun(first, width, tensor, head * unit + start))
                        first += width
                add(f"{prefix}{part}.weight", runs)
            return True
        return False

    def _check_scales(self, tensor: Stored, scales: Stored, quantisation: Quantisation) -> None:
        *experts, rows, columns = tensor.shape
        a, b = quantisation.block
        wanted = [*experts, -(-rows // a), -(-columns // b)]
        if scales.shape != wanted:
            raise ConfigError(
                f"{self.model_dir}: {scales.name} is {scales.shape}: {wanted} is needed for "
                f"{tensor.name} {tensor.shape} in blocks of {a} x {b} "
                f"(quantization_config.weight_block_size in config.json)"
            )


def _packed_parts(model: ModelConfig) -> dict[str, dict[str, Sequence[Span]]]:
    """Qwen3-Next's packed projections: of each key head's rows, the (start, width) that belong to
    each weight."""
    g = model.gdn
    dk, dv, values = g.head_k_dim, g.head_v_dim, g.num_v_heads // g.num_k_heads
    v = 2 * dk
    return {
        "in_proj_qkvz": {
            "in_proj_qkv": [(0, dk), (dk, dk), (v, values * dv)],
            "in_proj_z": [(v + values * dv, values * dv)],
        },
        "in_proj_ba": {"in_proj_b": [(0, values)], "in_proj_a": [(values, values)]},
    }


def without_prefix(name: str) -> str:
    """A tensor's name as every layout has it. The vision tower keeps its prefix."""
    for prefix in PREFIXES:
        if name.startswith(prefix) and not name.startswith(IGNORED_PREFIXES):
            return name[len(prefix) :]
    return name


def _is_drafts(name: str) -> bool:
    return without_prefix(name).startswith("mtp.")


def _index_problems(path: Path, names: set[str], listed: dict[str, str]) -> list[str]:
    """Where a file and the index, if there is one, name different tensors."""
    if not listed:
        return []
    wanted = {name for name, file in listed.items() if file == path.name}
    problems = []
    if missing := sorted(wanted - names):
        problems.append(f"{path}: the index says that it holds {_some(missing)}, it does not")
    if more := sorted(name for name in names - wanted if not _is_drafts(name)):
        problems.append(f"{path}: holds {_some(more)}, which the index does not name for it")
    return problems


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
