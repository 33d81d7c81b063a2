"""torch_npu in plain torch, from its documentation: its operations, and its graphs.

    FakeOps: each operation, the schema's names and defaults for the arguments that the backend
    uses, the documented limits as asserts
    FakeRuntime: NPUGraph and graph(); a capture leaves no trace but its record, a replay runs the
    record on the same tensors with the host lists of the last update, and calls no operation
    open_fake(group) -> Device with the NPU backend over both, on the CPU

Documentation: the docstrings of torch_npu 2.13.0; test_npu_contract.py compares the signatures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from outrider.parallel.backends.npu import CAPABILITIES, NpuOps
from outrider.parallel.device import Device
from outrider.parallel.group import Group
from outrider.parallel.operands import Rows

POISON = float("nan")
HOST_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class FakeOps:
    """torch.ops.npu. `calls` counts the operations by name."""

    def __init__(self, runtime: FakeRuntime | None = None) -> None:
        self.calls: dict[str, int] = {}
        self.runtime = runtime
        self.positions: Tensor | None = None
        """[B, R] of the rows of the next attention call, to compare its host list with"""

    def _enter(self, name: str) -> None:
        assert self.runtime is None or not self.runtime.replaying, f"{name} called during replay"
        self.calls[name] = self.calls.get(name, 0) + 1

    def npu_rms_norm(self, input: Tensor, gamma: Tensor, epsilon: float = 1e-6):
        self._enter("npu_rms_norm")
        assert input.dtype == gamma.dtype
        assert input.shape[input.ndim - gamma.ndim :] == gamma.shape
        dims = tuple(range(-gamma.ndim, 0))
        rstd = torch.rsqrt(input.float().square().mean(dims, keepdim=True) + epsilon)
        return (input.float() * rstd * gamma.float()).to(input.dtype), rstd

    def npu_gemma_rms_norm(self, input: Tensor, gamma: Tensor, epsilon: float = 1e-6):
        self._enter("npu_gemma_rms_norm")
        assert input.dtype == gamma.dtype
        assert input.is_contiguous()
        rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
        return (input.float() * rstd * (1 + gamma.float())).to(input.dtype), rstd

    def npu_add_rms_norm(self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6):
        self._enter("npu_add_rms_norm")
        assert x1.dtype == x2.dtype == gamma.dtype
        assert x1.shape == x2.shape
        total = x1 + x2
        rstd = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + epsilon)
        return (total.float() * rstd * gamma.float()).to(x1.dtype), rstd, total

    def npu_swiglu(self, input: Tensor, dim: int = -1):
        self._enter("npu_swiglu")
        gate, up = input.chunk(2, dim)
        return (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(input.dtype)

    def npu_rotary_mul(
        self,
        input: Tensor,
        r1: Tensor,
        r2: Tensor,
        rotary_mode: str = "half",
        rotate: Tensor | None = None,
    ):
        self._enter("npu_rotary_mul")
        batch, rows, heads, width = input.shape  # BSND
        assert width < 896
        assert width % 2 == 0
        assert batch < 1000 > heads
        assert r1.shape == r2.shape == (batch, rows, 1, width)
        assert input.dtype == r1.dtype == r2.dtype
        assert rotary_mode == "half"
        assert rotate is None
        left, right = input.chunk(2, -1)
        return r1 * input + r2 * torch.cat((-right, left), -1)

    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        cache_mode: str | None = "PA_NZ",
    ) -> None:
        """Scenario two: rows [T, m, d] into [P, page, m, d]. A slot named twice may hold
        anything afterwards: here NaN."""
        self._enter("npu_scatter_pa_kv_cache")
        assert cache_mode == "Norm"  # ND memory; the default is NZ
        assert slot_mapping.dtype in (torch.int32, torch.int64)
        assert slot_mapping.ndim == 1
        for rows, cache in ((key, key_cache), (value, value_cache)):
            assert rows.is_contiguous()
            assert cache.is_contiguous()
            assert rows.dtype == cache.dtype
            assert rows.shape == (len(slot_mapping), *cache.shape[2:])
            twice = (slot_mapping[:, None] == slot_mapping).sum(1) > 1
            rows = rows.masked_fill(twice[:, None, None], POISON)
            cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def npu_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        actual_seq_lengths: Tensor | None = None,
        scale: float | None = None,
        g: Tensor | None = None,
    ):
        """Rows [T, heads, 128] slot after slot; states [B, h, Dv, Dk]: here row by row."""
        self._enter("npu_chunk_gated_delta_rule")
        assert beta is not None
        assert g is not None
        assert initial_state is not None
        assert actual_seq_lengths is not None
        assert scale is not None
        for tensor in (query, key, value, beta, initial_state):
            assert tensor.dtype == torch.bfloat16
            assert tensor.is_contiguous()
        assert (g.dtype, actual_seq_lengths.dtype) == (torch.float32, torch.int32)
        assert query.shape[2] == value.shape[2] == 128
        assert initial_state.shape == (len(actual_seq_lengths), value.shape[1], 128, 128)
        repeat, outs, states = value.shape[1] // key.shape[1], [], []
        rows = iter(zip(query.float(), key.float(), value.float(), beta.float(), g, strict=True))
        for state, length in zip(initial_state.float(), actual_seq_lengths.tolist(), strict=True):
            for q, k, v, b, decay in itertools.islice(rows, length):
                q, k = q.repeat_interleave(repeat, 0) * scale, k.repeat_interleave(repeat, 0)
                state = state * decay.exp()[:, None, None]
                delta = b[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
                state = state + delta[:, :, None] * k[:, None]
                outs.append(torch.einsum("hvk,hk->hv", state, q))
            states.append(state)
        return torch.stack(outs).bfloat16(), torch.stack(states).bfloat16()

    def npu_grouped_matmul(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        group_list: Tensor | None = None,
        split_item: int | None = 0,
        group_type: int | None = None,
        group_list_type: int | None = 0,
    ):
        """One x [T, K], one weight [e, K, N], possibly a transposed view; group_list [e] holds the
        running sums of the rows of each group. Rows that are in no group, which the limits forbid,
        come out as NaN."""
        self._enter("npu_grouped_matmul")
        assert (split_item, group_type, group_list_type) == (3, 0, 0)
        (rows,), (matrices,) = x, weight
        assert rows.dtype == matrices.dtype
        assert rows.is_contiguous()
        assert rows.ndim == 2
        assert matrices.is_contiguous() or matrices.transpose(1, 2).is_contiguous()
        assert max(rows.shape[1], matrices.shape[2]) < 65536
        assert group_list is not None
        assert group_list.dtype == torch.int64
        assert group_list.shape == (len(matrices),)
        assert len(matrices) <= 1024
        row = torch.arange(len(rows)).unsqueeze(1)
        out = torch.full((len(rows), matrices.shape[2]), POISON, dtype=rows.dtype)
        start = torch.zeros((), dtype=torch.int64)
        for matrix, end in zip(matrices, group_list):
            product = (rows.float() @ matrix.float()).to(rows.dtype)
            out = torch.where((row >= start) & (row < end), product, out)
            start = end
        return [out]

    def npu_fused_infer_attention_score(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        atten_mask: Tensor | None = None,
        actual_seq_lengths: list[int] | None = None,
        actual_seq_lengths_kv: list[int] | None = None,
        block_table: Tensor | None = None,
        num_heads: int = 1,
        scale: float = 1.0,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        block_size: int = 0,
    ):
        """TND over pages [P, page, m * d]: q lengths as running sums, kv lengths one a slot."""
        self._enter("npu_fused_infer_attention_score")
        assert input_layout == "TND"
        assert sparse_mode == 3
        assert type(actual_seq_lengths) is type(actual_seq_lengths_kv) is list
        assert atten_mask is not None
        assert atten_mask.shape == (2048, 2048)
        assert atten_mask.dtype in (torch.bool, torch.int8, torch.uint8)
        assert block_table is not None
        assert block_table.dtype == torch.int32
        assert block_size == key.shape[1]
        assert block_size % 128 == 0
        assert key.is_contiguous()
        assert query.is_contiguous()
        assert query.shape[1] == num_heads
        assert len(query) == actual_seq_lengths[-1]
        assert len(block_table) == len(actual_seq_lengths) == len(actual_seq_lengths_kv)
        call = AttentionCall(
            query, key, value, atten_mask, block_table, scale, num_key_value_heads,
            actual_seq_lengths, actual_seq_lengths_kv, self.positions,
        )  # fmt: skip
        if self.runtime is not None and self.runtime.recorder is not None:
            assert len(query) // len(block_table) <= 16, "decode takes 16 rows a slot at most"
            self.runtime.recorder.tasks.append(call)
            return self.runtime.recorder.whole(call.run), torch.zeros(1)
        return call.run(), torch.zeros(1)


@dataclass
class AttentionCall:
    """One fused attention with its host lists: what an update rewrites."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    table: Tensor
    scale: float
    num_kv: int
    q_ends: list[int]
    kv_lengths: list[int]
    positions: Tensor | None

    def run(self) -> Tensor:
        d, page = self.query.shape[2], self.key.shape[1]
        out, start = [], 0
        for b, (end, length) in enumerate(zip(self.q_ends, self.kv_lengths, strict=True)):
            rows = end - start
            assert rows <= length <= self.table.shape[1] * page, (rows, length)
            if self.positions is not None and self.table[b, 0]:  # the null page is padding's
                assert length == self.positions[b, -1] + 1, "the host list is not the device's"
            pages = self.table[b, : -(-length // page)].long()
            k, v = (
                cache[pages].flatten(0, 1)[:length].unflatten(-1, (self.num_kv, d)).float()
                for cache in (self.key, self.value)
            )
            q = self.query[start:end].float()
            group = q.shape[1] // self.num_kv
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("rnd,tnd->nrt", q, k) * self.scale
            if rows > 1:  # the mask's lower right corner; one row sees all
                row = torch.arange(rows)[:, None] + (length - rows)
                hidden = torch.arange(length) > row
                corner = min(rows, len(self.mask))
                assert torch.equal(
                    self.mask[:corner, :corner].bool(), torch.ones(corner, corner).triu(1).bool()
                )
                scores = scores.masked_fill(hidden, float("-inf"))
            out.append(torch.einsum("nrt,tnd->rnd", scores.softmax(-1), v))
            start = end
        return torch.cat(out).to(self.query.dtype)


class Recorder(TorchDispatchMode):
    """Records each operation with the tensors it read and made; undoes what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple, dict, Any]] = []
        self.tasks: list[AttentionCall] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in HOST_SYNCS, f"{name} waits for the device in a capture"
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        made = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, made))
        return made

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.before[storage.data_ptr()] = (whole, whole.clone())

    def whole(self, work: Callable[[], Tensor]) -> Tensor:
        """One step of the record: an operation that Python code stands in for."""
        with _disable_current_modes():
            made = work()
        self.steps.append((work, (), {}, made))
        return made

    def undo(self) -> None:
        for whole, copy in self.before.values():
            whole.copy_(copy)


class FakeGraph:
    """NPUGraph: update() may come before replay() only, and must bring one entry a task."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime, self.recorder, self.fresh = runtime, Recorder(), False

    def pool(self) -> str:
        return "pool"

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        tasks = self.recorder.tasks
        assert len(cpu_update_input) == len(tasks)
        for task, entry in zip(tasks, cpu_update_input):
            assert entry.keys() == {"actual_seq_lengths_kv"}
            assert len(entry["actual_seq_lengths_kv"]) == len(task.kv_lengths)
            task.kv_lengths = entry["actual_seq_lengths_kv"]
        self.fresh = True

    def replay(self) -> None:
        assert self.fresh or not self.recorder.tasks, "the host lists are those of another replay"
        self.runtime.replaying, self.fresh = True, False
        self.runtime.replays += 1
        for func, args, kwargs, made in self.recorder.steps:
            again = func(*args, **kwargs)
            inputs = {
                t.untyped_storage().data_ptr()
                for t in tree_flatten((args, kwargs))[0]
                if isinstance(t, Tensor)
            }
            for old, new in zip(tree_flatten(made)[0], tree_flatten(again)[0]):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)
        self.runtime.replaying = False


class FakeRuntime:
    """torch.npu, as far as captures use it."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.replaying, self.replays = False, 0

    def NPUGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def graph(
        self,
        npu_graph: FakeGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        assert auto_dispatch_capture, "without it no update is possible"
        self.recorder = npu_graph.recorder
        try:
            with npu_graph.recorder:
                yield
        finally:
            npu_graph.recorder.undo()
            self.recorder = None


class ComparedOps(NpuOps):
    """NpuOps whose host lists are compared with the device's positions, in replays too."""

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, gate: Tensor
    ) -> Tensor:
        self._npu.positions = rows.positions
        return super().paged_attention(q, k_pages, v_pages, rows, gate)


class RecordedGroup(Group):
    """A group whose collectives are steps of a record: ranks meet again in each replay."""

    def __init__(self, group: Group, runtime: FakeRuntime) -> None:
        self.rank, self.size, self._group, self._runtime = group.rank, group.size, group, runtime

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._step(lambda: self._group.all_reduce(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._step(lambda: self._group.all_gather(x))

    def _step(self, work: Callable[[], Tensor]) -> Tensor:
        recorder = self._runtime.recorder
        return work() if recorder is None or self.size == 1 else recorder.whole(work)

    def close(self) -> None:
        self._group.close()


def open_fake(group: Group, *, dtypes: frozenset[torch.dtype] | None = None) -> Device:
    """The NPU backend on the CPU; float32 takes the fused attention too, unless told otherwise."""
    runtime = FakeRuntime()
    where = torch.device("cpu")
    ops = ComparedOps(
        where, FakeOps(runtime), runtime, frozenset({torch.float32}) if dtypes is None else dtypes
    )
    return Device(
        torch_device=where,
        ops=ops,
        tp=RecordedGroup(group, runtime),
        capabilities=CAPABILITIES,
        capture=ops.capture,
    )
