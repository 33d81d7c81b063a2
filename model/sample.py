"""Sampling: a token for each row, drawn from the row's own distribution.

    (seed, position) -> uniform -> u      logits, filters, u -> draw -> ids

The random number is a function of the request's seed and the token's position, rows do not
influence each other, and nothing is remembered. So a token does not depend on the batch, on K or on
the number of ranks. Letters: N rows | V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """32-bit finaliser of MurmurHash3 (A. Appleby, public domain) on int64 lanes."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [N] int64 -> a random number each, in (0, 1), float32 [N].

    Of 24 random bits the largest plus one half would need 25 bits, and round to 1.0. So there are
    23.
    """
    x = _mix(seeds)
    x = _mix(x ^ _mix((seeds >> 32) + 0x9E3779B9))
    x = _mix(x + _mix(positions + 0x7F4A7C15))
    return ((x >> 9).to(torch.float32) + 0.5) * 2.0**-23


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
) -> Tensor:
    """Draw an id for each row; -> [N] int64.

    logits [N, V] float32; temperature, top_p, min_p and the random number u [N] float32, of which
    temperature is above 0; top_k [N] int64, 0 for no limit. The ids are sorted by probability, the
    smaller id first among equals, and filtered: top_k, then top_p, and min_p times the largest
    probability as the least. The first id where the running sum of probabilities is above u is
    drawn.
    """
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / temperature.unsqueeze(1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    cut_k = (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    probs = torch.softmax(ordered.masked_fill(cut_k, float("-inf")), -1)
    before = probs.cumsum(-1) - probs
    keep = (before < top_p.unsqueeze(1)) & (probs >= min_p.unsqueeze(1) * probs[:, :1])
    keep[:, 0] = True
    mass = (probs * keep).cumsum(-1)
    index = (mass <= u.unsqueeze(1) * mass[:, -1:]).sum(-1, keepdim=True)
    last = keep.sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(index, last)).squeeze(1)
