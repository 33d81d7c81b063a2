"""The LM head: its vocabulary rows are split over ranks, which agree on the best token.

    hidden [N, H] -> logits of this rank [N, v] -> its best (value, id) -> gather -> ids [N]

Each rank sends one pair of 8 bytes for a row, and some more pairs where the row's request filters
or reports (parallel/sampling.py). All ranks compare the same gathered pairs, so they choose the
same id: the smallest of those that have the largest logit, or the largest sum of logit and noise.
Letters: B slots | R rows | N rows of any slots | H hidden | V vocabulary, v this rank's share
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.parallel.device import Device
from outrider.parallel.formats import FP8_MAX
from outrider.parallel.operands import PickRows, SamplingFeatures, SlotSampling
from outrider.parallel.sampling import log_probs, log_probs_of


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [v, H] -> (w8 float8_e4m3fn [v, H], scales [v] float32).

    Each row of w8 times its scale is close to the row of the weight.
    """
    largest = weight.abs().amax(-1).float()
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    small = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for to, rows, scale in zip(small.split(8192), weight.split(8192), scales.split(8192)):
        to.copy_((rows.float() / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX))
    return small, scales


class LMHead:
    """One rank's share: weight [v, H] is rows rank * v to (rank + 1) * v of the head."""

    scales: Tensor | None = None

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp
        self.first_id = device.tp.rank * weight.shape[0]

    def greedy(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> the id of each row's best logit [N] int64, the same on every rank."""
        return self.ops.head_ids(hidden, self.weight, self.scales, self.first_id, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> all logits [N, V] float32, in vocabulary order, on every rank.

        For ablations and comparisons: nothing else gathers them.
        """
        local = self.ops.head_logits(hidden, self.weight, self.scales)
        return self.group.all_gather(local).transpose(0, 1).flatten(1).float()

    def log_probs(self, hidden: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
        """hidden [N, H], and the tokens [N] int64 that follow these rows -> ids and their log
        probabilities [N, 1 + num_top], the same on every rank: as sampling.log_probs."""
        logits = self.ops.head_logits(hidden, self.weight, self.scales).float()
        return log_probs(logits, tokens, num_top, self.first_id, self.group)

    def log_probs_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [N, H], ids [n] int64 -> log probabilities [N, n] of these ids behind these rows,
        the same on every rank."""
        logits = self.ops.head_logits(hidden, self.weight, self.scales).float()
        return log_probs_of(logits, ids, self.first_id, self.group)

    def pick(
        self,
        hidden: Tensor,
        rows: PickRows,
        by_slot: SlotSampling,
        features: SamplingFeatures,
        *,
        exact: bool = True,
    ) -> tuple[Tensor, ...]:
        """hidden [B, R, H] -> ids [B, R], then log probabilities where asked for: Ops.pick_ids."""
        head = (self.weight, self.scales, self.first_id, self.group)
        return self.ops.pick_ids(hidden, *head, rows, by_slot, features, exact=exact)


class Fp8Head(LMHead):
    """A head of float8 weights, which are half the bytes to read. It may choose other tokens than
    `head`, so only drafts are chosen with it: the target then keeps or rejects them."""

    def __init__(self, head: LMHead) -> None:
        self.ops, self.group, self.first_id = head.ops, head.group, head.first_id
        self.weight, self.scales = quantise_rows(head.weight)
