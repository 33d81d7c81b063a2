"""Slower behaviours that faster ones replaced, kept so that the difference can be measured.

    Ablation (cluster.yaml: ablation.*) -> old_device, install_old_parts, run_in_pieces

None of them changes a token, and none runs by default: a Runner asks once, at its start, and the
parts that an ablation names take the place of the present ones.
Letters: B slots | R = K+1 rows | H hidden | V vocabulary | k, h key and value heads | g = h / k
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider.model.batch import DecodeBatch
from outrider.model.config import Ablation
from outrider.model.executor import Executor, MtpDrafter, RunPiece
from outrider.model.gdn import GatedDeltaNet
from outrider.model.sampling import NO_FEATURES
from outrider.model.step import MAX_DRAFT_TOKENS
from outrider.parallel.device import Device
from outrider.parallel.formats import row_range
from outrider.parallel.graph import Graphs
from outrider.parallel.linear import ColumnLinear
from outrider.parallel.vocab import LMHead


def old_device(device: Device, ablation: Ablation) -> Device:
    """The device, without its graphs where the ablation says so."""
    if not ablation.no_graph:
        return device
    return replace(device, capabilities=replace(device.capabilities, graphs=False))


def install_old_parts(executor: Executor) -> None:
    """Replace the parts of an executor that its ablation names."""
    ablation, device = executor.run.ablation, executor.device
    if ablation.merge_then_split:
        for layer in executor.target.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                layer.mixer.in_proj = PackedProjections(layer.mixer, device)
    if isinstance(executor.drafter, MtpDrafter):
        executor.drafter.coupled = not ablation.argmax_drafts
    keep = ablation.greedy_probabilities
    if keep or ablation.gather_logits:
        executor.head = target = GatheredHead(executor.head, device, keep)
        if isinstance(executor.drafter, MtpDrafter):
            draft = GatheredHead(executor.drafter.head, device, keep)
            executor.drafter.head = draft
            if keep:
                executor.check_drafts = ProbabilityCheck(target, draft)


def run_in_pieces(graphs: Graphs, device: Device, batch: DecodeBatch) -> RunPiece:
    """A RunPiece that makes each piece a graph of its own, and waits after each draft pass.

    The pieces of a batch that samples are not captured; it waits all the same.
    """

    def run(name: int | str, work: Callable[[], Any]) -> Any:
        key = (len(batch.slots), batch.num_drafts, name)
        result = graphs.run(key, work) if batch.features == NO_FEATURES else work()
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
        ends = list(accumulate(layer.widths))
        borders = zip((0, *ends), ends)
        self.weights = [row_range(self.weight, start, end) for start, end in borders]

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
    """A head that gathers whole logits for greedy rows too; `keep`: and keeps probabilities."""

    def __init__(self, head: LMHead, device: Device, keep: bool) -> None:
        super().__init__(head.weight, device)
        self.scales, self.keep = head.scales, keep
        self.probabilities: deque[Tensor] = deque(maxlen=MAX_DRAFT_TOKENS)
        """[N, V] float32 of each of the last calls."""

    def greedy(self, hidden: Tensor) -> Tensor:
        """As LMHead.greedy, ties included: they go to the smallest id."""
        logits = self.logits(hidden)
        if self.keep:
            self.probabilities.append(torch.softmax(logits, -1))
        return logits.argmax(-1)


class ProbabilityCheck:
    """Compares drafts by the ratio of rejection sampling, p(draft) / q(draft), and by equality.

    All rows are greedy, so equality decides; the ratio is the work whose cost is measured.
    """

    def __init__(self, target: GatheredHead, draft: GatheredHead) -> None:
        self.target, self.draft = target, draft

    def __call__(self, drafts: Tensor, targets: Tensor) -> Tensor:
        """drafts [B, K], targets [B, K+1] int64 -> the drafts, -1 where they are rejected."""
        num_slots, k = drafts.shape
        by_target, by_draft = list(self.target.probabilities), list(self.draft.probabilities)
        self.target.probabilities.clear()
        self.draft.probabilities.clear()
        if not k or not by_target or len(by_target[-1]) != num_slots * (k + 1):
            return drafts  # no draft, or no greedy row
        ids = drafts.unsqueeze(-1)
        p = by_target[-1].view(num_slots, k + 1, -1)[:, :k].gather(-1, ids)
        q = torch.stack(by_draft[-k:], 1).gather(-1, ids)
        by_ratio, greedy = (p >= q).squeeze(-1), torch.ones_like(drafts, dtype=torch.bool)
        accepted = torch.where(greedy, drafts == targets[:, :k], by_ratio)
        return torch.where(accepted, drafts, -1)
