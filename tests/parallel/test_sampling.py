"""Tokens are picked as by hand (tests/sampling.py), on one rank and on several, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.model.sampling import SamplingMemory, features_of
from outrider.model.step import Join, Sampling
from outrider.parallel import sampling as definition
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


def pick_rows(
    logits: Tensor,
    samplings: list[Sampling],
    last: list[int],
    ranks: int,
    *,
    exact: bool = True,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """The tokens [B, R] of rows with these logits [B, R, V], R of each slot, on `ranks` ranks.

    last: of each slot, the position before that of its first row.
    """
    num_slots, _, width = logits.shape

    def on_rank(group: Group) -> Tensor:
        device = open_device("cpu", 0, group)
        memory = SamplingMemory(num_slots, logits.shape[1], width, device)
        for slot, how in enumerate(samplings):
            join = Join(slot=slot, request=slot, tokens=[1], pages=[], sampling=how)
            memory.reset(msgspec.structs.replace(join, end_ids=list(end_ids)))
        mine = logits[..., memory.first_id : memory.first_id + memory.width]
        device.ops.head_logits = lambda *_: mine
        rows = PickRows(slots=torch.arange(num_slots), last=torch.tensor(last))
        head = (torch.empty(0), None, memory.first_id, group)
        features = features_of(samplings)
        return device.ops.pick_ids(
            torch.empty(0), *head, rows, memory.by_slot, features, exact=exact
        )[0]

    if ranks == 1:
        return on_rank(alone())
    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(on_rank, threads(ranks))
    assert all(torch.equal(tokens, first) for tokens in others), "ranks disagree"
    return first


def pick(logits: Tensor, samplings: list[Sampling], positions: list[int], ranks: int) -> list[int]:
    """The tokens of rows with these logits [N, V], each the one row of a slot."""
    last = [position - 1 for position in positions]
    return pick_rows(logits.unsqueeze(1), samplings, last, ranks)[:, 0].tolist()


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


SHAPES = [
    dict(zip(("top_k", "top_p", "min_p"), values))
    for values in product((0, 7), (1.0, 0.85), (0.0, 0.04))
]


def chi_square_limit(degrees: int) -> float:
    """What the statistic exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.72 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("candidates", [CANDIDATES, 2])
