"""NVIDIA GPUs: Triton kernels for what is not a plain matrix product, and peer collectives.

    open_cuda(index, group) -> Device; CudaOps overrides CpuOps, which stays the definition

Prompts' delta rule is flash-linear-attention's where that is installed. Small sums and gathers go
through symmetric memory (one shot, no multicast), those of prompts in two shots, the rest by NCCL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.parallel.backends.cpu import CpuOps
from outrider.parallel.device import (
    Capabilities,
    Device,
    DeviceError,
    GatheredSlots,
    GdnLayer,
    SlotMemory,
)
from outrider.parallel.group import Group

log = logging.getLogger(__name__)
MIN_CAPABILITY = (8, 0)
MAX_ARRIVALS = 1 << 14


class CudaOps(CpuOps):
    """The CUDA backend; see parallel.device.Ops for shapes and meaning."""

    def __init__(self, device: torch.device) -> None:
        from outrider.parallel.kernels import (
            attention,
            gdn,
            matmul,
            peer,
            place,
            prompt,
            rows,
            slots,
            two_shot,
        )

        self._rows, self._gdn, self._attention, self._place = rows, gdn, attention, place
        self._matmul, self._peer, self._slots, self._prompt = matmul, peer, slots, prompt
        self._two_shot, self._chunk_rule = two_shot, _chunk_rule()
        self._sent: Tensor | None = None
        """The part of a sum that its product has sent to the other ranks"""
        self._arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)

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
        return self._place.place_rows(
            first, counts, block_table, cos, sin, num_rows, page_tokens, shift, more
        )

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._few(x, self._matmul.HELD_ROWS):
            return self._matmul.few_rows(x, weight, self._arrivals)
        return F.linear(x, weight)

    def linear_part(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        if group.mail is None or not self._matmul.can_send(x, weight, group.mail):
            return self.linear(x, weight)
        part = self._matmul.few_rows_sent(x, weight, group.mail)
        self._sent = part
        return part

    def linear_swiglu(self, x: Tensor, gate_up: Tensor) -> Tensor:
        if self._few(x):
            return self._matmul.few_rows_swiglu(x, gate_up, self._arrivals)
        return self.swiglu(F.linear(x, gate_up))

    def _few(self, x: Tensor, most: int = 64) -> bool:
        return x.numel() // x.shape[-1] <= most and x.dtype == torch.bfloat16

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return self._rows.rms_norm(x, scale, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._rows.add_rms_norm(x, residual, scale, eps)

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, scale: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        if group.mail is not None and self._peer.fits(part, group.mail):
            sent, self._sent = part is self._sent, None
            return self._peer.sum_add_rms_norm(part, residual, scale, eps, group.mail, sent=sent)
        if group.hall is not None and self._two_shot.fits(part, group.hall):
            return self._two_shot.sum_add_rms_norm(part, residual, scale, eps, group.hall)
        return self.add_rms_norm(group.all_reduce(part), residual, scale, eps)

    def embed_rms_norm(
        self, tokens: Tensor, table: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._slots.embed_rms_norm(tokens, table, scale, eps)

    def mtp_input(
        self,
        tokens: Tensor,
        table: Tensor,
        hidden: Tensor,
        token_scale: Tensor,
        hidden_scale: Tensor,
        eps: float,
    ) -> Tensor:
        return self._slots.mtp_input(tokens, table, hidden, token_scale, hidden_scale, eps)

    def gather_slots(
        self, slots: Tensor, memory: SlotMemory, table: Tensor, width: int
    ) -> GatheredSlots:
        return self._slots.gather_slots(slots, memory, table, width)

    def accept_commit(
        self,
        slots: Tensor,
        drafts: Tensor,
        targets: Tensor,
        limits: Tensor,
        hidden: Tensor,
        memory: SlotMemory,
    ) -> Tensor:
        return self._slots.accept_commit(slots, drafts, targets, limits, hidden, memory)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._rows.swiglu(gate_up)

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
        return self._rows.qk_norm_rope_write(qk, v, scale, cos, sin, eps, k_pages, v_pages, index)

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
        return self._attention.paged_attention(
            q, k_pages, v_pages, block_table, positions, lengths, gate
        )

    def gdn_verify(
        self, proj: Tensor, layer: GdnLayer, slots: Tensor, kept: Tensor, waiting: int
    ) -> Tensor:
        own = layer
        shape = (own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim)
        qk, v, g, beta = self._gdn.gdn_inputs(
            proj, own.conv, own.conv_weight, own.rate, own.dt_bias, slots, kept, *shape
        )
        z = proj.split_with_sizes(own.widths, -1)[1].unflatten(
            -1, (own.num_v_heads, own.head_v_dim)
        )
        return self._gdn.gdn_verify(
            qk, v, g, beta, z, own.state, own.factors, slots, kept, waiting,
            own.norm_weight, own.eps, own.gate, self._arrivals,
        )  # fmt: skip

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
        """flash-linear-attention's chunk kernels in bfloat16; float32 runs as defined."""
        if proj.dtype == torch.float32 or self._chunk_rule is None:
            return super().gdn_prefill(proj, layer, slots, counts)
        q, k, v, g, beta = self._prompt.prompt_inputs(proj, layer, slots, counts)
        out, state = self._chunk_rule(
            q, k, v, g, beta, scale=layer.head_k_dim**-0.5,
            initial_state=layer.state.index_select(0, slots), output_final_state=True,
        )  # fmt: skip
        layer.state.index_copy_(0, slots, state)
        self._prompt.keep_window(proj, layer, slots, counts)
        z = proj.split_with_sizes(layer.widths, -1)[1].unflatten(-1, out.shape[2:])
        norm = (layer.norm_weight, layer.eps, layer.gate)
        return self._prompt.gated_rms_norm(out.contiguous(), z, *norm).flatten(2)

    def head_pair(self, hidden: Tensor, head: Tensor, first_id: int) -> Tensor:
        if self._few(hidden):
            return self._matmul.head_top_pair(hidden, head, first_id)
        return self._rows.top_pair(F.linear(hidden, head), first_id)

    def head_pair_fp8(self, hidden: Tensor, head: Tensor, scales: Tensor, first_id: int) -> Tensor:
        if self._few(hidden):
            return self._matmul.head_top_pair_fp8(hidden, head, scales, first_id)
        return super().head_pair_fp8(hidden, head, scales, first_id)

    def head_ids(
        self, hidden: Tensor, head: Tensor, scales: Tensor | None, first_id: int, group: Group
    ) -> Tensor:
        mail = group.mail
        if mail is None or hidden.shape[0] > mail.rows:
            return super().head_ids(hidden, head, scales, first_id, group)
        if self._few(hidden):
            keys = self._matmul.head_keys(hidden, head, scales)
        elif scales is None:
            keys = self._rows.top_keys(F.linear(hidden, head))
        else:
            return super().head_ids(hidden, head, scales, first_id, group)
        return self._peer.choose_over_ranks(keys, first_id, mail)

    def top_pair(self, logits: Tensor, first_id: int) -> Tensor:
        return self._rows.top_pair(logits, first_id)

    def choose_pair(self, gathered: Tensor) -> Tensor:
        return self._rows.choose_pair(gathered)


def _chunk_rule() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-linear-attention's chunked gated delta rule; None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
        )
    except ImportError:
        log.warning("fla-core is not installed: prompts of GDN layers run as plain torch, slowly")
        return None
    return chunk_gated_delta_rule


def claim_cuda(index: int) -> None:
    """Use GPU `index` of the visible ones. DeviceError where there is none or it is too old."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:  # no GPU, an old driver, torch without CUDA
        why = " ".join(str(problem).split()).rstrip(".")
        raise DeviceError(
            f"device: cuda: {why} (torch {torch.__version__}). Set device: cpu in cluster.yaml."
        ) from None
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"device: cuda #{index}: {count} are visible (CUDA_VISIBLE_DEVICES)")
    if torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise DeviceError(f"device: cuda #{index} ({name}): capability 8.0 or newer is needed")
    torch.cuda.set_device(index)


def open_cuda(index: int, tp: Group) -> Device:
    """The claimed GPU as a Device."""
    where = torch.device("cuda", index)
    return Device(
        torch_device=where,
        ops=CudaOps(where),
        tp=tp,
        capabilities=Capabilities(graphs=True, run_ahead=1),
    )
