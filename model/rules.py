"""Every tensor that one rank of a run holds: its parts in the checkpoint, its shape, its format.

    rules(model, run) -> [Rule]      Rule.local_shape, num_bytes -> model/plan.py, model/weights.py

Matrices that read the same input lie below each other in one matrix, so that one product makes all
their results; no tensor is put together after it was loaded. Names of pieces are those of the
checkpoint without prefix, as model/checkpoint.py gives them in every layout of the files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from outrider.model.config import ExpertConfig, ModelConfig, RunConfig
from outrider.parallel.formats import FP8_BLOCK
from outrider.parallel.shard import WHOLE, Cut, Part, columns, rows

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
Form = Literal["plain", "fp8", "int4"]
"""How a matrix is stored in memory (parallel/formats.py)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One weight of the checkpoint, and which part of it each rank takes."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One tensor or matrix in memory: the ranks' shares of its pieces, one below the other."""

    name: str
    pieces: tuple[Piece, ...]
    size: int
    """Ranks that share it."""
    part: str
    """The part of the model that it is of, for the plan."""
    form: Form = "plain"
    base_block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
    """Rows and columns that share a scale before any cut."""
    float32: bool = False
    copies: int = 1
    """How often a rank holds it: a norm that heads share is stored once for each head."""
    num_experts: int = 0
    """Experts whose pieces these are, one expert after another; 0: none, no dim in front."""
    whole_experts: bool = False
    """Whether a rank takes all of some experts, instead of a cut of each."""

    def local_pieces(self, rank: int) -> Sequence[Piece]:
        """The pieces that a rank takes a part of."""
        if not self.whole_experts:
            return self.pieces
        count = len(self.pieces) // self.size
        return self.pieces[rank * count : (rank + 1) * count]

    def spans(self, piece: Piece, rank: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """The ranges of rows, and the range of columns, of a piece that a rank takes.

        A tensor of one dim has no columns: then that range is empty.
        """
        num_rows, num_columns = (*piece.shape, 0)[:2]
        if not piece.cut.parts:
            return [(0, num_rows)], (0, num_columns)
        spans = piece.cut.spans(rank, self.size)
        if piece.cut.dim == 0:
            return spans, (0, num_columns)
        return [(0, num_rows)], spans[0]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of one rank's share, with the experts' rows below each other."""
        pieces = self.local_pieces(0)
        num_rows = sum(b - a for piece in pieces for a, b in self.spans(piece, 0)[0])
        first = pieces[0]
        start, stop = self.spans(first, 0)[1]
        return (num_rows, stop - start, *first.shape[2:])[: len(first.shape)]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one rank's share: [.., rows, columns], experts first."""
        num_rows, *rest = self.matrix_shape
        if not self.num_experts:
            return (num_rows, *rest)
        experts = self.num_experts // self.size if self.whole_experts else self.num_experts
        return (experts, num_rows // experts, *rest)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale in memory. A block that a cut divides becomes several
        smaller ones, on all ranks alike."""
        block_rows, block_columns = self.base_block
        for piece in self.pieces:
            o, k = piece.shape
            by_rows = piece.cut.dim == 0
            block_rows = math.gcd(block_rows, piece.cut.granule(o, self.size) if by_rows else o)
            block_columns = math.gcd(
                block_columns, k if by_rows else piece.cut.granule(k, self.size)
            )
        return block_rows, block_columns

    def num_bytes(self, run: RunConfig) -> int:
        """Bytes of one rank's share, in all its copies."""
        numbers = math.prod(self.matrix_shape)
        if self.form == "plain":
            return numbers * self.dtype(run).itemsize * self.copies
        block_rows, block_columns = self.block
        scales = numbers // (block_rows * block_columns) * torch.float32.itemsize
        return (numbers if self.form == "fp8" else numbers // 2) + scales

    def dtype(self, run: RunConfig) -> torch.dtype:
        """dtype in memory: the run's, or float32 where the rule says so."""
        return torch.float32 if self.float32 else getattr(torch, run.dtype)


def rules(model: ModelConfig, run: RunConfig) -> list[Rule]:
    """Every tensor that one rank of this run holds, in the order in which they are loaded."""
    target = _Table(model, run, run.tensor_parallel, ("target layers", "target experts"))
    h, v = model.hidden_size, model.vocab_size
    target.add(EMBEDDING, (v, h), part="embedding")
    for i, kind in enumerate(model.layer_types):
        prefix = f"layers.{i}."
        target.block(prefix, model.experts if i in model.expert_layers else None)
        if kind == "full_attention":
            target.attention(f"{prefix}self_attn.")
        else:
            target.delta_net(f"{prefix}linear_attn.")
    target.add("norm.weight", (h,), float32=True)
    if not model.tie_word_embeddings:
        target.add(HEAD, (v, h), rows(v), part="head")
    if not run.uses_mtp:
        return target.rules
    draft = _Table(model, run, run.draft_size, ("draft body", "draft experts"))
    draft.add("mtp.fc.weight", (h, 2 * h))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draft.add(f"mtp.{name}.weight", (h,), float32=True)
    draft.block("mtp.layers.0.", model.experts)
    draft.attention("mtp.layers.0.self_attn.")
    if model.mtp_dedicated_embeddings:
        draft.add("mtp.embed_tokens.weight", (v, h), part="draft embedding")
        if not model.tie_word_embeddings:
            target.add("mtp.lm_head.weight", (v, h), rows(v), part="draft head")
    return [*target.rules, *draft.rules]


class _Table:
    """The rules of one part of the model, shared by `size` ranks, while they are written down."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, size: int, parts: tuple[str, str]
    ) -> None:
        """parts: what the plan calls the whole, and its experts."""
        self.model, self.run, self.size = model, run, size
        self.part, self.expert_part = parts
        self.rules: list[Rule] = []

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = WHOLE,
        *,
        part: str | None = None,
        float32: bool = False,
        copies: int = 1,
    ) -> None:
        """A tensor that is stored as plain numbers and is one weight of the checkpoint."""
        self.rules.append(
            Rule(
                name=name,
                pieces=(Piece(name, shape, cut),),
                size=self.size,
                part=part or self.part,
                float32=float32,
                copies=copies,
            )
        )

    def matrix(self, name: str, pieces: Sequence[Piece], num_experts: int = 0) -> None:
        """A matrix that may be stored in codes, as its pieces are."""
        whole = num_experts > 0 and self.run.expert_parallel and self.size > 1
        quantisation = self.model.quantisation
        self.rules.append(
            Rule(
                name=name,
                pieces=tuple(pieces),
                size=self.size,
                part=self.expert_part if num_experts else self.part,
                form=self._form(pieces),
                base_block=quantisation.block if quantisation else (FP8_BLOCK, FP8_BLOCK),
                num_experts=num_experts,
                whole_experts=whole,
            )
        )

    def _form(self, pieces: Sequence[Piece]) -> Form:
        quantisation = self.model.quantisation
        if quantisation and all(quantisation.covers(piece.name) for piece in pieces):
            return "fp8" if quantisation.method == "fp8" else "int4"
        return "fp8" if self.run.quantization == "fp8" else "plain"

    def block(self, prefix: str, experts: ExpertConfig | None) -> None:
        h = self.model.hidden_size
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add(f"{prefix}{name}.weight", (h,), float32=True)
        if experts is None:
            self._mlp(f"{prefix}mlp.", self.model.intermediate_size)
            return
        mlp, num_experts = f"{prefix}mlp.", experts.num_experts
        self.add(f"{mlp}gate.weight", (num_experts, h))
        whole = self.run.expert_parallel
        gate_up: list[Piece] = []
        down: list[Piece] = []
        for expert in range(num_experts):
            g, d = _mlp_pieces(f"{mlp}experts.{expert}.", experts.width, h, whole=whole)
            gate_up += g
            down += d
        self.matrix(f"{mlp}experts.gate_up_proj", gate_up, num_experts)
        self.matrix(f"{mlp}experts.down_proj", down, num_experts)
        self._mlp(f"{mlp}shared_expert.", experts.shared_width)
        self.add(f"{mlp}shared_expert_gate.weight", (1, h))

    def _mlp(self, prefix: str, width: int) -> None:
        gate_up, down = _mlp_pieces(prefix, width, self.model.hidden_size)
        self.matrix(f"{prefix}gate_up_proj.weight", gate_up)
        self.matrix(f"{prefix}down_proj.weight", down)

    def attention(self, prefix: str) -> None:
        h, a, size = self.model.hidden_size, self.model.attention, self.size
        d, n, m = a.head_dim, a.num_heads, a.num_kv_heads
        kv_rows = rows(m * d, m)
        query, gate = (Cut(0, (Part(2 * n * d, n, taken=(at, d)),)) for at in (0, d))
        q_proj = f"{prefix}q_proj.weight"
        self.matrix(
            f"{prefix}in_proj.weight",
            [
                Piece(q_proj, (2 * n * d, h), query),
                Piece(f"{prefix}k_proj.weight", (m * d, h), kv_rows),
                Piece(f"{prefix}v_proj.weight", (m * d, h), kv_rows),
                Piece(q_proj, (2 * n * d, h), gate),
            ],
        )
        self.matrix(
            f"{prefix}o_proj.weight",
            [Piece(f"{prefix}o_proj.weight", (h, n * d), columns(n * d, n))],
        )
        for name, copies in (("q_norm", n // size), ("k_norm", a.kv_heads_of(size))):
            self.add(f"{prefix}{name}.weight", (d,), float32=True, copies=copies)

    def delta_net(self, prefix: str) -> None:
        h, g = self.model.hidden_size, self.model.gdn
        kd, vd, keys, heads = g.key_dim, g.value_dim, g.num_k_heads, g.num_v_heads
        channels = 2 * kd + vd
        qkv = Cut(0, (Part(kd, keys), Part(kd, keys), Part(vd, heads)))
        by_head = rows(heads)
        wide = [
            Piece(f"{prefix}in_proj_qkv.weight", (channels, h), qkv),
            Piece(f"{prefix}in_proj_z.weight", (vd, h), rows(vd, heads)),
        ]
        narrow = [Piece(f"{prefix}in_proj_{name}.weight", (heads, h), by_head) for name in "ba"]
        if self._form(wide) == "plain":
            self.matrix(f"{prefix}in_proj.weight", [*wide, *narrow])
        else:  # releases keep the few rows of b and a plain
            self.matrix(f"{prefix}in_proj.weight", wide)
            self.rules.append(
                Rule(
                    name=f"{prefix}in_proj_ba.weight",
                    pieces=tuple(narrow),
                    size=self.size,
                    part=self.part,
                )
            )
        self.add(f"{prefix}conv1d.weight", (channels, 1, g.conv_kernel), qkv)
        self.add(f"{prefix}A_log", (heads,), by_head, float32=True)
        self.add(f"{prefix}dt_bias", (heads,), by_head)
        self.add(f"{prefix}norm.weight", (g.head_v_dim,), float32=True)
        self.matrix(
            f"{prefix}out_proj.weight",
            [Piece(f"{prefix}out_proj.weight", (h, vd), columns(vd, heads))],
        )


def _mlp_pieces(
    prefix: str, width: int, h: int, *, whole: bool = False
) -> tuple[list[Piece], list[Piece]]:
    """The pieces of [gate; up] and of down, cut by the MLP's columns or not at all."""
    by_rows, by_columns = (WHOLE, WHOLE) if whole else (rows(width), columns(width))
    gate, up, down = (f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down"))
    return (
        [Piece(gate, (width, h), by_rows), Piece(up, (width, h), by_rows)],
        [Piece(down, (h, width), by_columns)],
    )
