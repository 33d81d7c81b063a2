"""The slots' memory gathered and advanced in Triton, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dataclasses import astuple, replace

from outrider.parallel.kernels import slots as kernels
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, DTYPES, commit_case, on_device

OPS = Ops()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
def test_accept_commit(num_drafts, dtype) -> None:
    slots, drafts, targets, limits, hidden, memory = commit_case(num_drafts, dtype=dtype)
    copies = {n: getattr(memory, n).to(DEVICE, copy=True) for n in memory.__slots__}
    there = replace(memory, **copies)
    inputs = on_device(slots, drafts, targets, limits, hidden)
    want = OPS.accept_commit(slots, drafts, targets, limits, hidden, memory)
    got = kernels.accept_commit(*inputs, there)
    assert torch.equal(got.cpu(), want)
    for mine, its in zip(astuple(memory), astuple(there), strict=True):
        assert torch.equal(its.cpu(), mine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4])
def test_gather_slots(width, dtype) -> None:
    slots, *_, memory = commit_case(5, dtype=dtype)
    tables = torch.randint(0, 99, (len(memory.length), 300))
    there = replace(memory, **{n: getattr(memory, n).to(DEVICE) for n in memory.__slots__})
    want = OPS.gather_slots(slots, memory, tables[:, :200], width)
    got = kernels.gather_slots(slots.to(DEVICE), there, tables.to(DEVICE)[:, :200], width)
    assert got.noise is want.noise is None
    for name in set(want.__slots__) - {"noise"}:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


def test_counted_tokens_are_those_kept() -> None:
    history = torch.zeros(5, 70, dtype=torch.int32, device=DEVICE)
    slots, counts = torch.tensor([3, 0, 4, 4]), torch.tensor([2, 0, 1, 3])
    tokens = torch.tensor([[9, 9, 80], [1, 2, 3], [70, 70, 70], [10, 79, 9]])
    want = torch.zeros(5, 70, dtype=torch.int32)
    Ops().count_tokens(want, slots, tokens, counts, 10)
    moved = [t.to(DEVICE) for t in (slots, tokens, counts)]
    kernels.count_tokens(history, *moved, 10)
    assert torch.equal(history.cpu(), want)
    assert want.sum() > 0
