"""Checks of the NPU backend against the real torch_npu, run in a process of its own.

    python -m tests.npu_contract   (test_npu_contract.py sets its environment) -> JSON on stdout

No NPU is needed: operations run on meta tensors, which checks names, arguments and shapes; Python
calls are bound to the real signatures. Nothing here says that a value is right.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # pyright: ignore[reportMissingImports]
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import outrider.parallel.backends.npu as backend
from outrider.parallel.backends import hccl
from outrider.parallel.formats import Fp8Matrix
from outrider.parallel.operands import ExpertLayer, GdnLayer, Rows
from outrider.parallel.ops import Ops
from tests.npu import FakeOps, FakeRuntime
from tests.parallel.cases import attending_rows

BF16 = torch.bfloat16
NPU = torch_npu.npu
META = torch.device("meta")


class CheckedOps:
    """torch.ops.npu as it is, on meta tensors; `called` remembers the names."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(torch.ops.npu, name).default

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return operation(*args, **kwargs)

        return call


class BoundRuntime(FakeRuntime):
    """torch.npu: each call is bound to the real signature before the fake answers it."""

    def NPUGraph(self, *args: Any, **kwargs: Any) -> Any:
        inspect.signature(NPU.NPUGraph.__init__).bind(None, *args, **kwargs)
        graph = super().NPUGraph()
        for name in ("update", "replay", "pool"):
            setattr(graph, name, _bound(getattr(NPU.NPUGraph, name), getattr(graph, name)))
        return graph

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        inspect.signature(NPU.graph.__init__).bind(None, *args, **kwargs)
        return super().graph(*args, **kwargs)


