"""A device as the layers see it: where tensors live, what computes on them, who shares them.

    devices.open_device("cpu", 0, group) -> Device(torch_device, ops, tp, capabilities)

`Ops` is the contract of a backend; backends/cpu.py is its definition in plain torch.
Shapes: B slots | R rows a slot | H hidden | n, m query and kv heads | d head width
        k, h key and value heads (GDN) | Dk, Dv their widths | C conv channels | W conv kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.parallel.group import Group, alone


class DeviceError(ValueError):
    """The device that was asked for is not here, or cannot run this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnLayer:
    """This rank's share of one gated delta net layer: what an operation reads, and its memory."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_weight: Tensor
    """[W, C], C = [q | k | v] channels; the last tap is the current row's"""
    rate: Tensor
    """[h] float32: -exp(A_log)"""
    dt_bias: Tensor
    """[h]"""
    norm_weight: Tensor
    """[Dv] float32"""
    eps: float
    gate: str
    """Activation of z: "silu" or "sigmoid"."""
    conv: Tensor
    """[S, W-1+X, C]: pre-conv rows; the W-1 before the next one start at `kept`"""
    state: Tensor
    """[S, h, Dk, Dv] float32"""
    factors: Tensor
    """[S, X, k Dk + h Dv + h] float32: k, delta and g of the rows that wait to be folded"""
    coarse_state: bool = False
    """An operation may round the state to bfloat16 on its way; its memory is float32 all the same.
    False: only operations that keep float32 are used."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of the projection's sections [q k v | z | b | a]."""
        values = self.num_v_heads * self.head_v_dim
        channels = 2 * self.num_k_heads * self.head_k_dim + values
        return channels, values, self.num_v_heads, self.num_v_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMemory:
    """Where the slots stand, by slot [S]; X rows a pass leaves at most."""

    length: Tensor
    """[S] int64: rows the caches hold"""
    last: Tensor
    """[S] int64: the last token, not yet a row"""
    kept: Tensor
    """[S] int64: rows that the last pass kept"""
    fold: Tensor
    """[S] int64: how many of them wait to be folded into the GDN states"""
    fresh: Tensor
    """[S, X] int64: the tokens that followed the rows of the last pass"""
    hidden: Tensor
    """[S, X, H]: the rows' hiddens after the final norm"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredSlots:
    """Rows of SlotMemory, by place in the batch [B]."""

    length: Tensor
    last: Tensor
    kept: Tensor
    fold: Tensor
    start: Tensor
    """[B] int64 each; start: length - kept, the position of the last pass's first row"""
    fresh: Tensor
    """[B, width] int64"""
    hidden: Tensor
    """[B, width, H]"""
    table: Tensor
    """[B, N] int64: pages"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do, as data: code asks for these, never for a chip."""

    graphs: bool = False
    """An iteration can be captured once and replayed."""
    run_ahead: int = 0
    """Iterations that may be enqueued before the results of an earlier one are read."""
    host_lengths: bool = False
    """Attention is told on the host how far each slot's rows reach (`reach` of the operations)."""
    max_rows: int | None = None
    """Most rows a slot may have in a verify pass, K+1."""
    page_multiple: int = 1
    """What the tokens of a page must be a multiple of."""

    @property
    def prompt_graphs(self) -> bool:
        """Prompt chunks can be captured: nothing about them is decided on the host."""
        return self.graphs and not self.host_lengths

    @property
    def sampled_graphs(self) -> bool:
        """Iterations with slots that need logits are captured too, by how many they are."""
        return self.prompt_graphs


