"""Compiles every kernel for capability 9.0 as models launch it, with no GPU at hand.

    python -m tests.parallel.compile_kernels -> JSON: names of the kernels compiled, and of all,
                                                and what each FP8 launch of gemv uses

Triton's interpreter shows what a kernel computes, not that it compiles. Here the launchers get CPU
tensors whose is_cuda is True, and a launch ends once the kernel is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from outrider.parallel.formats import Fp8Matrix, Int4Matrix, StackedMatrix
from outrider.parallel.group import OneShotBuffers, TwoShotBuffers
from outrider.parallel.kernels import (
    argmax,
    attention,
    expert_routing,
    experts,
    gdn_prefill,
    gdn_verify,
    gemv,
    launch,
    matmul,
    norms,
    one_shot,
    pages,
    sampling,
    scan,
    slots,
    two_shot,
)
from outrider.parallel.kernels import fp8 as fp8_kernels
from outrider.parallel.operands import (
    ExpertLayer,
    GdnLayer,
    PickRows,
    Rows,
    SlotMemory,
    SlotSampling,
)
from outrider.parallel.ops import Ops

H, D, PAGE, PAGES, X = 2048, 256, 64, 48, 6
COMPILED: dict[str, object] = {}
HELD: list[dict[str, int]] = []
"""Of each launch of gemv with FP8, which is to hold its weight in registers: bytes of stack, where
registers are spilled; bytes of shared memory a warp; and shuffles between lanes that are no sum."""


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def flags(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def gdn_layer() -> GdnLayer:
    k = h = 8
    return GdnLayer(
        num_k_heads=k,
        num_v_heads=h,
        head_k_dim=128,
        head_v_dim=128,
        conv_weight=bf16(4, 3072),
        rate=torch.zeros(h),
        dt_bias=bf16(h),
        norm_weight=torch.zeros(128),
        eps=1e-6,
        gate="silu",
        conv=bf16(9, 3 + X, 3072),
        state=torch.zeros(9, h, 128, 128),
        factors=torch.zeros(9, X, k * 128 + h * 129),
    )


def products(arrivals: Tensor) -> None:
    for n in (1, 6, 12, 24, 48):
        matmul.few_rows(bf16(n, 2048), bf16(4112, 2048), arrivals)
        matmul.few_rows(bf16(n, 1024), bf16(2048, 1024), arrivals)
        matmul.few_rows_swiglu(bf16(n, 2048), bf16(6144, 2048), arrivals)
        matmul.head_top_pair(bf16(n, H), bf16(4096, H), 0)
        small, scales = bf16(4096, H).to(torch.float8_e4m3fn), torch.zeros(4096)
        matmul.head_top_pair_fp8(bf16(n, H), small, scales, 0)


def passes(batch: int, num_rows: int) -> None:
    """The rest of a pass, for `batch` slots with `num_rows` rows each."""
    scale, hidden = torch.zeros(H), bf16(batch, num_rows, H)
    norms.add_rms_norm(hidden, hidden, scale, 1e-6)
    matmul.swiglu(bf16(batch * num_rows, 12288))
    argmax.choose_pair(torch.zeros(2, batch, 2, dtype=torch.int32))
    argmax.top_pair(bf16(batch * num_rows, 124160), 0)
    table = bf16(100, H)
    norms.embed_rms_norm(ints(batch, num_rows), table, scale, 1e-6)
    norms.mtp_input(ints(batch, num_rows), table, hidden, scale, scale, 1e-6)
    turn = torch.zeros(PAGES * PAGE, 64)
    who, table = ints(batch), ints(batch, PAGES)
    positions, index, cos, sin, lengths = pages.locate_rows(
        who, who, table, turn, turn, num_rows, PAGE
    )
    where = Rows(
        slots=who, positions=positions, lengths=lengths, block_table=table, kv_index=index,
        counts=who, cos=cos, sin=sin,
    )  # fmt: skip
    for n, m in ((4, 1), (8, 2)):
        kv = bf16(100, PAGE, m, D)
        proj = bf16(batch, num_rows, (2 * n + 2 * m) * D)
        qk, v, gate = proj.split_with_sizes(((n + m) * D, m * D, n * D), -1)
        qk, v = qk.unflatten(-1, (n + m, D)), v.unflatten(-1, (m, D))
        scales = torch.zeros(n + m, D)
        q = pages.qk_norm_rope_write(qk, v, scales, 1e-6, kv, kv, where)
        pages.qk_norm_rope_write(qk[:, :, n:], v, scales[n:], 1e-6, kv, kv, where)
        attention.paged_attention(q, kv, kv, where, gate)


def delta_net(batch: int, num_rows: int, arrivals: Tensor) -> None:
    own, who = gdn_layer(), ints(batch)
    proj = bf16(batch, num_rows, sum(own.widths))
    if num_rows > X:
        z = proj.split_with_sizes(own.widths, -1)[1].unflatten(-1, (8, 128))
        gdn_prefill.chunk_inputs(proj, own, who, who)
        gdn_prefill.keep_window(proj, own, who, who)
        norms.gated_rms_norm(bf16(batch, num_rows, 8, 128), z, own.norm_weight, 1e-6, "silu")
        return
    gdn_verify.gdn_verify(proj, own, who, who, X, arrivals)


def exchange(num_rows: int) -> None:
    """What the ranks send each other, for so many rows."""
    sequence = torch.zeros(256, dtype=torch.int32)
    buffers = OneShotBuffers(ints(2, 2, 256, 2560), ints(2), sequence, 0, 2)
    part = bf16(num_rows, H)
    one_shot.sum_add_rms_norm(part, part, torch.zeros(H), 1e-6, buffers)
    one_shot.choose_over_ranks(ints(num_rows, 1940), 0, buffers)
    if num_rows <= gemv.MAX_ROWS:
        part = matmul.few_rows_sent(bf16(num_rows, 1024), bf16(H, 1024), buffers)
        one_shot.sum_add_rms_norm(part, part, torch.zeros(H), 1e-6, buffers, sent=True)
    flags, sequence = torch.zeros(2, 2, 128, dtype=torch.int32), sequence[:128]
    many = TwoShotBuffers(bf16(2, 1 << 22), bf16(1 << 23), flags, ints(3, 2), sequence, 0, 2)
    two_shot.sum_add_rms_norm(part, part, torch.zeros(H), 1e-6, many)


def ends(batch: int) -> None:
    """The beginning and the end of an iteration."""
    memory = SlotMemory(
        length=ints(9), last=ints(9), kept=ints(9), fold=ints(9), fresh=ints(9, X),
        hidden=bf16(9, X, H),
    )  # fmt: skip
    slots.gather_slots(ints(batch), memory, ints(9, PAGES), X)
    slots.accept_commit(
        ints(batch), ints(batch, X - 1), ints(batch, X), ints(batch), bf16(batch, X, H), memory
    )


def sampled(batch: int, num_rows: int) -> None:
    """Picking the tokens of sampled rows, drafts among them."""
    width = 124160
    by_slot = SlotSampling(
        seed=ints(9), drawn=flags(9), scale=torch.zeros(9), top_k=ints(9), top_p=torch.zeros(9),
        log_min_p=torch.zeros(9), reported=flags(9), edited=flags(9), repetition=torch.zeros(9),
        frequency=torch.zeros(9), presence=torch.zeros(9), banned_until=ints(9),
        history=torch.zeros(9, width, dtype=torch.int32), bias=torch.zeros(9, width),
        masked=flags(9), masks=torch.zeros(9, X, width // 32, dtype=torch.int32),
    )  # fmt: skip
    sequence = torch.zeros(256, dtype=torch.int32)
    buffers = OneShotBuffers(ints(2, 2, 256, 2560), ints(2), sequence, 0, 2)
    logits = bf16(batch, num_rows, width)
    rows = PickRows(slots=ints(batch), last=ints(batch), drafts=ints(batch, X - 1))
    for group in (None, buffers):
        sampling.pick_ids(logits, 0, group, rows, by_slot, 20, exact=True)
        sampling.pick_ids(logits[:, :1], 0, group, rows, by_slot, None, exact=False)
    flat, drawn = logits.flatten(0, 1), matmul.Sampled(0, num_rows, rows, by_slot)
    scan.noised_keys(flat, 0, rows, by_slot)
    slots.count_tokens(by_slot.history, ints(batch), ints(batch, X), ints(batch), 0)
    if len(flat) <= matmul.MAX_ROWS:
        small, scales = bf16(4096, H).to(torch.float8_e4m3fn), torch.zeros(4096)
        for w, scale in ((bf16(4096, H), None), (small, scales)):
            matmul.head_keys(bf16(len(flat), H), w, scale, drawn)
            matmul.head_logits(bf16(len(flat), H), w, scale)


def fp8(*shape: int) -> Fp8Matrix:
    scales = torch.zeros(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    return Fp8Matrix(torch.empty(shape, dtype=torch.float8_e4m3fn), scales)


def fp8_products(arrivals: Tensor) -> None:
    """The 27B model on one of two ranks: in-projections, o_proj, gate and up, down."""
    sequence = torch.zeros(8, dtype=torch.int32)
    buffers = OneShotBuffers(ints(2, 2, 8, 2560), ints(2), sequence, 0, 2)
    delta_net = StackedMatrix((fp8(8192, 5120), bf16(48, 5120)))
    for n in (6, 16, 48, 90):
        matmul.few_rows(bf16(n, 5120), delta_net, arrivals)
        matmul.few_rows_swiglu(bf16(n, 5120), fp8(17408, 5120), arrivals)
        for inner in (3072, 8704):
            x, w = bf16(n, inner), fp8(5120, inner)
            if matmul.can_send(x, w, buffers):
                matmul.few_rows_sent(x, w, buffers)
            else:
                matmul.few_rows(x, w, arrivals)
    fp8_kernels.plain(delta_net, torch.bfloat16)


def usage(compiled) -> dict[str, int]:
    """An entry of HELD."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return {
        "stack": max(int(size) for size in re.findall(r"STACK:(\d+)", text)),
        "shared": compiled.metadata.shared // compiled.metadata.num_warps,
        "shuffles": len(re.findall(r"SHFL\.IDX", text)),
    }