def _bound(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(real).bind(None, *args, **kwargs)
        return fake(*args, **kwargs)

    return call


def check_operations(module: Any) -> None:
    """Every operation of the backend, on meta tensors, in both dtypes: the definition's shapes."""
    checked = CheckedOps()
    for dtype in (torch.float32, BF16):
        ops = module.NpuOps(META, checked, NPU, module.FUSED_ATTENTION)
        for name, arguments in _calls(dtype):
            got = getattr(ops, name)(*arguments)
            # The definition of experts looks at the rows of each, which meta tensors have not.
            want = arguments[0] if name == "experts" else getattr(Ops(), name)(*arguments)
            assert _shapes(got) == _shapes(want), (name, dtype, _shapes(got), _shapes(want))
    faked = {name for name in vars(FakeOps) if name.startswith("npu_")}
    assert checked.called == faked, f"never called: {faked - checked.called}"


def _shapes(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    results = result if isinstance(result, tuple) else (result,)
    return [(t.shape, t.dtype) for t in results]


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, tuple]]:
    """Name and arguments of calls of the operations that the backend replaces or is part of."""

    def full(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    f32, i64 = torch.float32, torch.int64
    x, scale = full(2, 3, 64), full(64, dtype=f32)
    yield "rms_norm", (x, scale, 1e-6)
    yield "add_rms_norm", (x, x, scale, 1e-6)
    yield "gated_rms_norm", (x, x, scale, 1e-6, "silu")
    yield "swiglu", (x,)
    yield "linear_swiglu", (x, full(96, 64))
    yield "experts", (x, _expert_layer(full))
    pages, index, slots = full(5, 128, 2, 256), full(2, 3, dtype=i64), full(2, dtype=i64)
    turn, layer = full(2, 3, 1, 64, dtype=f32), _gdn_layer(full)
    rows = Rows(
        slots=slots, positions=index, lengths=slots, block_table=full(2, 4, dtype=i64),
        kv_index=index, counts=slots, cos=turn, sin=turn, host_lengths=[9, 200],
    )  # fmt: skip
    qk, v, scales = full(2, 3, 10, 256), full(2, 3, 2, 256), full(10, 256, dtype=f32)
    yield "qk_norm_rope_write", (qk, v, scales, 1e-6, pages, pages, rows)
    q, gate = full(2, 3, 8, 256), full(2, 3, 8 * 256)
    yield "paged_attention", (q, pages, pages, rows, gate)
    yield "gdn_prefill", (full(2, 9, sum(layer.widths)), layer, slots, slots)
    yield "gdn_verify", (full(2, 4, sum(layer.widths)), layer, slots, slots, 4)
    yield "top_pair", (full(6, 100), 7)
    yield "choose_pair", (full(2, 6, 2, dtype=torch.int32),)


def _expert_layer(full: Callable[..., torch.Tensor]) -> ExpertLayer:
    """The second half of 8 experts."""
    return ExpertLayer(
        router=full(8, 64), top_k=2, normalised=True, first_expert=4,
        gate_up=full(4, 64, 64), down=full(4, 64, 32),
        shared_gate_up=full(32, 64), shared_down=full(64, 16), shared_gate=full(1, 64),
    )  # fmt: skip


def _gdn_layer(full: Callable[..., torch.Tensor]) -> GdnLayer:
    """Qwen3.5-2B's on one of two ranks, its state allowed to be coarse."""
    k, h, d, f32 = 8, 8, 128, torch.float32
    channels = (2 * k + h) * d
    return GdnLayer(
        num_k_heads=k, num_v_heads=h, head_k_dim=d, head_v_dim=d, eps=1e-6, gate="silu",
        conv_weight=full(4, channels), rate=full(h, dtype=f32), dt_bias=full(h, dtype=f32),
        norm_weight=full(d, dtype=f32), conv=full(3, 7, channels), coarse_state=True,
        state=full(3, h, d, d, dtype=f32), factors=full(3, 4, k * d + h * d + h, dtype=f32),
    )  # fmt: skip


def check_fake_signatures() -> None:
    """The fake's names and defaults are the schema's, so that the semantics tests mean it."""
    for name, method in vars(FakeOps).items():
        if not name.startswith("npu_"):
            continue
        schema = getattr(torch.ops.npu, name).default._schema
        real = {argument.name: argument for argument in schema.arguments}
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            assert parameter.name in real, f"{name}: no argument {parameter.name}"
            argument = real[parameter.name]
            if argument.has_default_value():
                assert parameter.default == argument.default_value, f"{name}: {parameter.name}"
            assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only


def check_captures(module: Any) -> None:
    """capture, update and replay bind to torch.npu; the update's key is one that torch_npu
    writes into a captured attention call."""
    runtime = BoundRuntime()
    ops = module.NpuOps(torch.device("cpu"), FakeOps(runtime), runtime, frozenset({torch.float32}))
    q, pages = torch.zeros(1, 2, 4, 32), torch.zeros(2, 128, 2, 32)
    at, table = torch.tensor([[3, 4]]), torch.ones(1, 1, dtype=torch.int64)
    rows = attending_rows(table, at, at, [5])

    def work() -> torch.Tensor:
        return ops.paged_attention(q, pages, pages, rows, torch.zeros(1, 2, 128))

    replay, _, pool = ops.capture(work, None)
    replay()
    assert pool == "pool"
    handler = NPU.graphs._NPU_GRAPH_OP_HANDLERS["npu_fused_infer_attention_score.default"]
    keys = {key for _, _, key in handler.get_update_specs("npu_fused_infer_attention_score.out")}
    assert "actual_seq_lengths_kv" in keys


class TaskGroups:
    """torch.npu whose graphs run torch_npu's own dispatch mode, over logged device calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.records: list[Any] = []

    def logged(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.log.append(name)
            return result

        return call

    def NPUGraph(self) -> Any:
        mode = NPU.graphs._GraphDispatchMode()
        self.records = mode.graph_dispatch_records
        return types.SimpleNamespace(
            mode=mode,
            update=lambda cpu_update_input: mode.update_capture_record(cpu_update_input),
            replay=self.logged("replay"),
            pool=lambda: "pool",
        )

    def graph(self, npu_graph: Any, **how: Any) -> Any:
        return npu_graph.mode

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of what needs a device."""
        event = types.SimpleNamespace(**{n: self.logged(n) for n in ("wait", "reset", "record")})
        names = ("group_begin", "group_end", "update_begin", "update_end")
        tasks = {f"graph_task_{name}": self.logged(name, "handle") for name in names}
        stream = {"Stream": lambda: None, "current_stream": lambda: None}
        with (
            mock.patch.multiple(NPU.graphs, **tasks),
            mock.patch.multiple(
                NPU, ExternalEvent=lambda: event, stream=lambda s: nullcontext(), **stream
            ),
        ):
            yield


def check_task_groups() -> None:
    """torch_npu's own capture and update code around our attention calls: each becomes a task
    group of its own, its lists are rewritten before the replay, in order."""
    score = "npu::npu_fused_infer_attention_score"
    for name, fake in (
        (f"npu::_{score[5:]}_get_max_workspace", lambda q, *_, **__: q.new_empty(1)),
        (f"npu::_{score[5:]}_infer_output", lambda q, *_, **__: (q.clone(), q.new_empty(1))),
        (f"{score}.out", lambda *_, out, **__: tuple(out)),
    ):
        library.register_fake(name, fake)
    runtime = TaskGroups()
    ops = backend.NpuOps(META, torch.ops.npu, runtime)
    q, pages = (torch.empty(s, dtype=BF16, device=META) for s in ((2, 4, 8, 256), (5, 128, 2, 256)))
    table, gate = torch.empty(2, 3, dtype=torch.int64, device=META), q.flatten(2)
    lists = [[4, 9], [5, 10]]
    layers = [attending_rows(table, table, table, ends) for ends in lists]

    def work() -> list[torch.Tensor]:
        return [ops.paged_attention(q, pages, pages, rows, gate) for rows in layers]

    with runtime.installed():
        replay, out, _ = ops.capture(work, None)
        assert [t.shape for t in out] == [gate.shape] * 2
        assert runtime.log == ["wait", "reset", "group_begin", "group_end"] * 2
        lists[0][:], lists[1][:] = [7, 300], [8, 301]
        runtime.log.clear()
        replay()
    assert runtime.log == [*["update_begin", "update_end", "record"] * 2, "replay"]
    assert [r.kwargs["actual_seq_lengths_kv"] for r in runtime.records] == [[7, 300], [8, 301]]
    assert all(r.kwargs["actual_seq_lengths"] == [4, 8] for r in runtime.records)


def check_device_calls() -> None:
    """What claim_npu, open_npu and Device.fetch call."""
    inspect.signature(NPU.set_device).bind(0)
    inspect.signature(NPU.device_count).bind()
    inspect.signature(NPU.mem_get_info).bind(0)
    assert NPU.is_available() is False
    assert torch.get_device_module(torch.device("npu", 0)) is NPU
    for name in ("record", "synchronize"):
        inspect.signature(getattr(NPU.Event, name)).bind(None)
    inspect.signature(NPU.Event.__new__).bind(NPU.Event)


def check_group_options() -> None:
    """The group's options exist, and torch_npu's library knows their keys."""
    options = hccl.hccl_options(119.5)
    assert options.hccl_config["hccl_exec_timeout"] == 120
    library = (Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so").read_bytes()
    for key in options.hccl_config:
        assert key.encode() in library, key
    assert "hccl" in dist.Backend.backend_list
    assert "pg_options" in inspect.signature(dist.init_process_group).parameters


class Listing(TorchDispatchMode):
    """Names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        self.names.add((func._schema.name, func._schema.overload_name))
        return func(*args, **(kwargs or {}))


class UnlistedOps(FakeOps):
    """Fake operations whose insides are not the backend's."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("npu_"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return found(*args, **kwargs)

        return call


def check_torch_operations(folder: Path) -> None:
    """Every torch operation of a prompt and its iterations has a kernel for NPUs of its own:
    without one torch_npu computes on the host, which also cannot be captured."""
    from outrider.model.config import RunConfig
    from outrider.model.runner import Runner
    from outrider.model.step import Join, Sampling
    from outrider.parallel.device import Device
    from outrider.parallel.group import alone

    cpu = torch.device("cpu")
    ops = backend.NpuOps(cpu, UnlistedOps(), FakeRuntime(), frozenset({torch.float32}))
    can = backend.CAPABILITIES.__class__(host_lengths=True)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 2.0, "top_k": 3000, "top_p": 0.95},  # searches for the end of its kept set
        {
            "temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 2,
            "logit_bias": ((7, 1.0),), "min_tokens": 4,
        },
    ]  # fmt: skip
    run = RunConfig(
        model_dir=str(folder), draft_tokens=3, max_slots=len(ways), max_model_len=192,
        page_tokens=128, num_pages=1 + 2 * len(ways), prefill_chunk=32,
    )  # fmt: skip
    runner = Runner(run, Device(torch_device=cpu, ops=ops, tp=alone(), capabilities=can))
    listing = Listing()
    with listing:
        for slot, way in enumerate(ways):
            how, pages = Sampling(max_tokens=8, seed=1, **way), [1 + 2 * slot, 2 + 2 * slot]
            runner.apply(
                [Join(slot=slot, request=slot, tokens=[5] * 40, pages=pages, sampling=how)]
            )
        while runner.has_work:
            runner.step()
        _run_experts(ops)
    assert not _on_npu("aten::igamma", "")  # one that it lacks
    assert len(listing.names) > 40
    missing = sorted(".".join(filter(None, name)) for name in listing.names if not _on_npu(*name))
    assert not missing, f"no kernel for NPUs: {', '.join(missing)}"


