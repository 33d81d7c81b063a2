"""Ascend NPUs: torch_npu's fused operations where they compute what Ops defines, else plain torch.

    claim_npu(index), open_npu(index, group) -> Device with NpuOps

Fused attention takes its lengths as lists on the host. A capture keeps the list of each attention
call, and every replay first writes the present values of these lists into the graph, with
NPUGraph.update; so the lists must stay, as captured tensors do. The delta rule of torch_npu rounds
the state to bfloat16: prompts use its chunked form where the checkpoint allows that
(GdnLayer.coarse_state), and everything else runs as torch operations in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from outrider.parallel import experts
from outrider.parallel.device import Capabilities, Device, DeviceError
from outrider.parallel.formats import Matrix
from outrider.parallel.group import Group
from outrider.parallel.operands import ExpertLayer, GdnLayer, Rows
from outrider.parallel.ops import Ops

CAPABILITIES = Capabilities(graphs=True, host_lengths=True, max_rows=16, page_multiple=128)
"""run_ahead is 0, since the lengths of an iteration follow from the results of the one before."""
FUSED_ATTENTION = frozenset({torch.float16, torch.bfloat16})
MASK_ROWS = 2048
"""Rows and columns of the triangular mask that fused attention wants in its causal modes."""
CAUSAL_TO_THE_END = 3
"""Value of sparse_mode: the last row sees all keys of its slot, and each row before it one less."""
CHUNK_HEAD_DIM = 128
"""The width of keys and values that the chunked delta rule takes; it takes no other."""
NO_RESOURCES = "207008"
"""CANN's error number for streams or events that have run out."""