def int4(*shape: int) -> Int4Matrix:
    codes = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    return Int4Matrix(codes, torch.zeros(*shape[:-1], shape[-1] // 128))


def mixtures(arrivals: Tensor) -> None:
    """Layers of the 35B-A3B model on one of two ranks: few rows, groups of rows, a prompt."""
    num, i = 256, 256
    for matrix, counts in ((bf16, (6, 48, 384, 2048)), (fp8, (6, 2048)), (int4, (6, 2048))):
        layer = ExpertLayer(
            router=bf16(num, H), top_k=8, normalised=True, first_expert=0,
            gate_up=matrix(num, 2 * i, H), down=matrix(num, H, i),
            shared_gate_up=matrix(2 * i, H), shared_down=matrix(H, i), shared_gate=bf16(1, H),
        )  # fmt: skip
        for num_rows in counts:
            experts.experts(bf16(num_rows, H), layer, arrivals, Ops()._mlp)


def everything() -> None:
    arrivals = torch.zeros(1 << 14, dtype=torch.int32)
    products(arrivals)
    fp8_products(arrivals)
    mixtures(arrivals)
    for batch in (1, 32):
        passes(batch, X)
        delta_net(batch, X, arrivals)
        exchange(batch * X)
        ends(batch)
        sampled(batch, X)
    passes(1, 2048)
    delta_net(1, 2048, arrivals)


def kernels() -> Iterator[str]:
    """Names of all kernels that launch."""
    for module in (
        argmax,
        attention,
        expert_routing,
        experts,
        fp8_kernels,
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
    ):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                yield f"{module.__name__}.{name}"


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        COMPILED[f"{self.fn.__module__}.{self.fn.__name__}"] = compiled
        if self is gemv._gemv_kernel and options["FP8"]:
            HELD.append(usage(compiled))
        return compiled

    JITFunction.run = compile_only
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    launch._has_dependent_launch = lambda device: True  # type: ignore[assignment]
    everything()
    report = {"compiled": sorted(COMPILED), "all": sorted(kernels()), "held": HELD}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