def _run_experts(ops: Any) -> None:
    """Experts as plain numbers, and in codes, which graphs take otherwise."""
    plain = _expert_layer(torch.ones)
    codes, scales = plain.gate_up.to(torch.float8_e4m3fn), torch.ones(4, 2, 2)
    coded = replace(plain, gate_up=Fp8Matrix(codes, scales))
    for layer, captured in ((plain, None), (coded, None), (coded, [])):
        ops.captured = captured
        ops.experts(torch.ones(3, 64), layer)
    ops.captured = None


def _on_npu(name: str, overload: str) -> bool:
    def has(overload: str, key: str) -> bool:
        full = ".".join(filter(None, (name, overload)))
        return torch._C._dispatch_has_kernel_for_dispatch_key(full, key)

    keys = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(has(overload, key) for key in keys):
        return True
    packet = getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
    outs = [o for o in packet.overloads() if o.endswith("out")]  # a structured one calls its out
    return any(has(o, "PrivateUse1") for o in outs)


def check_renamed_arguments_are_noticed() -> None:
    """Rename each keyword and each operation of the backend's calls: a check must fail."""
    text = Path(backend.__file__).read_text()
    unnoticed, count = [], 0
    for change, source in _renamed(text):
        module = types.ModuleType(backend.__name__)
        exec(compile(source, change, "exec"), vars(module))
        count += 1
        try:
            check_operations(module)
            check_captures(module)
        except (TypeError, RuntimeError, AttributeError, AssertionError):
            continue
        unnoticed.append(change)
    assert count >= 20, count
    assert not unnoticed, unnoticed


def _renamed(text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if not called.startswith(("self._npu.", "self._runtime.", "graph.")):
            continue
        spots = [(k.lineno, k.col_offset, str(k.arg)) for k in node.keywords]
        end = node.func.end_col_offset or 0
        name = called.rpartition(".")[2]
        for line, start, old in [*spots, (node.func.end_lineno or 0, end - len(name), name)]:
            row = lines[line - 1]
            assert row[start : start + len(old)] == old
            changed = row[:start] + old + "_x" + row[start + len(old) :]
            yield f"{called}: {old}", "".join([*lines[: line - 1], changed, *lines[line:]])


def main(folder: Path) -> None:
    checks: dict[str, Callable[[], None]] = {
        "operations": lambda: check_operations(backend),
        "fake signatures": check_fake_signatures,
        "captures": lambda: check_captures(backend),
        "task groups": check_task_groups,
        "device calls": check_device_calls,
        "group options": check_group_options,
        "torch operations": lambda: check_torch_operations(folder),
        "renamed arguments": check_renamed_arguments_are_noticed,
    }
    results = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = ""
        except (AssertionError, TypeError, RuntimeError, AttributeError, ImportError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
