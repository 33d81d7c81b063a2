"""The files of a checkpoint -> the tensors and matrices of one rank.

    settle(model, folder) -> the model as the files have it     check_weights -> what does not fit
    load -> {name: this rank's share}

model/rules.py says what a run holds, model/checkpoint.py where the files have it. Each rank copies
only its own bytes. Every tensor of the files is used or known to be left out; an error lists all
differences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.model.checkpoint import (
    FP8_DTYPE,
    IGNORED_PREFIXES,
    INDEX_FILE,
    PLAIN_DTYPES,
    SINGLE_FILE,
    Checkpoint,
    Span,
    StoredWeight,
)
from outrider.model.config import ConfigError, ModelConfig, RunConfig
from outrider.model.rules import EMBEDDING, HEAD, Rule, rules
from outrider.parallel.formats import Fp8Matrix, Int4Matrix, UniformMatrix, quantise_fp8
from outrider.parallel.shard import rows

COMPARED_ROWS = 4096
"""Rows of embedding and head that are in memory at once while they are compared."""
MOST_NAMES = 12
"""Names that a list of an error has at most."""
QUANTISED_SUFFIXES = {
    "weight_scale_inv": "FP8 with a scale for each block",
    "weight_offset": "integers with scales and offsets, as of Ascend tools",
    "weight_packed": "packed integers, as of compressed-tensors",
    "qweight": "packed integers, as of GPTQ and AWQ",
    "absmax": "bitsandbytes",
    "weight_scale": "integers or FP8 with scales",
}
"""Ends of the names that quantisation tools put beside or in place of a weight -> the method."""


def settle(model: ModelConfig, model_dir: Path) -> ModelConfig:
    """The model as the files have it, where they say more than config.json.

    It is untied where config.json ties the head but the files hold one that differs (only then are
    tensors read), and its quantisation knows which weights are stored in codes. A folder without
    weights leaves the model as config.json has it.
    """
    has_weights = any((model_dir / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))
    if not has_weights or not (model.tie_word_embeddings or model.quantisation):
        return model
    checkpoint = Checkpoint(model_dir, model)
    if model.quantisation:
        coded = (name for name, w in checkpoint.weights.items() if w.quantisation)
        quantisation = replace(model.quantisation, stored=frozenset(coded))
        model = replace(model, quantisation=quantisation)
    if model.tie_word_embeddings and _has_own_head(checkpoint):
        model = replace(model, tie_word_embeddings=False)
    return model


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether the files hold a head that is no copy of the embedding."""
    if not {HEAD, EMBEDDING} <= checkpoint.weights.keys():
        return False
    head, table = checkpoint.weights[HEAD], checkpoint.weights[EMBEDDING]
    if head.shape != table.shape:
        return True
    starts = range(0, head.shape[0], COMPARED_ROWS)
    spans = [(a, min(a + COMPARED_ROWS, head.shape[0])) for a in starts]
    return not all(torch.equal(head.read(s).float(), table.read(s).float()) for s in spans)


def check_weights(model_dir: Path, model: ModelConfig, run: RunConfig) -> None:
    """Compare the files' headers with what the run will load; reads no tensor.

    Raises ConfigError listing every difference, or when the ranks cannot share the model.
    """
    model.check_divides(run.tensor_parallel, expert_parallel=run.expert_parallel)
    if run.uses_mtp and not model.num_mtp_layers:
        raise ConfigError(
            f"{model.source}: mtp_num_hidden_layers = {model.num_mtp_layers}: this checkpoint has "
            f"no draft. Set in cluster.yaml speculation.drafter: lookup, or "
            f"speculation.draft_tokens: 0 (now {run.draft_tokens})."
        )
    _check(Checkpoint(model_dir, model), rules(model, run), model, run)