class NpuOps(Ops):
    """Ops of one NPU; Ops says what each method does."""

    def __init__(
        self,
        device: torch.device,
        npu: Any,
        runtime: Any,
        attention: frozenset[torch.dtype] = FUSED_ATTENTION,
    ) -> None:
        """npu: torch.ops.npu; runtime: torch.npu; attention: dtypes whose attention is fused."""
        self._npu, self._runtime, self._fused = npu, runtime, attention
        self._mask = torch.ones(MASK_ROWS, MASK_ROWS, dtype=torch.int8, device=device).triu_(1)
        self._centred = WeakTensorKeyDictionary()
        self._by_head = WeakTensorKeyDictionary()
        self._table: tuple[Tensor, Tensor] | None = None
        self.captured: list[list[int]] | None = None
        """While work is captured, the lengths that each attention call is given, in order."""

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        return F.linear(x, weight) if isinstance(weight, Tensor) else super().linear(x, weight)

    def experts(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        """By grouped products. torch_npu has none for matrices in codes: where graphs are captured
        these are gathered, and elsewhere taken as defined, which looks at the host."""
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(layer.gate_up, Tensor) and isinstance(layer.down, Tensor):
            add_up = partial(self._grouped, gate_up=layer.gate_up, down=layer.down)
        elif self.captured is not None:
            add_up = partial(experts.gathered, swiglu=self.swiglu)
        else:
            add_up = partial(experts.routed, mlp=self._mlp)
        return experts.mixture(rows, layer, self._mlp, add_up).view(x.shape)

    def _grouped(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        layer: ExpertLayer,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """As experts.routed. Every row is in some group, as the operation wants it, those of
        experts on other ranks too."""
        weights, local = experts.on_rank(weights, ids, layer)
        (num_rows, top_k), num_experts = ids.shape, len(gate_up)
        local = local.flatten()
        order = local.float().sort(stable=True).indices  # pairs of a row and its expert, by expert
        expert = torch.arange(num_experts, device=x.device)
        ends = (local.unsqueeze(1) <= expert).sum(0)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            (result,) = self._npu.npu_grouped_matmul(
                [rows], [weight.transpose(1, 2)], group_list=ends, split_item=3, group_type=0
            )
            return result

        h = self.swiglu(product(x[order // top_k], gate_up))
        y = product(h, down)
        y = torch.empty_like(y).index_copy_(0, order, y).float() * weights.reshape(-1, 1)
        return y.view(num_rows, top_k, -1).sum(1)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """In float32 the operation takes the scale as it is. In other dtypes it would have to be
        rounded, so the operation for zero-centred weights gets scale - 1, which is the checkpoint's
        own weight and has x's dtype there."""
        if x.dtype == torch.float32:
            return self._npu.npu_rms_norm(x.contiguous(), scale, epsilon=eps)[0]
        if scale not in self._centred:
            self._centred[scale] = (scale - 1.0).to(x.dtype)
        weight = self._centred[scale]
        return self._npu.npu_gemma_rms_norm(x.contiguous(), weight, epsilon=eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.dtype != torch.float32:  # the fused operation is not for zero-centred weights
            return super().add_rms_norm(x, residual, scale, eps)
        normed, _, total = self._npu.npu_add_rms_norm(x, residual, scale, epsilon=eps)
        return normed, total

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        wide = z.float()
        act = F.silu(wide) if gate == "silu" else torch.sigmoid(wide)
        normed = self._npu.npu_rms_norm(x.float().contiguous(), weight.float(), epsilon=eps)[0]
        return (normed * act).to(z.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._npu.npu_swiglu(gate_up, dim=-1)

    def qk_norm_rope_write(
        self,
        qk: Tensor,
        v: Tensor,
        scale: Tensor,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: Rows,
    ) -> Tensor:
        num_kv, width = v.shape[2], rows.cos.shape[-1]
        num_q = qk.shape[2] - num_kv
        if scale not in self._by_head:  # all heads of q have one scale, and those of k another
            self._by_head[scale] = (scale[0], scale[num_q])
        q_scale, k_scale = self._by_head[scale]
        normed = [self.rms_norm(qk[:, :, num_q:], k_scale, eps)]
        if num_q:
            normed.insert(0, self.rms_norm(qk[:, :, :num_q], q_scale, eps))
        qk = torch.cat(normed, 2)
        turned = qk[..., :width].float().contiguous()
        turned = self._npu.npu_rotary_mul(turned, rows.cos, rows.sin, rotary_mode="half")
        turned = turned.to(qk.dtype)
        qk = torch.cat((turned, qk[..., width:]), -1)
        q, k = qk.split_with_sizes((num_q, num_kv), 2)
        self._npu.npu_scatter_pa_kv_cache(
            k.flatten(0, 1).contiguous(),
            v.flatten(0, 1).contiguous(),
            k_pages,
            v_pages,
            rows.kv_index.flatten(),
            cache_mode="Norm",
        )
        return q

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, gate: Tensor
    ) -> Tensor:
        """Padding rows see stale keys of their own slot; nobody reads their results."""
        if q.dtype not in self._fused:
            return super().paged_attention(q, k_pages, v_pages, rows, gate)
        lengths, table = rows.host_lengths, rows.block_table
        assert lengths is not None, "fused attention takes its lengths on the host"
        if self.captured is not None:
            self.captured.append(lengths)
        if self._table is None or self._table[0] is not table:  # one conversion for all layers
            self._table = (table, table.to(torch.int32))
        num_slots, num_rows, num_heads, d = q.shape
        out, _ = self._npu.npu_fused_infer_attention_score(
            q.flatten(0, 1).contiguous(),
            k_pages.flatten(2),
            v_pages.flatten(2),
            atten_mask=self._mask,
            actual_seq_lengths=[num_rows * (b + 1) for b in range(num_slots)],
            actual_seq_lengths_kv=list(lengths),
            block_table=self._table[1],
            num_heads=num_heads,
            scale=d**-0.5,
            input_layout="TND",
            num_key_value_heads=k_pages.shape[2],
            sparse_mode=CAUSAL_TO_THE_END,
            block_size=k_pages.shape[1],
        )
        return out.view(num_slots, num_rows, -1) * torch.sigmoid(gate)

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
        """By torch_npu's chunked rule where its bfloat16 state is allowed, else as defined."""
        widths = {layer.head_k_dim, layer.head_v_dim}
        if not layer.coarse_state or proj.dtype != torch.bfloat16 or widths != {CHUNK_HEAD_DIM}:
            return super().gdn_prefill(proj, layer, slots, counts)
        qk, v, g, beta, window = self._prefill_inputs(proj, layer, slots)
        batch, rows = proj.shape[:2]
        real = (torch.arange(rows, device=proj.device) < counts.unsqueeze(1)).unsqueeze(-1)
        # Padding rows have beta = g = 0 below, which leaves the state as it is.
        q, k = qk.to(proj.dtype).unbind(2)
        state = layer.state.index_select(0, slots).transpose(-1, -2).to(proj.dtype)
        out, state = self._npu.npu_chunk_gated_delta_rule(
            q.flatten(0, 1).contiguous(),
            k.flatten(0, 1).contiguous(),
            v.to(proj.dtype).flatten(0, 1).contiguous(),
            beta=(beta * real).to(proj.dtype).flatten(0, 1),
            initial_state=state.contiguous(),
            actual_seq_lengths=torch.full_like(slots, rows, dtype=torch.int32),
            scale=layer.head_k_dim**-0.5,
            g=(g * real).flatten(0, 1),
        )
        state = state.float().transpose(-1, -2)
        out = out.unflatten(0, (batch, rows))
        return self._prefill_end(out, proj, layer, slots, counts, window, state)

    def solve_unit_lower(self, lower: Tensor, right: Tensor) -> Tensor:
        """Forward substitution by blocks of 1, 2, 4 ... rows, in matrix products.

        torch_npu's solver is documented for double and complex numbers too, as operations are that
        run on the NPU's control processor. Matrix products run on its cores and can be captured.
        """
        first, *larger = _blocks_below(lower.shape[-1], lower.device)
        inverse = torch.eye(lower.shape[-1], device=lower.device) - lower * first
        for below in larger:
            inverse = inverse - inverse @ (lower * below) @ inverse
        return inverse @ right

    def top_pair(self, logits: Tensor, first_id: int) -> Tensor:
        """The device's arg max may return any of equal maxima, so the smallest id is computed. For
        a row of NaN, which is padding, the result is the largest id."""
        wide, last = logits.float(), logits.shape[-1] - 1
        value = wide.amax(-1, keepdim=True)
        ids = torch.arange(last + 1, device=logits.device).expand_as(wide)
        index = ids.masked_fill(wide != value, last).amin(-1) + first_id
        bits = value.squeeze(-1).view(torch.int32)
        return torch.stack((bits, index.to(torch.int32)), -1)

    def choose_pair(self, gathered: Tensor) -> Tensor:
        bits, ids = gathered.unbind(-1)
        values = bits.contiguous().view(torch.float32)
        worse = values < values.amax(0, keepdim=True)
        return ids.masked_fill(worse, torch.iinfo(torch.int32).max).amin(0).to(torch.int64)

    def capture(self, work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
        """Capture `work` as an NPUGraph whose replay first writes the present lengths into it."""
        graph = self._runtime.NPUGraph()
        self.captured = lists = []
        try:
            with self._runtime.graph(
                graph, pool=pool, auto_dispatch_capture=True, capture_error_mode="thread_local"
            ):
                outputs = work()
        except RuntimeError as error:
            if NO_RESOURCES in str(error):
                raise RuntimeError(
                    f"the NPU has no streams or events left for another graph: list fewer sizes "
                    f"in limits.batch_buckets (cluster.yaml). {error}"
                ) from error
            raise
        finally:
            self.captured = None

        def replay() -> None:
            if lists:
                graph.update(
                    cpu_update_input=[{"actual_seq_lengths_kv": list(now)} for now in lists]
                )
            graph.replay()

        return replay, outputs, pool or graph.pool()


@cache
def _blocks_below(rows: int, device: torch.device) -> list[Tensor]:
    """For blocks of 1, 2, 4 ... rows, [R, R] float32: 1 where the rows of an odd block meet the
    columns of the even block before it, else 0."""
    row, masks, size = torch.arange(rows, device=device), [], 1
    while size < rows:
        block = row // size
        masks.append(((block[:, None] == block + 1) & (block % 2 == 0)).float())
        size *= 2
    return masks


def claim_npu(index: int) -> None:
    """Use NPU `index` of the visible ones. Raises DeviceError where torch_npu, CANN or the card is
    missing or does not fit."""
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError(
            "device: npu: torch_npu is not installed: pip install 'torch_npu==2.13.0' beside "
            f"torch 2.13 (this is {torch.__version__}), or set device: cpu in cluster.yaml"
        )
    try:
        import torch_npu  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"device: npu: torch_npu cannot be loaded: {error}. It needs CANN: install the toolkit "
            "and kernels of docs/npu.md, then source its set_env.sh before Ray starts"
        ) from error
    built_for = ".".join(torch_npu.__version__.split("+")[0].split(".")[:2])
    if not torch.__version__.startswith(built_for + "."):
        raise DeviceError(
            f"device: npu: torch_npu {torch_npu.__version__} is built for torch {built_for}, this "
            f"is torch {torch.__version__}: install the pair of docs/npu.md, or set device: cpu in "
            "cluster.yaml"
        )
    runtime = torch_npu.npu
    if not runtime.is_available():
        raise DeviceError(
            "device: npu: torch_npu sees no NPU: driver missing (npu-smi info), or "
            "ASCEND_RT_VISIBLE_DEVICES hides all or is not ascending"
        )
    count = runtime.device_count()
    if index >= count:
        raise DeviceError(f"device: npu #{index}: {count} are visible (ASCEND_RT_VISIBLE_DEVICES)")
    runtime.set_device(index)


def open_npu(index: int, tp: Group) -> Device:
    """The NPU that claim_npu has claimed, as a Device."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    where = torch.device("npu", index)
    ops = NpuOps(where, torch.ops.npu, torch_npu.npu)
    return Device(
        torch_device=where, ops=ops, tp=tp, capabilities=CAPABILITIES, capture=ops.capture
    )
