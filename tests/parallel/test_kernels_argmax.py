"""The best logit of each row in Triton, the first of equal ones, on one rank and over ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import argmax
from tests.parallel.cases import DEVICE, DTYPES, rand


def top_of(logits):
    """The value and the index in top_pair's pairs."""
    bits, index = argmax.top_pair(logits, 0).unbind(-1)
    return bits.contiguous().view(torch.float32), index.long()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 5000), (7, 2048), (3, 4097), (2, 9), (40, 33)])
def test_top_row(dtype, num_rows, width) -> None:
    """With few distinct values most rows have equal best logits; rows are views of wider ones."""
    logits = (rand(num_rows, width + 3, dtype=torch.float32).round() - 1).to(dtype)
    logits[:, width:] = 99.0
    value, index = top_of(logits.to(DEVICE)[:, :width])
    best = logits[:, :width].float().amax(-1)
    first = (logits[:, :width] == best[:, None].to(dtype)).int().argmax(-1)
    assert torch.equal(value.cpu(), best)
    assert torch.equal(index.cpu(), first)


def test_top_row_of_odd_values() -> None:
    """NaN, infinities, both zeros, denormals and negative numbers are ordered as in torch."""
    nan, inf = float("nan"), float("inf")
    logits = torch.full((7, 2500), -inf)
    logits[0] = nan
    logits[1, 2100] = -nan
    logits[2, 30], logits[2, 2400] = -0.0, 0.0
    logits[3, 7], logits[3, 2300] = inf, inf
    logits[4, 2050:] = -3.5
    logits[5, 99], logits[5, 98] = 1e-40, 0.0
    value, index = top_of(logits.to(DEVICE))
    assert index.tolist() == [0, 2100, 30, 7, 2050, 99, 0]
    want = torch.tensor([nan, nan, 0.0, inf, -3.5, 1e-40, -inf])
    assert torch.equal(value.cpu().nan_to_num(-99.0), want.nan_to_num(-99.0))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_pairs_name_the_first_best_of_all_ranks(size, num_rows) -> None:
    """Rows split over ranks have the same best id as whole ones, with equal logits and NaN too."""
    share = 50
    whole = rand(num_rows, size * share).mul(2).round()
    whole[0, 3] = float("nan")
    pairs = [
        argmax.top_pair(part.to(DEVICE), rank * share)
        for rank, part in enumerate(whole.split(share, -1))
    ]
    gathered = torch.stack(pairs)
    assert gathered.dtype == torch.int32
    ids = argmax.choose_pair(gathered).cpu()
    best = whole.nan_to_num(99.0)
    first = (best == best.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(ids, first)
    values = gathered.cpu()[..., 0].contiguous().view(torch.float32).nan_to_num(99.0).amax(0)
    assert torch.equal(values, best.amax(-1))
