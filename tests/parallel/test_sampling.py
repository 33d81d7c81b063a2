"""Tokens are picked as by hand (tests/sampling.py), on one rank and on several, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from outrider.model.sampling import SamplingMemory, features_of
from outrider.model.step import Join, Sampling
from outrider.parallel.devices import open_device
from outrider.parallel.group import Group, alone, threads
from outrider.parallel.operands import PickRows
from outrider.parallel.sampling import CANDIDATES
from tests.sampling import kept_by_hand, pick_by_hand

WIDE = 1000
"""Ids of a row, many more than the candidates of a rank."""
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 20},
    "top_k 1": {"top_k": 1},
    "as many as candidates": {"top_k": CANDIDATES},
    "more than candidates": {"top_k": CANDIDATES + 1},
    "most of the vocabulary": {"top_k": WIDE - 1},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-9},
    "top_p near 1": {"top_p": 0.999},
    "min_p": {"min_p": 0.1},
    "min_p of all": {"min_p": 1e-9},
    "min_p 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95},
    "many and top_p": {"top_k": 300, "top_p": 0.9},
    "many and little": {"top_k": 300, "top_p": 0.2},
    "all": {"top_k": 300, "top_p": 0.97, "min_p": 0.01},
}


def rows_of(kind: str, count: int, width: int = WIDE) -> Tensor:
    """Logits [count, width] float32: peaked, flat, with ties, or with ids that are ruled out."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    if kind == "peaked":
        x *= 6
    if kind == "ties":
        x = x.mul(2).round()
    if kind == "equal":
        x = torch.zeros_like(x)
    if kind == "ruled out":
        x[:, ::3] = float("-inf")
        x[0] = float("-inf")
        x[0, 7] = 1.0
    return x.to(torch.bfloat16).float() if kind == "bfloat16" else x


def pick(logits: Tensor, samplings: list[Sampling], positions: list[int], ranks: int) -> list[int]:
    """The tokens of rows with these logits [N, V], each the one row of a slot, on `ranks` ranks."""
    width = logits.shape[1]

    def on_rank(group: Group) -> list[int]:
        device = open_device("cpu", 0, group)
        memory = SamplingMemory(len(samplings), width, device)
        for slot, sampling in enumerate(samplings):
            memory.reset(Join(slot=slot, request=slot, tokens=[1], pages=[], sampling=sampling))
        mine = logits[:, memory.first_id : memory.first_id + memory.width]
        device.ops.head_logits = lambda *_: mine.unsqueeze(1)
        rows = PickRows(slots=torch.arange(len(logits)), last=torch.tensor(positions) - 1)
        features = features_of(samplings)
        unused = torch.empty(0)
        head = (unused, None, memory.first_id, group)
        return device.ops.pick_ids(unused, *head, rows, memory.by_slot, features)[0][:, 0].tolist()

    if ranks == 1:
        return on_rank(alone())
    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(on_rank, threads(ranks))
    assert all(tokens == first for tokens in others), "ranks disagree"
    return first


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "equal", "ruled out", "bfloat16"])
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_those_picked_by_hand_on_any_number_of_ranks(kind: str, filters: str) -> None:
    logits = rows_of(kind, 6)
    samplings = [
        Sampling(temperature=t, seed=s, **FILTERS[filters])  # type: ignore[arg-type]
        for t, s in ((0.7, 3), (1.0, 1 << 40), (2.5, 7), (0.0, 1), (1.0, 3), (1e-6, 5))
    ]
    positions = [5, 900, 5, 6, 1 << 20, 8]
    by_hand = [pick_by_hand(row, *how) for row, *how in zip(logits, samplings, positions)]
    assert pick(logits, samplings, positions, 1) == by_hand
    for ranks in (2, 4):
        assert pick(logits, samplings, positions, ranks) == by_hand


def test_rows_with_and_without_filters_do_not_change_each_other() -> None:
    logits = rows_of("flat", 2).repeat(len(FILTERS), 1)
    samplings = [Sampling(temperature=1.0, seed=9, **f) for f in FILTERS.values() for _ in "12"]  # type: ignore[arg-type]
    positions = list(range(len(logits)))
    alone_each = [
        pick(row[None], [how], [position], 1)[0]
        for row, how, position in zip(logits, samplings, positions)
    ]
    assert pick(logits, samplings, positions, 2) == alone_each


def test_the_filters_cut_what_they_say() -> None:
    """The hand itself, on a distribution whose kept sets are plain to see."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = {
        name: set(kept_by_hand(logits, Sampling(temperature=1.0, **filters)))  # type: ignore[arg-type]
        for name, filters in {
            "top_k": {"top_k": 2},
            "top_p": {"top_p": 0.81},
            "top_p edge": {"top_p": 0.4},
            "of what top_k leaves": {"top_k": 2, "top_p": 0.62},
            "min_p": {"min_p": 0.2},
            "min_p one": {"min_p": 1.0},
            "all": {},
        }.items()
    }
    assert kept == {
        "top_k": {0, 1},
        "top_p": {0, 1, 2},
        "top_p edge": {0},
        "of what top_k leaves": {0},
        "min_p": {0, 1, 2},
        "min_p one": {0},
        "all": {0, 1, 2, 3},
    }
