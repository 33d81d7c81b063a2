"""The groups of tensors that operations take and return together.

    Rows, PickRows: where rows lie      GdnLayer: a delta net      SlotMemory, GatheredSlots: slots
    SlotSampling, SamplingFeatures: how tokens are picked      ExpertLayer: a mixture of experts
    PartialSum: a part of a sum

parallel/ops.py says what is done with them. B slots of a batch | S slots in memory | R rows a slot
X most rows a pass leaves | N pages in a block table | H hidden | v ids of this rank | k, h key and
value heads of a delta net, Dk, Dv wide | C conv channels | W conv kernel | E experts, e of them on
this rank | i, s this rank's columns of an expert, of the shared one
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.parallel.formats import Matrix, UniformMatrix
from outrider.parallel.group import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one forward pass: R for each of B slots, of which the first `counts` are real."""

    slots: Tensor
    """[B] int64: indices into the memory that is held by slot."""
    positions: Tensor
    """[B, R] int64: position of each row in its request."""
    lengths: Tensor
    """[B] int64: keys of the slot that are valid once this pass has written its own."""
    block_table: Tensor
    """[B, N] int64: pages of the slot, in the order of its positions."""
    kv_index: Tensor
    """[B, R] int64: page * page_tokens + offset; 0, in the null page, for padding rows."""
    counts: Tensor
    """[B] int64: real rows of the slot. A verify pass does not count the row before the drafts."""
    cos: Tensor
    """[B, R, 1, rotary] float32: cosine of the rotary angles of each row's position."""
    sin: Tensor
    """[B, R, 1, rotary] float32: their sine."""
    prefill: bool = False
    """Whether every real row is kept. Then states advance at once, and no row waits for it."""
    fold: Tensor | None = None
    """[B] int64: rows of the last pass to fold into the delta net states. A verify pass has it."""
    max_fold: int = 0
    """No slot has more rows to fold than this."""
    host_lengths: list[int] | None = None
    """[B] positions[:, -1] + 1, for devices with the capability of this name (device.py). Where the
    pass is captured, this list stays and its values change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnLayer:
    """This rank's share of one gated delta net layer: what an operation reads, and its memory."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_weight: Tensor
    """[W, C], C = [q | k | v] channels. The last tap multiplies the current row."""
    rate: Tensor
    """[h] float32: -exp(A_log)."""
    dt_bias: Tensor
    """[h]"""
    norm_weight: Tensor
    """[Dv] float32"""
    eps: float
    gate: str
    """Activation of z: "silu" or "sigmoid"."""
    conv: Tensor
    """[S, W-1+X, C]: rows before the convolution. The W-1 rows that precede the next pass start at
    index `fold` of the slot."""
    state: Tensor
    """[S, h, Dk, Dv] float32"""
    factors: Tensor
    """[S, X, k Dk + h Dv + h] float32: k, delta and g of the rows that wait to be folded."""
    coarse_state: bool = False
    """Whether an operation may round the state to bfloat16 while it computes. The memory is float32
    all the same. Where this is False, only operations that keep float32 are used."""
    rows_in_turn: bool = False
    """Whether a verify pass runs and folds one row after another. Float32 sums then have the same
    order whichever rows came in one pass, so a row's result does not depend on it."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of the sections [q k v | z | b | a] of the layer's projection."""
        values = self.num_v_heads * self.head_v_dim
        channels = 2 * self.num_k_heads * self.head_k_dim + values
        return channels, values, self.num_v_heads, self.num_v_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """This rank's share of a mixture of experts: the columns i of all E experts (then e = E), or e
    whole experts from `first_expert` on; and the columns s of the shared expert."""

    router: Tensor
    """[E, H]: a row's score for each expert; the same on every rank."""
    top_k: int
    """Experts of a row."""
    normalised: bool
    """Whether the weights of a row's experts are scaled to a sum of 1."""
    first_expert: int
    gate_up: UniformMatrix
    """[e, 2i, H] = [gate; up] of each expert."""
    down: UniformMatrix
    """[e, H, i]"""
    shared_gate_up: Matrix
    """[2s, H] = [gate; up]"""
    shared_down: Matrix
    """[H, s]"""
    shared_gate: Tensor
    """[1, H]: the shared expert's result is multiplied by the sigmoid of this product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMemory:
    """Where the request of each slot stands, by slot [S]."""

    length: Tensor
    """[S] int64: rows that the caches hold."""
    last: Tensor
    """[S] int64: the last token, which has no row yet."""
    kept: Tensor
    """[S] int64: rows that the last pass kept."""
    fold: Tensor
    """[S] int64: how many of them wait to be folded into the delta net states."""
    fresh: Tensor
    """[S, X] int64: the tokens that followed the rows of the last pass."""
    hidden: Tensor
    """[S, X, H]: hiddens of those rows after the final norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredSlots:
    """SlotMemory of the slots of one batch, by their index in the batch [B]."""

    length: Tensor
    """[B] int64"""
    last: Tensor
    """[B] int64"""
    kept: Tensor
    """[B] int64"""
    fold: Tensor
    """[B] int64"""
    start: Tensor
    """[B] int64: length - kept, the position of the last pass's first row."""
    fresh: Tensor
    """[B, width] int64"""
    hidden: Tensor
    """[B, width, H]"""
    table: Tensor
    """[B, N] int64: pages of each slot."""
    noise: Tensor | None = None
    """[B, K+1, v] float32: PickRows.noise of the iteration's passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFeatures:
    """What the rows of a pass need beside the best logit. What is not named here is not done."""

    drawn: bool = False
    """Some row has a temperature."""
    filtered: bool = False
    """Some row has top_k, top_p or min_p."""
    edited: bool = False
    """Some row has its logits edited."""
    masked: bool = False
    """Some row has a grammar, which allows some of the ids only."""
    logprobs: int | None = None
    """So many likeliest ids of some row are reported with their log probabilities, beside the token
    itself; None where no row reports any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSampling:
    """How the request of each slot picks its tokens, by slot [S]."""

    seed: Tensor
    """[S] int64"""
    drawn: Tensor
    """[S] bool: whether a token is drawn; otherwise it is the likeliest one."""
    scale: Tensor
    """[S] float32: what logits are multiplied by, 1 / temperature; 1 where nothing is drawn."""
    top_k: Tensor
    """[S] int64; 0 for all."""
    top_p: Tensor
    """[S] float32; 1 for all."""
    log_min_p: Tensor
    """[S] float32: ln(min_p); -inf for all."""
    reported: Tensor
    """[S] bool: whether log probabilities are reported."""
    edited: Tensor
    """[S] bool: whether the slot has any edits. Where it has none, the values below are stale."""
    repetition: Tensor
    """[S] float32, as the penalties of its name in a request; so are the next two."""
    frequency: Tensor
    presence: Tensor
    banned_until: Tensor
    """[S] int64: tokens at positions below this are none of the banned ids."""
    history: Tensor
    """[S, v] int32: for each id of this rank, whether it is in the prompt, whether it is banned,
    and how often the answer holds it (parallel/sampling.py: IN_PROMPT, BANNED, COUNT_SHIFT)."""
    bias: Tensor
    """[S, v] float32: what is added to the logits."""
    masked: Tensor
    """[S] bool: whether the slot has a grammar. Where it has none, its masks are stale."""
    masks: Tensor
    """[S, X, ceil(v / 32)] int32: the ids of this rank that may follow in each row of the target,
    one bit an id, the lowest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PickRows:
    """The rows whose tokens are picked, R of each of B slots: row r makes the token at position
    last + 1 + shift + r."""

    slots: Tensor
    """[B] int64"""
    last: Tensor
    """[B] int64: position of the last token that SlotSampling.history counts."""
    shift: int = 0
    drafts: Tensor | None = None
    """[B, J] int64: the tokens after that, of which row r has seen the first shift + r. None where
    no row has seen one, or where no logits are edited."""
    noise: Tensor | None = None
    """[B, J, v] float32: the noise of the tokens after that, of which row r adds index shift + r;
    None where the operation makes it (Ops.noise_ahead)."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One rank's part of a sum over the ranks of `group`; Ops.sum_add_rms_norm completes it."""

    values: Tensor
    """This rank's part. All ranks' parts have one shape."""
    group: Group
    sent: bool = False
    """Whether the other ranks have been sent `values`, so that completing the sum only receives."""
