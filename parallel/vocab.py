"""The LM head: vocabulary rows over a group of ranks, and the one token they agree on.

    hidden [N, H] -> logits of this rank's slice [N, v] -> (value, id) pairs -> gather -> ids [N]

Eight bytes a row and rank cross for a greedy row; a sampled row needs all its logits. Every rank
compares the same gathered pairs, so ranks cannot disagree. Ties go to the smallest id.
Letters: N rows | H hidden | V vocabulary, v this rank's share
"""

from __future__ import annotations

from torch import Tensor

from parallel.device import Device


class LMHead:
    """weight [v, H]: rows [rank * v, (rank + 1) * v) of the whole head, over `device.tp`."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight, self.ops, self.group = weight, device.ops, device.tp
        self.first_id = device.tp.rank * weight.shape[0]

    def greedy(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> the likeliest id of each row [N] int64, the same on every rank."""
        pair = self.ops.top_pair(self.ops.linear(hidden, self.weight), self.first_id)
        return self.ops.choose_pair(self.group.all_gather(pair))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> all logits [N, V] float32, in vocabulary order, on every rank."""
        local = self.ops.linear(hidden, self.weight)
        if self.group.size == 1:
            return local.float()
        return self.group.all_gather(local).transpose(0, 1).flatten(1).float()
