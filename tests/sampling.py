"""Sampling by hand, the oracle of its tests: sort the whole row, cut it, take the best with noise.

    pick_by_hand(logits [V], sampling, position) -> the id of the token at that position

It shares the noise and the fixed-point mass with the definition, and nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.model.step import Sampling
from outrider.parallel.sampling import MASS_UNIT, gumbel


def kept_by_hand(x: Tensor, sampling: Sampling) -> list[int]:
    """The ids that the filters keep of x [V] float32 = logits / temperature, best first."""
    order = sorted(range(len(x)), key=lambda i: (-float(x[i]), i))
    values = [float(x[i]) for i in order]
    masses = [int(m) for m in ((x[order] - x[order[0]]).exp() * MASS_UNIT).to(torch.int64)]
    count = min(sampling.top_k or len(x), len(x))
    if sampling.top_p is not None:
        share = math.ceil(float(torch.tensor(sampling.top_p)) * float(sum(masses[:count])))
        reached = 0
        for index, mass in enumerate(masses):
            reached += mass
            if reached >= share:
                count = min(count, index + 1)
                break
    if sampling.min_p:
        floor = float(torch.tensor(values[0]) + torch.tensor(math.log(sampling.min_p)))
        count = min(count, sum(value >= floor for value in values))
    return order[: max(1, count)]


def pick_by_hand(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token that a row with these logits [V] makes at `position`."""
    if not sampling.temperature:
        return int(logits.argmax())
    x = logits.float() * torch.tensor(1.0 / sampling.temperature)
    kept = kept_by_hand(x, sampling)
    seeds, positions = torch.tensor([sampling.seed or 0]), torch.tensor([position])
    noised = x + gumbel(seeds, positions, torch.arange(len(x)))[0]
    return max(kept, key=lambda i: (float(noised[i]), -i))