def _check(
    checkpoint: Checkpoint, table: Sequence[Rule], model: ModelConfig, run: RunConfig
) -> None:
    """Raise one ConfigError that lists every missing, unused and wrongly shaped tensor.

    Weights in codes that cannot be read, and a draft that is missing as a whole, are one entry.
    """
    folder, weights = checkpoint.model_dir, checkpoint.weights
    needed = {piece.name: piece.shape for rule in table for piece in rule.pieces}
    present = sorted(name for name in weights if not is_ignored(name, model, run))
    if unscaled := [
        name for name in present if name in needed and _lacks_scales(weights[name], model)
    ]:
        raise ConfigError(
            f"{folder}: {_listed(unscaled)}: FP8 without the weight_scale_inv that belongs to it. "
            f"Download the checkpoint again."
        )
    if quantisation := _unreadable(weights, present, needed):
        raise ConfigError(
            f"{folder}: this is a quantised checkpoint ({quantisation}). Set `model` to the "
            f"release without quantisation: {', '.join(PLAIN_DTYPES)} can be loaded; or, where "
            f"config.json has lost its quantization_config, put that back."
        )
    missing = sorted(needed.keys() - weights.keys())
    others = [name for name in missing if not name.startswith("mtp.")]
    if others != missing and not any(name.startswith("mtp.") for name in weights):
        missing = [
            *others,
            f"every mtp.* tensor, so there is no draft, though config.json has one: set in "
            f"cluster.yaml speculation.drafter: lookup, which drafts what followed the last tokens "
            f"before, or speculation.draft_tokens: 0 "
            f"(now {'auto' if run.auto_depth else run.draft_tokens})",
        ]
    differences = {
        "missing": missing,
        "unused": [name for name in present if name not in needed],
        "shape": [
            f"{name} is {list(weights[name].shape)}, config.json says {list(shape)}"
            for name, shape in needed.items()
            if name in weights and weights[name].shape != shape
        ],
    }
    lines = [f"{title}: {_listed(names)}" for title, names in differences.items() if names]
    if lines:
        raise ConfigError(f"{folder}: weights do not fit. " + "; ".join(lines))


def _listed(names: Sequence[str]) -> str:
    """The names, or the first of them and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _unreadable(
    weights: dict[str, StoredWeight], present: Sequence[str], needed: Collection[str]
) -> str:
    """How needed weights are quantised in a way that is not read; "" where there are none."""
    codes = [
        f"{name} is {weights[name].dtype}"
        for name in present
        if name in needed and not _is_readable(weights[name])
    ]
    endings = {name.rpartition(".")[2] for name in present}
    methods = [method for suffix, method in QUANTISED_SUFFIXES.items() if suffix in endings]
    more = [f"{len(codes) - 1} more"] if len(codes) > 1 else []
    return "; ".join(methods[:1] + codes[:1] + more)


def _lacks_scales(weight: StoredWeight, model: ModelConfig) -> bool:
    """Whether a weight of an FP8 release has codes and no scales."""
    is_release = model.quantisation is not None and model.quantisation.method == "fp8"
    return is_release and weight.quantisation is None and weight.dtype == FP8_DTYPE


def _is_readable(weight: StoredWeight) -> bool:
    if weight.quantisation is None:
        return weight.dtype in PLAIN_DTYPES
    return weight.quantisation.method == "gptq" or weight.dtype == FP8_DTYPE


def is_ignored(name: str, model: ModelConfig, run: RunConfig) -> bool:
    """True for a tensor that a file may hold and this run does not load: the vision tower, a draft
    that is not used, and a second copy of the embedding under the head's name."""
    return (
        name.startswith(IGNORED_PREFIXES)
        or (name.startswith("mtp.") and not run.uses_mtp)
        or (name == HEAD and model.tie_word_embeddings)
    )


def load(
    model: ModelConfig,
    run: RunConfig,
    rank: int,
    device: torch.device,
    on_load: Callable[[int, int], None] | None = None,
) -> dict[str, UniformMatrix]:
    """This rank's share of every tensor and matrix by the name of its rule.

    on_load is called with (bytes so far, bytes of all) after each. Raises ConfigError as
    check_weights does.
    """
    table = rules(model, run)
    checkpoint = Checkpoint(Path(run.model_dir), model)
    _check(checkpoint, table, model, run)
    sizes = [rule.num_bytes(run) for rule in table]
    done, total, params = 0, sum(sizes), {}
    for rule, num_bytes in zip(table, sizes, strict=True):
        params[rule.name] = _read(rule, checkpoint, run, rank if rule.size > 1 else 0, device)
        done += num_bytes
        if on_load:
            on_load(done, total)
    return params


def _read(
    rule: Rule, checkpoint: Checkpoint, run: RunConfig, rank: int, device: torch.device
) -> UniformMatrix:
    """A copy of this rank's parts of a rule's pieces; a view would keep the whole file mapped."""
    share = {"plain": _PlainShare, "fp8": _Fp8Share, "int4": _Int4Share}[rule.form](
        rule, run, device
    )
    at = 0
    for piece in rule.local_pieces(rank):
        weight = checkpoint.weights[piece.name]
        weight.check_tables()
        row_spans, column_span = rule.spans(piece, rank)
        for span in row_spans:
            share.put(at, weight, span, column_span)
            at += span[1] - span[0]
    return share.result()


