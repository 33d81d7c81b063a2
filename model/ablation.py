"""Behaviours that were given up for speed, kept so that what they cost can be measured.

    Ablation (cluster.yaml: ablation.*) -> old_device, undo(Executor), synced -> the same tokens

Nothing here runs by default: a Runner asks once, at its start, and parts are replaced.
Letters: B slots | R = K+1 rows | H hidden | V vocabulary | k, h key and value heads | g = h / k
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.model.config import Ablation
from outrider.model.executor import DecodeBatch, Executor, MtpDrafter, RunPiece
from outrider.model.gdn import GatedDeltaNet
from outrider.model.step import MAX_DRAFT_TOKENS
from outrider.parallel.device import Device
from outrider.parallel.graph import Graphs
from outrider.parallel.linear import ColumnLinear
from outrider.parallel.vocab import LMHead


def old_device(device: Device, old: Ablation) -> Device:
    """The device without its graphs, where the ablation says so."""
    if not old.no_graph:
        return device
    return replace(device, capabilities=replace(device.capabilities, graphs=False))


def undo(it: Executor) -> None:
    """Put the old parts in their places."""
    old, device = it.run.ablation, it.device
    if old.merge_then_split:
        for layer in it.target.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                layer.mixer.in_proj = PackedProjections(layer.mixer, device)
    if old.greedy_probabilities or old.gather_logits:
        it.head = target = GatheredHead(it.head.weight, device, old.greedy_probabilities)
        if isinstance(it.drafter, MtpDrafter):
            draft = GatheredHead(it.drafter.head.weight, device, old.greedy_probabilities)
            it.drafter.head = draft
            if old.greedy_probabilities:
                it.check = ProbabilityCheck(target, draft)


def synced(graphs: Graphs, device: Device, batch: DecodeBatch) -> RunPiece:
    """Runs each piece of an iteration as a graph of its own, and waits after each draft pass.

    Rows that sample are in no graph; the waits stay.
    """

    def run(name: int | str, work: Callable[[], Any]) -> Any:
        key = (len(batch.slots), batch.num_drafts, name)
        result = graphs.run(key, work) if batch.with_logits is None else work()
        if isinstance(name, int):
            device.synchronise()
        return result

    return run


class PackedProjections(ColumnLinear):
    """A delta net's q, k, v, z, b, a as four products, packed by key head and unpacked again.

    The packed layouts, [k, (Dk, Dk, g Dv, g Dv)] and [k, (g, g)], are those of Qwen3-Next's
    checkpoints, which code for both models used to start from.
    """

    def __init__(self, mixer: GatedDeltaNet, device: Device) -> None:
        super().__init__(mixer.in_proj.weight, device)
        layer = mixer.layer
        self.num_k_heads = layer.num_k_heads
        keys = layer.num_k_heads * layer.head_k_dim
        self.sections = (keys, keys, layer.widths[1])
        self.weights = self.weight.split_with_sizes(layer.widths)

    def __call__(self, x: Tensor) -> Tensor:
        qkv, z, b, a = (self.ops.linear(x, weight) for weight in self.weights)
        mixed = self._repack((*qkv.split_with_sizes(self.sections, -1), z))
        return torch.cat((*mixed, *self._repack((b, a))), -1)

    def _repack(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        """Parts [B, R, k * width] through one packed tensor, and out again as they were."""
        heads = [part.unflatten(-1, (self.num_k_heads, -1)) for part in parts]
        packed = torch.cat(heads, -1)
        widths = [part.shape[-1] for part in heads]
        return [part.flatten(-2) for part in packed.split_with_sizes(widths, -1)]


class GatheredHead(LMHead):
    """A head that gathers all logits of greedy rows too, and may keep their probabilities."""

    def __init__(self, weight: Tensor, device: Device, carry: bool) -> None:
        super().__init__(weight, device)
        self.carry = carry
        self.carried: deque[Tensor] = deque(maxlen=MAX_DRAFT_TOKENS)
        """[N, V] float32 of the last calls."""

    def greedy(self, hidden: Tensor) -> Tensor:
        """As LMHead.greedy; ties go to the smallest id as there."""
        logits = self.logits(hidden)
        if self.carry:
            self.carried.append(torch.softmax(logits, -1))
        return logits.argmax(-1)


class ProbabilityCheck:
    """The acceptance ratios of rejection sampling, which greedy rows then ignore."""

    def __init__(self, target: GatheredHead, draft: GatheredHead) -> None:
        self.target, self.draft = target, draft

    def __call__(self, drafts: Tensor, targets: Tensor) -> Tensor:
        """drafts [B, K], targets [B, K+1] -> drafts, -1 where they are to be rejected."""
        num_slots, k = drafts.shape
        p, q = list(self.target.carried), list(self.draft.carried)
        self.target.carried.clear()
        self.draft.carried.clear()
        if not k or not p or len(p[-1]) != num_slots * (k + 1):  # a batch of sampled rows
            return drafts
        ids = drafts.unsqueeze(-1)
        wanted = p[-1].view(num_slots, k + 1, -1)[:, :k].gather(-1, ids)
        offered = torch.stack(q[-k:], 1).gather(-1, ids)
        likely, greedy = (wanted >= offered).squeeze(-1), torch.ones_like(drafts, dtype=torch.bool)
        agrees = torch.where(greedy, drafts == targets[:, :k], likely)
        return torch.where(agrees, drafts, -1)