@pytest.mark.parametrize("filters", SHAPES, ids=str)
def test_draws_have_the_probabilities_of_the_renormalised_softmax(
    filters: dict[str, float], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 draws of ten seeds, on one rank and on two. Ranks that offer two candidates have to
    search where the kept set ends: those draw 20,000 times."""
    monkeypatch.setattr(definition, "CANDIDATES", candidates)
    logits = torch.randn(14, generator=torch.Generator().manual_seed(1)).mul(1.5)
    samplings = [Sampling(temperature=0.8, seed=s << 30, **filters) for s in range(10)]  # type: ignore[arg-type]
    num_draws = 100_000 if candidates == CANDIDATES else 20_000
    rows = logits.expand(10, num_draws // 10, -1)
    tokens = pick_rows(rows, samplings, list(range(10)), 1)
    assert torch.equal(pick_rows(rows, samplings, list(range(10)), 2), tokens)
    counts = torch.bincount(tokens.flatten(), minlength=14)
    kept = kept_by_hand(logits * torch.tensor(1 / 0.8), samplings[0])
    expected = torch.zeros(14, dtype=torch.float64)
    expected[kept] = (logits[kept].double() / 0.8).softmax(0) * num_draws
    assert counts[expected == 0].sum() == 0
    assert expected[kept].min() > 20
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert statistic < chi_square_limit(len(kept) - 1)
    assert len(kept) == 14 or any(filters.values())


@given(
    st.lists(
        st.sampled_from([-math.inf, -3.0, -0.5, 0.0, 0.25, 1.0, 2.0]), min_size=12, max_size=12
    ),
    st.sampled_from([0, 1, 2, 3, 5, 11, 12, 13, 50]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-12]),
    st.sampled_from([0.0, 1.0, 0.5, 0.05, 1e-12]),
    st.sampled_from([0.0, 1e-6, 0.5, 1.0, 7.0]),
    st.sampled_from([1, 2, 3, 64]),
    st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_row_is_picked_as_by_hand(
    logits: list[float], top_k: int, top_p: float, min_p: float, heat: float, most: int, seed: int
) -> None:
    """Few distinct logits, so that most kept sets end among equal ones; `most` candidates."""
    how = Sampling(temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = torch.tensor(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "CANDIDATES", most)
        picked = [pick(row[None], [how], [seed % 1000], ranks) for ranks in (1, 2, 3)]
    assert picked == [[pick_by_hand(row, how, seed % 1000)]] * 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "equal", "ruled out"])
def test_one_kept_id_is_the_greedy_one(kind: str, ranks: int) -> None:
    logits = rows_of(kind, 4)
    ways = (
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0, "top_k": 1},
        {"top_k": 300, "top_p": 1e-9},
    )
    for filters in ways:
        samplings = [Sampling(temperature=1.5, seed=s, **filters) for s in range(4)]  # type: ignore[arg-type]
        assert pick(logits, samplings, [3] * 4, ranks) == logits.argmax(1).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 90}, 90),
        ({"top_p": 0.25}, 50),
        ({"top_p": 0.7501}, 151),
        ({"top_k": 100, "top_p": 0.5}, 50),
        ({"min_p": 1.0}, 200),
        ({}, 200),
    ],
)
def test_of_equal_logits_the_smallest_ids_are_kept(
    filters: dict[str, float], kept: int, ranks: int
) -> None:
    how = [Sampling(temperature=0.9, seed=2, **filters)]  # type: ignore[arg-type]
    tokens = pick_rows(torch.full((1, 2500, 200), -2.5), how, [0], ranks)
    assert set(tokens.flatten().tolist()) == set(range(kept))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_count_among_the_ids_that_are_not_ruled_out(filters: str, ranks: int) -> None:
    """Ids with a logit of -inf, and ids that are banned, are never drawn and take no place."""
    logits = rows_of("flat", 6)
    logits[:, 1::5] = float("-inf")
    best = [int(i) for i in logits.topk(2).indices.flatten()]
    how = [
        Sampling(temperature=1.2, seed=s, min_tokens=4, **FILTERS[filters])  # type: ignore[arg-type]
        for s in range(6)
    ]
    tokens = pick_rows(logits.unsqueeze(1), how, [1] * 6, ranks, end_ids=best)[:, 0].tolist()
    logits[:, best] = float("-inf")
    assert tokens == [pick_by_hand(row, one, 2) for row, one in zip(logits, how)]
    assert not {*tokens} & {*best, *range(1, WIDE, 5)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_hang_nothing_and_leave_other_rows_alone(
    value: float, ranks: int
) -> None:
    """Rows of them, and rows with some: every token is an id, and the rows between are right."""
    logits = rows_of("flat", len(FILTERS)).repeat_interleave(3, 0)
    logits[::3] = value
    logits[1::3, 5:900:9] = value
    samplings = [Sampling(temperature=1.0, seed=9, **f) for f in FILTERS.values() for _ in "123"]  # type: ignore[arg-type]
    positions = list(range(len(logits)))
    tokens = pick(logits, samplings, positions, ranks)
    assert all(0 <= token < WIDE for token in tokens)
    if value == float("inf"):
        assert all(logits[row, tokens[row]] == value for row in positions if row % 3 < 2)
    by_hand = [pick_by_hand(*row) for row in zip(logits, samplings, positions)]
    assert tokens[2::3] == by_hand[2::3]


def test_drafts_of_filtered_rows_are_near_the_likeliest_id_and_ranks_agree() -> None:
    """Not exact: whatever the filters are, an id with 2 % of the largest probability is left."""
    logits = (3 * rows_of("flat", 1)).expand(600, -1).unsqueeze(0)
    how = [Sampling(temperature=1.0, seed=5, top_k=300)]
    exact = pick_rows(logits, how, [0], 2).flatten()
    near = pick_rows(logits, how, [0], 2, exact=False).flatten()
    assert torch.equal(near, pick_rows(logits, how, [0], 1, exact=False).flatten())
    shares = logits[0, 0].softmax(0)
    assert shares[near].min() >= 0.02 * shares.max() > shares[exact].min()
    assert 0.5 < (near == exact).float().mean() < 1.0


def test_noise_is_finite_where_its_random_number_is_extreme() -> None:
    """The 32 bits of the first are 6 below the largest, which float32 rounds to 1; then 8."""
    extremes = (11, 588_230, 1922, -2.811541), (53, 1_893_303, 2068, 20.040644)
    for seed, position, token, right in extremes:
        seeds, positions = torch.tensor([seed]), torch.tensor([position])
        (noise,) = definition.gumbel(seeds, positions, torch.tensor([token])).flatten().tolist()
        assert noise == pytest.approx(right, rel=1e-6)