class _PlainShare:
    """A tensor that is filled piece by piece with plain numbers."""

    def __init__(self, rule: Rule, run: RunConfig, device: torch.device) -> None:
        self.rule = rule
        self.values = torch.empty(rule.matrix_shape, dtype=rule.dtype(run), device=device)

    def put(self, at: int, weight: StoredWeight, rows: Span, columns: Span) -> None:
        """Write rows and columns of a weight to the rows from `at` on."""
        is_whole = len(weight.shape) != 2 or columns == (0, weight.shape[1])
        part = weight.read_plain(rows, None if is_whole else columns)
        self.values[at : at + len(part)].copy_(part)

    def result(self) -> Tensor:
        return self.values.view(self.rule.local_shape)


class _Fp8Share:
    """An Fp8Matrix that is filled piece by piece: with the files' codes, or with codes made here
    from plain numbers. Blocks are those of the whole weight, so that all cuts give one model."""

    def __init__(self, rule: Rule, run: RunConfig, device: torch.device) -> None:
        self.rule, self.device = rule, device
        (num_rows, num_columns), (r, c) = rule.matrix_shape, rule.block
        self.values = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(num_rows // r, num_columns // c, device=device)

    def put(self, at: int, weight: StoredWeight, rows: Span, columns: Span) -> None:
        """As _PlainShare.put."""
        (r, c), num_rows = self.rule.block, rows[1] - rows[0]
        row_starts, column_starts = range(*rows, r), range(*columns, c)
        if weight.quantisation:
            codes = weight.read(rows, columns)
            scales = weight.read_scales(row_starts, column_starts)
        else:
            codes, scales = self._quantised(weight, rows, columns)
        self.values[at : at + num_rows].copy_(codes)
        self.scales[at // r : (at + num_rows) // r].copy_(scales)

    def _quantised(self, weight: StoredWeight, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        """Codes and scales of a plain weight's rows and columns, from all of the blocks in which
        they lie."""
        (r, c), blocks = self.rule.block, self.rule.base_block
        assert blocks[0] == blocks[1], f"square blocks are made, not {blocks}"
        (a, b), (d, e) = (
            (start // blocks[0] * blocks[0], min(-(-stop // blocks[0]) * blocks[0], most))
            for (start, stop), most in zip((rows, columns), weight.shape)
        )
        plain = weight.read((a, b), (d, e)).to(self.device)
        codes, scales = quantise_fp8(plain, blocks[0])
        row_blocks = (torch.arange(*rows, r, device=self.device) - a) // blocks[0]
        column_blocks = (torch.arange(*columns, c, device=self.device) - d) // blocks[0]
        codes = codes[rows[0] - a : rows[1] - a, columns[0] - d : columns[1] - d]
        return codes, scales[row_blocks][:, column_blocks]

    def result(self) -> Fp8Matrix:
        values = self.values.view(self.rule.local_shape)
        r, c = self.rule.block
        *experts, num_rows, num_columns = values.shape
        return Fp8Matrix(values, self.scales.view(*experts, num_rows // r, num_columns // c))


class _Int4Share:
    """An Int4Matrix that is filled piece by piece with the files' codes."""

    def __init__(self, rule: Rule, run: RunConfig, device: torch.device) -> None:
        self.rule = rule
        (num_rows, num_columns), (_, c) = rule.matrix_shape, rule.block
        if num_columns % 2:
            raise ConfigError(
                f"{rule.name}: a rank's share has {num_columns} columns, an odd number, of weights "
                f"with 4 bits: set parallel.tensor_parallel in cluster.yaml to a smaller number"
            )
        self.codes = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=device)
        self.scales = torch.empty(num_rows, num_columns // c, device=device)

    def put(self, at: int, weight: StoredWeight, rows: Span, columns: Span) -> None:
        """As _PlainShare.put."""
        codes = weight.read_int4(rows, columns)
        scales = weight.read_scales(range(*rows), range(*columns, self.rule.block[1]))
        self.codes[at : at + len(codes)].copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        self.scales[at : at + len(codes)].copy_(scales)

    def result(self) -> Int4Matrix:
        codes = self.codes.view(*self.rule.local_shape[:-1], -1)
        return Int4Matrix(codes, self.scales.view(*codes.shape[:-1], -1))


def head_share(table: Tensor, rank: int, size: int) -> Tensor:
    """This rank's rows of a tied head: a view [V / size, H] of the embedding table [V, H]."""
    return rows(table.shape[0]).take(table, rank, size)
