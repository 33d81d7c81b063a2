"""The LM head: vocabulary rows over a group of ranks, and the one token they agree on.

    hidden [N, H] -> logits of this rank's slice [N, v] -> (value, id) pairs -> gather -> ids [N]

Eight bytes a row and rank cross for a greedy row; a sampled row needs all its logits. Every rank
compares the same gathered pairs, so ranks cannot disagree. Ties go to the smallest id.
Letters: N rows | H hidden | V vocabulary, v this rank's share
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.parallel.device import Device

FP8_MAX = 448.0
"""Largest float8_e4m3fn."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [v, H] -> (float8_e4m3fn [v, H], scales [v] float32), their product close to it."""
    largest = weight.abs().amax(-1).float()
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    small = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for to, rows, scale in zip(small.split(8192), weight.split(8192), scales.split(8192)):
        to.copy_((rows.float() / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX))
    return small, scales


class LMHead:
    """weight [v, H]: rows [rank * v, (rank + 1) * v) of the whole head, over `device.tp`."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp
        self.first_id = device.tp.rank * weight.shape[0]

    def greedy(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> the likeliest id of each row [N] int64, the same on every rank."""
        return self.ops.head_ids(hidden, self.weight, None, self.first_id, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> all logits [N, V] float32, in vocabulary order, on every rank."""
        local = self.ops.linear(hidden, self.weight)
        if self.group.size == 1:
            return local.float()
        return self.group.all_gather(local).transpose(0, 1).flatten(1).float()


class Fp8Head:
    """A draft's head at half the bytes: drafts may differ, what is kept of them may not."""

    def __init__(self, head: LMHead) -> None:
        self.ops, self.group, self.first_id = head.ops, head.group, head.first_id
        self.weight, self.scales = quantise_rows(head.weight)

    def greedy(self, hidden: Tensor) -> Tensor:
        """As LMHead.greedy, by the rounded weights."""
        return self.ops.head_ids(hidden, self.weight, self.scales, self.first_id, self.group)
