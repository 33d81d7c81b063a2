"""NVIDIA GPUs: Triton kernels in place of the operations that are no plain matrix product.

    open_cuda(index, group) -> Device with CudaOps

Importing this module imports Triton, so parallel/devices.py does it only where CUDA is asked for.
The delta rule of prompts is flash-linear-attention's where that is installed. Sums and gathers over
ranks: kernels/one_shot.py for few rows, kernels/two_shot.py for more, and NCCL beyond.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.parallel.device import Capabilities, Device
from outrider.parallel.formats import Fp8Matrix, Int4Matrix, Matrix, dequantised
from outrider.parallel.group import Group
from outrider.parallel.kernels import (
    argmax,
    attention,
    experts,
    fp8,
    gdn_prefill,
    gdn_verify,
    gemv,
    matmul,
    norms,
    one_shot,
    pages,
    sampling,
    scan,
    slots,
    two_shot,
)
from outrider.parallel.operands import (
    ExpertLayer,
    GdnLayer,
    PartialSum,
    PickRows,
    SamplingFeatures,
    SlotSampling,
)
from outrider.parallel.ops import Ops

log = logging.getLogger(__name__)
LARGE_WEIGHT = 15 << 20
"""With a plain weight of more numbers, products of more than gemv.MAX_ROWS rows are the library's:
at 48 rows and 17,408 x 5,120 numbers its take 50 us and ours 85."""
MAX_ARRIVALS = 1 << 14
"""Arrival counters, one for each group of programs that add up or finish a result together."""


class CudaOps(Ops):
    """Ops of one GPU. What is bound in __init__ has the signature of the method it replaces."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)
        self._chunk_rule = _chunk_rule()
        self.locate_rows = pages.locate_rows
        self.embed_rms_norm = norms.embed_rms_norm
        self.mtp_input = norms.mtp_input
        self.rms_norm = norms.rms_norm
        self.add_rms_norm = norms.add_rms_norm
        self.swiglu = matmul.swiglu
        self.qk_norm_rope_write = pages.qk_norm_rope_write
        self.paged_attention = attention.paged_attention
        self.gdn_verify = partial(gdn_verify.gdn_verify, arrivals=self._arrivals)
        self.gather_slots = slots.gather_slots
        self.accept_commit = slots.accept_commit
        self.count_tokens = slots.count_tokens
        self.top_pair = argmax.top_pair
        self.choose_pair = argmax.choose_pair

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        if isinstance(weight, Tensor):
            few = _few_bf16(x, _most_rows(weight, matmul.HELD_ROWS))
            return matmul.few_rows(x, weight, self._arrivals) if few else F.linear(x, weight)
        if isinstance(weight, Int4Matrix) or not fp8.readable(weight):
            return F.linear(x, dequantised(weight, x.dtype))
        if _few_bf16(x, matmul.most_rows(weight)):
            return matmul.few_rows(x, weight, self._arrivals)
        return F.linear(x, fp8.plain(weight, x.dtype))

    def linear_swiglu(self, x: Tensor, gate_up: Matrix) -> Tensor:
        if (
            isinstance(gate_up, Tensor | Fp8Matrix)
            and fp8.readable(gate_up)
            and _few_bf16(x, _most_rows(gate_up, matmul.most_rows(gate_up)))
        ):
            return matmul.few_rows_swiglu(x, gate_up, self._arrivals)
        return super().linear_swiglu(x, gate_up)

    def experts(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return experts.experts(rows, layer, self._arrivals, self._mlp).view(x.shape)

    def linear_part(self, x: Tensor, weight: Matrix, group: Group) -> PartialSum:
        buffers = group.one_shot
        if (
            buffers is not None
            and isinstance(weight, Tensor | Fp8Matrix)
            and fp8.readable(weight)
            and matmul.can_send(x, weight, buffers)
        ):
            return PartialSum(matmul.few_rows_sent(x, weight, buffers), group, sent=True)
        return super().linear_part(x, weight, group)

    def sum_add_rms_norm(
        self, part: PartialSum, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        values, few, many = part.values, part.group.one_shot, part.group.two_shot
        if few is not None and one_shot.fits(values, few):
            return one_shot.sum_add_rms_norm(values, residual, scale, eps, few, sent=part.sent)
        assert not part.sent, "a part that was sent is summed in one shot"
        if many is not None and two_shot.fits(values, many):
            return two_shot.sum_add_rms_norm(values, residual, scale, eps, many)
        return super().sum_add_rms_norm(part, residual, scale, eps)

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
        """flash-linear-attention's chunk kernels in bfloat16; float32 runs as defined."""
        if proj.dtype == torch.float32 or self._chunk_rule is None:
            return super().gdn_prefill(proj, layer, slots, counts)
        q, k, v, g, beta = gdn_prefill.chunk_inputs(proj, layer, slots, counts)
        out, state = self._chunk_rule(
            q, k, v, g, beta, scale=layer.head_k_dim**-0.5,
            initial_state=layer.state.index_select(0, slots), output_final_state=True,
        )  # fmt: skip
        layer.state.index_copy_(0, slots, state)
        gdn_prefill.keep_window(proj, layer, slots, counts)
        z = proj.split_with_sizes(layer.widths, -1)[1].unflatten(-1, out.shape[2:])
        norm = (layer.norm_weight, layer.eps, layer.gate)
        return norms.gated_rms_norm(out.contiguous(), z, *norm).flatten(2)

    def head_ids(
        self, hidden: Tensor, head: Tensor, scales: Tensor | None, first_id: int, group: Group
    ) -> Tensor:
        buffers, few = group.one_shot, _few_bf16(hidden)
        if buffers is None or hidden.shape[0] > buffers.rows or not (few or scales is None):
            return super().head_ids(hidden, head, scales, first_id, group)
        if few:
            keys = matmul.head_keys(hidden, head, scales)
        else:
            keys = argmax.top_keys(F.linear(hidden, head))
        return one_shot.choose_over_ranks(keys, first_id, buffers)

    def pick_ids(
        self,
        hidden: Tensor,
        head: Tensor,
        scales: Tensor | None,
        first_id: int,
        group: Group,
        rows: PickRows,
        by_slot: SlotSampling,
        features: SamplingFeatures,
        *,
        exact: bool = True,
    ) -> tuple[Tensor, ...]:
        """Groups without peer memory sample as defined, which waits for the device."""
        buffers = group.one_shot
        if group.size > 1 and buffers is None:
            how = (rows, by_slot, features)
            return super().pick_ids(hidden, head, scales, first_id, group, *how, exact=exact)
        if replace(features, drawn=False) != SamplingFeatures():
            logits = self.head_logits(hidden, head, scales)
            return sampling.pick_ids(
                logits, first_id, buffers, rows, by_slot, features.logprobs, exact=exact
            )
        flat = hidden.flatten(0, 1)
        if _few_bf16(flat):
            drawn = matmul.Sampled(first_id, hidden.shape[1], rows, by_slot)
            keys = matmul.head_keys(flat, head, scales, drawn)
        else:
            logits = self.head_logits(flat, head, scales)
            keys = scan.noised_keys(logits, first_id, rows, by_slot)
        if buffers is None:
            ids = self.choose_pair(argmax.pair_of(keys, first_id).unsqueeze(0))
        else:
            parts = keys.split(buffers.rows)
            ids = [one_shot.choose_over_ranks(part, first_id, buffers) for part in parts]
            ids = ids[0] if len(ids) == 1 else torch.cat(ids)
        return (ids.view(hidden.shape[:2]),)

    def noise_ahead(
        self, slots: Tensor, last: Tensor, num_rows: int, by_slot: SlotSampling, first_id: int
    ) -> Tensor | None:
        return None

    def head_logits(self, hidden: Tensor, head: Tensor, scales: Tensor | None) -> Tensor:
        if not _few_bf16(hidden):
            return super().head_logits(hidden, head, scales)
        logits = matmul.head_logits(hidden.flatten(0, -2), head, scales)
        return logits.unflatten(0, hidden.shape[:-1])

    def head_pair(self, hidden: Tensor, head: Tensor, first_id: int) -> Tensor:
        if _few_bf16(hidden):
            return matmul.head_top_pair(hidden, head, first_id)
        return self.top_pair(F.linear(hidden, head), first_id)

    def head_pair_fp8(self, hidden: Tensor, head: Tensor, scales: Tensor, first_id: int) -> Tensor:
        if _few_bf16(hidden):
            return matmul.head_top_pair_fp8(hidden, head, scales, first_id)
        return super().head_pair_fp8(hidden, head, scales, first_id)


def _most_rows(weight: Matrix, most: int) -> int:
    """Up to so many rows a product runs on our kernels, of `most` that they take."""
    large = isinstance(weight, Tensor) and weight.numel() > LARGE_WEIGHT
    return min(most, gemv.MAX_ROWS) if large else most


def _few_bf16(x: Tensor, most: int = matmul.MAX_ROWS) -> bool:
    """Whether x [.., d] is bfloat16 and has at most so many rows."""
    return x.numel() // x.shape[-1] <= most and x.dtype == torch.bfloat16


def _chunk_rule() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-linear-attention's chunked gated delta rule, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of optional packages that we do not use
            from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
                chunk_gated_delta_rule,
            )
    except ImportError:
        log.warning("fla-core is not installed: prompts of GDN layers run as plain torch, slowly")
        return None
    return chunk_gated_delta_rule


def open_cuda(index: int, tp: Group) -> Device:
    """The GPU that devices.claim_device has claimed, as a Device."""
    where = torch.device("cuda", index)
    return Device(
        torch_device=where,
        ops=CudaOps(where),
        tp=tp,
        capabilities=Capabilities(graphs=True, run_ahead=1),
    )
