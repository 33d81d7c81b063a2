"""Inputs and comparisons that tests of several backends share; kernels run on DEVICE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from outrider.parallel.operands import Rows, SlotMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
BFLOAT16_TOLERANCE = 2.0**-7 if DEVICE == "cuda" else 2.0**-5
"""One rounding more or less. Triton's interpreter truncates to bfloat16 where a GPU rounds, which
costs one unit at each rounding."""
EPS = 1e-6
EXTRA_ROWS = 2
"""Rows that the slots' memory has beyond those of the pass."""
UNUSED = torch.empty(0)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def close(got: Tensor, want: Tensor, float32: float = 2e-6) -> None:
    """Same shape and dtype, and differences of at most a tolerance times 1 + |want|: `float32`, for
    sums in another order, or BFLOAT16_TOLERANCE."""
    got = got.cpu()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    near = float32 if want.dtype == torch.float32 else BFLOAT16_TOLERANCE
    error = (got.float() - want.float()).abs()
    assert (error <= near * (1.0 + want.float().abs())).all(), error.max()


def run_ranks(work: Callable[..., None], ranks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run work(rank, *ranks[rank], queue) in a process for each rank; -> what each of them put on
    the queue, as (rank, result)."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=work, args=(rank, *arguments, queue))
        for rank, arguments in enumerate(ranks)
    ]
    for process in processes:
        process.start()
    try:
        results = dict(queue.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(len(ranks))]


def written_rows(cos: Tensor, sin: Tensor, kv_index: Tensor) -> Rows:
    """Rows of which Ops.qk_norm_rope_write reads what it needs."""
    return Rows(
        slots=UNUSED, positions=UNUSED, lengths=UNUSED, block_table=UNUSED, counts=UNUSED,
        kv_index=kv_index, cos=cos, sin=sin,
    )  # fmt: skip


def attending_rows(
    block_table: Tensor, positions: Tensor, lengths: Tensor, host_lengths: list[int] | None = None
) -> Rows:
    """Rows of which Ops.paged_attention reads what it needs."""
    return Rows(
        slots=UNUSED, kv_index=UNUSED, counts=UNUSED, cos=UNUSED, sin=UNUSED,
        positions=positions, lengths=lengths, block_table=block_table, host_lengths=host_lengths,
    )  # fmt: skip


def commit_case(
    num_drafts: int, batch: int = 5, width: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, SlotMemory]:
    """Drafts of which some agree: slots, drafts, targets, limits, hidden, memory of Ops'
    accept_commit; slots in no order, more of them than the batch has, the padding slot first."""
    generator = torch.Generator().manual_seed(num_drafts)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    drafts, targets = integers(2, batch, num_drafts), integers(2, batch, num_drafts + 1)
    hidden = torch.randn(batch, num_drafts + 1, width, generator=generator).to(dtype)
    count, rows = batch + 3, num_drafts + 1 + EXTRA_ROWS
    memory = SlotMemory(
        length=integers(100, count),
        last=integers(100, count),
        kept=integers(3, count),
        fold=integers(3, count),
        fresh=integers(100, count, rows),
        hidden=torch.zeros(count, rows, width, dtype=dtype),
    )
    padding = torch.tensor([count - 1])
    slots = torch.randperm(count - 1, generator=generator)[: batch - 1]
    slots = torch.cat((padding, slots))
    return slots, drafts, targets, integers(num_drafts + 1, batch), hidden, memory
