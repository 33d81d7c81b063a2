"""Draws follow the filtered distribution and depend on (seed, position) alone."""

from __future__ import annotations

import torch

from outrider.model.sample import draw, uniform


def one(logits, u, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    n = len(u)
    full = torch.full
    return draw(
        logits.expand(n, -1), full((n,), temperature), full((n,), top_k), full((n,), top_p),
        full((n,), min_p), u,
    )  # fmt: skip


def test_uniform_is_uniform_and_its_streams_differ() -> None:
    positions = torch.arange(20_000)
    first = uniform(torch.zeros_like(positions), positions)
    second = uniform(torch.ones_like(positions), positions)
    high = uniform(torch.full_like(positions, 1 << 40), positions)
    for u in (first, second, high):
        assert u.min() > 0
        assert u.max() < 1
        counts = torch.histc(u, 20, 0, 1)
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom
    pairs = torch.stack((first[:-1], first[1:], second[:-1], high[:-1]))
    assert (torch.corrcoef(pairs) - torch.eye(4)).abs().max() < 0.03


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    u = uniform(torch.full((40_000,), 9), torch.arange(40_000))
    for temperature in (0.5, 1.0, 2.0):
        share = torch.bincount(one(logits, u, temperature), minlength=4) / len(u)
        assert (share - torch.softmax(logits[0] / temperature, 0)).abs().max() < 0.01


def test_filters_cut_what_they_say() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    u = torch.linspace(0.0001, 0.9999, 400)
    seen = {
        "top_k": set(one(logits, u, top_k=2).tolist()),
        "top_p": set(one(logits, u, top_p=0.81).tolist()),
        "top_p edge": set(one(logits, u, top_p=0.4).tolist()),
        "min_p": set(one(logits, u, min_p=0.2).tolist()),
        "min_p one": set(one(logits, u, min_p=1.0).tolist()),
        "all": set(one(logits, u).tolist()),
    }
    assert seen == {
        "top_k": {0, 1},
        "top_p": {0, 1, 2},
        "top_p edge": {0},
        "min_p": {0, 1, 2},
        "min_p one": {0},
        "all": {0, 1, 2, 3},
    }


def test_extreme_values_stay_in_the_vocabulary() -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0, float("-inf")]])
    u = torch.tensor([1e-8, 0.5, 1 - 1e-7])
    assert one(logits, u, temperature=1e-5).tolist() == [0, 0, 0]
    assert one(logits, u, temperature=100.0, top_k=1000).max() < 4
    ties = torch.zeros(1, 5)
    assert one(ties, torch.tensor([1e-6])).tolist() == [0]
    assert one(ties, torch.tensor([1 - 1e-7])).tolist() == [4]


def test_uniform_is_never_0_or_1() -> None:
    """Seed 6 has every leading random bit set at position 521,908, seed 0 none at 2,640,712."""
    most, least = uniform(torch.tensor([6, 0]), torch.tensor([521_908, 2_640_712]))
    assert 0.0 < least < 1e-6
    assert 1.0 - 1e-6 < most < 1.0
