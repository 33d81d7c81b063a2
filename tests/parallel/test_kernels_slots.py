"""Embedding with norm, the draft's input and the commit in Triton, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dataclasses import astuple, replace

from outrider.parallel.kernels import slots as kernels
from outrider.parallel.ops import Ops
from tests.parallel.cases import commit_case
from tests.parallel.test_kernels_rows import DEVICE, DTYPES, EPS, close, on_device, rand

OPS = Ops()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 6)])
def test_embed_rms_norm(dtype, shape) -> None:
    table, scale = rand(11, 100, dtype=dtype), rand(100, seed=1)
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))
    want = OPS.embed_rms_norm(tokens, table, scale, EPS)
    got = kernels.embed_rms_norm(*on_device(tokens, table, scale), EPS)
    close(got[0], want[0])
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mtp_input(dtype) -> None:
    """Token ids of a wider tensor's column, hiddens of a wider memory's rows."""
    table, scales = rand(11, 64, dtype=dtype), rand(2, 64, seed=1)
    tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))[:, :2]
    hidden = rand(3, 4, 64, seed=2, dtype=dtype)[:, :2]
    want = OPS.mtp_input(tokens, table, hidden, *scales, EPS)
    tokens, table, hidden, scales = on_device(tokens, table, hidden, scales)
    close(kernels.mtp_input(tokens, table, hidden, *scales, EPS), want)


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
def test_recall(width, dtype) -> None:
    slots, *_, memory = commit_case(5, dtype=dtype)
    tables = torch.randint(0, 99, (len(memory.length), 300))
    there = replace(memory, **{n: getattr(memory, n).to(DEVICE) for n in memory.__slots__})
    want = OPS.gather_slots(slots, memory, tables[:, :200], width)
    got = kernels.gather_slots(slots.to(DEVICE), there, tables.to(DEVICE)[:, :200], width)
    for name in want.__slots__:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
