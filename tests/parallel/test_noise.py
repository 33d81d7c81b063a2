"""The noise of draws is Gumbel noise, to its ends, and no row, seed, position or id shares it.

Its bits are a hash, so every number here comes out the same each time: a test that passes once
passes always, until the hash changes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.parallel.sampling import gumbel, lanes, mix, row_keys

VOCAB = 248_320
"""Ids of Qwen3.5's vocabulary."""
EULER = 0.5772156649
ALL_ONES = (1 << 32) - 1


def unmix(x: Tensor) -> Tensor:
    """The number whose mix is x, both 32 bits in int64."""
    x = x ^ (x >> 16)
    x = (x * pow(0xC2B2AE35, -1, 1 << 32)) & ALL_ONES
    x = x ^ (x >> 13) ^ (x >> 26)
    x = (x * pow(0x85EBCA6B, -1, 1 << 32)) & ALL_ONES
    return x ^ (x >> 16)


def ids_with(bits: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """The id of each row whose noise is made of these bits."""
    first, second = (key.to(torch.int64) & ALL_ONES for key in row_keys(seeds, positions))
    return (unmix(unmix(torch.full_like(first, bits)) ^ second) - first) & ALL_ONES


def test_unmix_undoes_mix() -> None:
    x = torch.tensor([0, 1, 12345, 1 << 31, ALL_ONES])
    assert torch.equal(unmix(mix(lanes(x)).to(torch.int64) & ALL_ONES), x)


@pytest.mark.parametrize(
    ("bits", "noise"),
    [
        (0, 33 * math.log(2)),  # u = 2^-33
        (1, 33 * math.log(2) - math.log(3)),
        (ALL_ONES, -math.log(24 * math.log(2))),  # u = 1 - 2^-24
    ],
)
def test_the_noise_of_the_least_and_the_largest_bits_is_finite(bits: int, noise: float) -> None:
    seeds, positions = torch.tensor([0, 7, 1 << 40]), torch.tensor([0, 12, 1 << 20])
    ids = ids_with(bits, seeds, positions)
    values = gumbel(seeds, positions, ids).diagonal()
    torch.testing.assert_close(values, torch.full((3,), noise), rtol=1e-6, atol=1e-6)


def test_noise_is_as_exact_as_float32_can_be() -> None:
    """Where it is largest too, and around u = 2^-8, where kernels change from a series to logs."""
    seeds, positions = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    edge = 1 << 24
    for bits in (0, 3, 1 << 12, edge - 1, edge, edge + 1000, 1 << 31, 3 << 30):
        value = gumbel(seeds, positions, ids_with(bits, seeds, positions)).item()
        exact = -math.log(-math.log1p(-(bits + 0.5) * 2.0**-32))
        assert value == pytest.approx(exact, abs=1e-5), bits


def test_a_row_of_equal_logits_draws_all_its_ids_alike() -> None:
    """300 rows of Qwen's vocabulary, some with noise that a uniform number of 24 bits cannot make:
    at the largest one that it can, many ids would be equal, and the smallest of them would win."""
    ids, tops, winners = torch.arange(VOCAB), [], []
    for rows in torch.arange(300).split(5):
        top, winner = gumbel(rows // 7, 1000 + rows, ids).max(1)
        tops.append(top)
        winners.append(winner)
    top, winner = torch.cat(tops), torch.cat(winners)
    assert top.isfinite().all()
    assert top.max() > 25 * math.log(2)
    counts = torch.bincount(winner * 6 // VOCAB, minlength=6)
    assert ((counts - 50) ** 2 / 50).sum() < 20.5  # chi-square of 5 degrees, one in 1,000
    # The largest of V numbers is Gumbel noise again, larger by ln V.
    assert (top.double() - math.log(VOCAB)).mean().item() == pytest.approx(EULER, abs=0.2)


@pytest.mark.parametrize("token", [0, 1, VOCAB // 2, VOCAB - 1])
def test_every_id_has_gumbel_noise(token: int) -> None:
    """Its distribution over 100,000 rows, first and last id too (Kolmogorov and Smirnov)."""
    rows = torch.arange(100_000)
    noise = gumbel(rows % 10, rows // 10, torch.tensor([token])).flatten().double().sort().values
    uniform = (-(-noise).exp()).exp()
    distance = (uniform - (rows + 0.5) / len(rows)).abs().max()
    assert distance * len(rows) ** 0.5 < 1.95  # one in 1,000
    assert noise.mean().item() == pytest.approx(EULER, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


NUM = 50_000
PAIRS = {
    "neighbouring positions": ((3, 0, 5), (3, 1, 5)),
    "positions 65,536 apart": ((3, 0, 5), (3, 1 << 16, 5)),
    "neighbouring seeds": ((3, 0, 5), (4, 0, 5)),
    "seeds that differ above 32 bits": ((3, 0, 5), (3 + (1 << 32), 0, 5)),
    "seeds that differ in the last bit": ((3, 0, 5), (3 + (1 << 62), 0, 5)),
    "seeds with their halves exchanged": ((3 + (9 << 32), 0, 5), (9 + (3 << 32), 0, 5)),
    "neighbouring ids": ((3, 0, 5), (3, 0, 6)),
    "ids of two ranks": ((3, 0, 5), (3, 0, 5 + VOCAB // 2)),
    "a position for an id": ((3, 0, 5), (3, 5, 0)),
    "one more seed, one position less": ((3, 1, 5), (4, 0, 5)),
    "one more id, one position less": ((3, 1, 5), (3, 0, 6)),
}
"""Two of (seed, position, id) each, of which the position runs over NUM values."""


@pytest.mark.parametrize("pair", PAIRS)
def test_noises_are_independent(pair: str) -> None:
    """No two are equal more often than by chance, and they do not move together."""
    rows = torch.arange(NUM)
    first, second = (
        gumbel(torch.full((NUM,), seed), rows * 3 + position, torch.tensor([token])).flatten()
        for seed, position, token in PAIRS[pair]
    )
    assert (first == second).sum() <= 1
    together = torch.stack((first, second)).double()
    assert abs(torch.corrcoef(together)[0, 1].item()) < 4 / NUM**0.5
    both_large = ((together > 1.0).all(0)).double().mean().item()
    large = 1 - math.exp(-math.exp(-1.0))
    assert both_large == pytest.approx(large**2, abs=0.006)


def test_noise_of_a_share_is_that_of_the_whole() -> None:
    """Bit for bit, however the ids are cut: vector code has a remainder elsewhere then."""
    seeds, positions = torch.arange(5) << 33, torch.arange(5) * 1001
    whole = gumbel(seeds, positions, torch.arange(1003))
    for first, width in ((0, 501), (501, 502), (7, 1), (13, 37), (990, 13)):
        share = gumbel(seeds, positions, torch.arange(first, first + width))
        assert torch.equal(share, whole[:, first : first + width])
    assert torch.equal(gumbel(seeds[2:3], positions[2:3], torch.arange(1003)), whole[2:3])