class Ops(Protocol):
    """Every operation of the model. Weights are [out, in]; norms compute in float32."""

    def place_rows(
        self,
        first: Tensor,
        counts: Tensor,
        block_table: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_rows: int,
        page_tokens: int,
        shift: int = 0,
        more: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Where R rows from position first + shift of each slot lie; counts + more of them real.

        first, counts [B] int64; block_table [B, N]; cos, sin [positions, rotary] float32.
        -> positions [B, R], kept inside the table; index [B, R] = page * page_tokens + offset, 0 in
        the null page for padding rows; cos and sin of the positions [B, R, 1, rotary]; lengths [B],
        the position after the last real row.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        ...

    def linear_part(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        """linear, of whose result sum_add_rms_norm takes the sum over the group's ranks.

        That call is the next over the group, and a backend may already send what it will need.
        """
        ...

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / rms(x) * scale over the last dim, in x's dtype; scale [d] or [n, d], float32."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """-> (rms_norm(x + residual), x + residual)."""
        ...

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, scale: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm of the sum of `part` over the group's ranks.

        The norm is good until the next such call. A rank may keep only a share of the stream's
        rows: the second result is the `residual` of a next call of the same shape, no more.
        """
        ...

    def embed_rms_norm(
        self, tokens: Tensor, table: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, R] int64, table [V, H] -> (rms_norm of their rows, the rows [B, R, H])."""
        ...

    def mtp_input(
        self,
        tokens: Tensor,
        table: Tensor,
        hidden: Tensor,
        token_scale: Tensor,
        hidden_scale: Tensor,
        eps: float,
    ) -> Tensor:
        """tokens [B, R], table [V, H], hidden [B, R, H] -> [B, R, 2H]: the norm of the tokens' rows
        by token_scale, then the norm of hidden by hidden_scale."""
        ...

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        """GDN output norm: weight * x / rms(x) * act(z), in z's dtype; weight float32."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2i] = [gate | up] -> silu(gate) * up [..., i]."""
        ...

    def linear_swiglu(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """x [..., in], gate_up [2i, in] = [gate; up] -> swiglu(linear(x, gate_up)) [..., i]."""
        ...

    def qk_norm_rope_write(
        self,
        qk: Tensor,
        v: Tensor,
        scale: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Norm q and k by head, rotate them, write k and v to their pages; -> q [B, R, n, d].

        qk [B, R, n + m, d]; v [B, R, m, d]; scale [n + m, d] float32; cos, sin [B, R, 1, 2r]
        float32 turn the first 2r of d, NeoX halves; pages [P, page, m, d]; index [B, R] =
        page * page_tokens + offset.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        positions: Tensor,
        lengths: Tensor,
        gate: Tensor,
        reach: list[int] | None = None,
    ) -> Tensor:
        """Causal attention over pages, scale d^-0.5, softmax in float32; times sigmoid(gate).

        q [B, R, n, d]; pages [P, page, m, d]; block_table [B, N]; positions [B, R]; lengths [B];
        gate [B, R, n * d]. A row sees the keys at positions up to its own and below its slot's
        length; whatever lies elsewhere in the pages, NaN included, has no influence.
        reach [B], for devices with `host_lengths`: positions[:, -1] + 1 as the host knows it, in a
        list that stays where the pass is captured. -> [B, R, n * d].
        """
        ...

    def gdn_verify(
        self, proj: Tensor, layer: GdnLayer, slots: Tensor, kept: Tensor, waiting: int
    ) -> Tensor:
        """GDN between its projections, for rows of which only a prefix may be kept.

        proj [B, R, C + h Dv + 2 h] = [q k v | z | b | a]; slots, kept [B] int64; waiting: factor
        rows to look at (0: none waits). Folds the first kept[b] of them into the state, runs the R
        rows, leaves their factors and their conv window in `layer`. -> y [B, R, h Dv].
        """
        ...

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
        """As gdn_verify for prompt rows, of which the first counts[b] [B] are kept at once.

        Nothing waits to be folded before or after; `kept` of the slots is 0.
        """
        ...

    def causal_conv(self, window: Tensor, weight: Tensor, rows: int) -> Tensor:
        """Depthwise conv and SiLU: window [B, W-1+rows, C], weight [W, C] -> [B, rows, C]."""
        ...

    def gdn_gates(
        self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """a, b [B, R, h]; rate [h] = -exp(A_log), float32 -> g = rate * softplus(a + dt_bias),
        a log decay at most 0, and beta = sigmoid(b), both float32."""
        ...

    def gdn_qk_norm(self, qk: Tensor) -> Tensor:
        """qk [B, R, 2, k, Dk] -> each vector at length 1 (1e-6 inside the root), float32."""
        ...

    def gdn_rows(
        self, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule over R rows from `state`, in chunk form.

        qk [B, R, 2, k, Dk]; v [B, R, h, Dv]; g, beta [B, R, h]; state [B, h, Dk, Dv]; float32.
        -> o [B, R, h, Dv], read with q * Dk^-0.5, and delta [B, R, h, Dv]. With k and g, delta is
        what a row adds to the state; row t's depends on rows up to t only, so any prefix can be
        folded later. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
        """
        ...

    def gdn_fold(self, state: Tensor, k: Tensor, delta: Tensor, g: Tensor, kept: Tensor) -> Tensor:
        """Advance `state` by the first `kept` [B] rows of their factors; 0 rows leave it as it is.

        S_m = e^{c_m} S_0 + sum_{t <= m} e^{c_m - c_t} k_t delta_t^T, with c the running sum of g.
        """
        ...

    def head_pair(self, hidden: Tensor, head: Tensor, first_id: int) -> Tensor:
        """hidden [N, H], head [v, H] of the ids from first_id -> the best of each row [N, 2] int32:
        the float32 bits of its logit, and its id, the smallest that has it."""
        ...

    def head_pair_fp8(self, hidden: Tensor, head: Tensor, scales: Tensor, first_id: int) -> Tensor:
        """head_pair of head [v, H] float8_e4m3fn times scales [v] float32."""
        ...

    def head_ids(
        self, hidden: Tensor, head: Tensor, scales: Tensor | None, first_id: int, group: Group
    ) -> Tensor:
        """The id [N] int64 of each row's best logit over the group's shares of the head.

        hidden, head, first_id as head_pair; scales [v]: as head_pair_fp8; None: head_pair.
        """
        ...

    def gather_slots(
        self, slots: Tensor, memory: SlotMemory, table: Tensor, width: int
    ) -> GatheredSlots:
        """What the slots [B] int64 remember; table [S, N]: all block tables, or their first pages.

        Of fresh and hidden the first `width` rows.
        """
        ...

    def accept_commit(
        self,
        slots: Tensor,
        drafts: Tensor,
        targets: Tensor,
        limits: Tensor,
        hidden: Tensor,
        memory: SlotMemory,
    ) -> Tensor:
        """Keep the drafts that equal the target's tokens, and advance the slots by what is kept.

        slots, limits [B] int64 (a slot's own K); drafts [B, K], targets [B, R] int64, R = K+1;
        hidden [B, R, H]. -> kept [B] int64 = 1 + length of the agreeing prefix, 1..limit+1. No
        probability is involved. Slots are distinct, except for the last one of the memory: it is
        padding, which a batch may hold several times and nobody reads. Its length stays 0, so that
        its rows never attend to more keys than their own.
        """
        ...

    def choose_pair(self, gathered: Tensor) -> Tensor:
        """head_pair of every rank [size, N, 2] -> [N] int64: the best id, ties to the smallest."""
        ...


Capture = Callable[[Callable[[], Any], Any], tuple[Callable[[], None], Any, Any]]
"""(work, memory pool or None) -> (replay, what the work returned, the pool)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Results on their way to the host."""

    copies: list[Tensor]
    event: Any
    """One of the device's, None on the CPU."""

    def wait(self) -> list[Tensor]:
        """The results as CPU tensors, once their event has passed."""
        if self.event is not None:
            self.event.synchronize()
        return self.copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What every layer is built with."""

    torch_device: torch.device
    ops: Ops
    tp: Group
    capabilities: Capabilities = Capabilities()
    capture: Capture | None = None
    """How work is captured where that is not as on CUDA (parallel/graph.py)."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Start copying results to the host, behind what is enqueued now; nothing waits here."""
        if self.torch_device.type == "cpu":
            return Fetched(list(tensors), None)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.get_device_module(self.torch_device).Event()
        event.record()
        return Fetched(copies, event)

    def send(self, values: Tensor) -> Tensor:
        """A CPU tensor on the device, behind what is enqueued now; nothing waits here."""
        if self.torch_device.type == "cpu":
            return values
        return values.pin_memory().to(self.torch_device, non_blocking=True)

    def synchronise(self) -> None:
        """Wait until all that is enqueued is done. For measurements: no iteration needs it."""
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def local(self) -> Device:
        """The same device with a group of one: for modules that every rank holds whole."""
        return replace(self, tp=alone())
