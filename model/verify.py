"""Which drafts survive, without any probability: those that equal the target's token.

    drafts [B, K], targets [B, K+1] -> kept [B] = 1 + length of the agreeing prefix

The target's token is its argmax, or its draw when the slot samples: the draw is a function of
(seed, position), so keeping drafts that equal it changes nothing but the speed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept(drafts: Tensor, targets: Tensor, limits: Tensor) -> Tensor:
    """drafts [B, K], targets [B, K+1], limits [B] (a slot's own K) -> kept [B], 1..limit+1."""
    num_drafts = drafts.shape[1]
    offered = torch.arange(num_drafts, device=drafts.device) < limits.unsqueeze(1)
    agrees = (drafts == targets[:, :num_drafts]) & offered
    return 1 + agrees.to(torch.int64).cumprod(1).sum(1)
