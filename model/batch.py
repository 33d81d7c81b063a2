"""The inputs of a forward pass: lists of the host become tensors on the device.

    PaddedSpans -> BatchPacker.prompt -> PromptChunk
    RunningRequests, limits -> BatchPacker.decode -> DecodeBatch

A captured pass always reads the same tensors. The packer keeps those of each shape, and copies new
values into them where they have changed.
Shapes: B slots of a batch | K drafts | T prompt tokens of a chunk | E prompts that end in it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.model.config import RunConfig
from outrider.model.plan import pages_for, powers_of_two
from outrider.model.prefill import PaddedSpans
from outrider.model.running import RunningRequest
from outrider.model.sampling import CAPTURED_FEATURES, NO_FEATURES, captured_as, features_of
from outrider.model.step import Sampling
from outrider.parallel.device import Device
from outrider.parallel.operands import SamplingFeatures


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """The inputs of an iteration."""

    slots: Tensor
    """[B] int64, with the padding slot as often as the batch is padded."""
    limits: Tensor
    """[B] int64: drafts that each slot takes, at most num_drafts."""
    num_drafts: int
    """K of this iteration."""
    max_kept: int
    """No slot kept more rows than this in its last pass; draft pass 0 has this many rows a slot."""
    max_fold: int
    """No slot has more rows than this to fold into its states; 0 when all come from prefill."""
    num_pages: int
    """The rows of no slot lie beyond this many pages of its block table."""
    features: SamplingFeatures = NO_FEATURES
    """What some slot needs beside its best logit."""
    host_lengths: tuple[list[int], ...] | None = None
    """Rows.host_lengths [B] of each draft pass, then of the verify pass; None for devices without
    the capability of this name."""

    @property
    def key(self) -> tuple[object, ...]:
        """All that the shape of the iteration depends on. It is captured once for each key."""
        shape = (len(self.slots), self.num_drafts)
        return shape if self.features == NO_FEATURES else (*shape, self.features)

    def host_lengths_of(self, index: int) -> list[int] | None:
        """Those of draft pass `index`, or of the verify pass for -1."""
        return self.host_lengths[index] if self.host_lengths else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """Prompt tokens of some slots, padded to one width."""

    slots: Tensor
    """[B] int64"""
    tokens: Tensor
    """[B, T] int64"""
    following: Tensor
    """[B, T] int64: the token after each of `tokens`; 0 where the prompt has none."""
    first: Tensor
    """[B] int64: position of the first token of each slot."""
    counts: Tensor
    """[B] int64: tokens of each slot that are not padding."""
    draft_counts: Tensor
    """[B] int64: rows of each slot that the draft can see. A row needs the token that follows it,
    so this is one less than `counts` where a prompt ends."""
    ends: Tensor | None
    """[E] int64: indices into `slots` of prompts that end here; None when none does."""
    num_pages: int
    """The rows of no slot lie beyond this many pages of its block table."""
    host_lengths: list[int] | None = None
    """Rows.host_lengths [B]; None for devices without the capability of this name."""


MOST_CAPTURED_DEPTHS = 9
"""Where all depths from 0 to K are no more than this, each is captured. Otherwise only 0, powers of
two and K are: a captured depth costs three graphs for each batch size when an engine starts, and
two more where there can be grammars."""


def depths_of(run: RunConfig, *, graphs: bool) -> tuple[int, ...]:
    """Numbers of drafts that an iteration may have, rising; graphs: each of them is captured."""
    if run.pin_rows:
        return (run.draft_tokens,)
    if graphs and run.draft_tokens >= MOST_CAPTURED_DEPTHS:
        return (0, *powers_of_two(1, run.draft_tokens))
    return tuple(range(run.draft_tokens + 1))


class BatchPacker:
    """Packs the inputs of one rank's passes; max_pages: those of a slot's block table."""

    def __init__(self, run: RunConfig, device: Device, max_pages: int) -> None:
        self.run, self.device, self.max_pages = run, device, max_pages
        captured = powers_of_two(1, run.max_slots) if device.capabilities.graphs else ()
        self.sizes = run.batch_buckets or captured
        """Sizes that a batch is padded to, rising. Without any, batches are not padded."""
        self.depths = depths_of(run, graphs=device.capabilities.graphs)
        """Numbers of drafts that a batch may have, rising: the next one that its requests want."""
        self._batches: dict[tuple[object, ...], DecodeBatch] = {}
        """(size, drafts, features) -> the batch that the captured iteration of this shape reads."""
        self._sent: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
        """The same -> the slots and limits that are in the batch's tensors."""
        self._chunks: dict[int, PromptChunk] = {}
        """Width -> the chunk that the captured prefill of this width reads."""

    def decode(
        self, requests: Sequence[RunningRequest], limits: Sequence[int], depth: int
    ) -> DecodeBatch:
        """The inputs of an iteration over `requests`, of which the i-th takes limits[i] drafts.

        depth: the most that any of `requests` may take in any iteration. Where graphs are captured
        it counts, not the largest limit: limits sink only near the ends of answers, and so an
        answer is made by replays of one graph, whose times tell what its depth costs.
        """
        run, can = self.run, self.device.capabilities
        wanted = depth if can.graphs else max(limits)
        num_drafts = next(n for n in self.depths if n >= wanted)
        size = next((n for n in self.sizes if n >= len(requests)), len(requests))
        padding = size - len(requests)
        slots = [r.slot for r in requests] + [run.max_slots] * padding
        padded_limits = [*limits, *[0] * padding]
        features = features_of([r.sampling for r in requests])
        if can.graphs and (can.sampled_graphs or features == NO_FEATURES):
            variant = captured_as(features)
            return self._captured(slots, padded_limits, num_drafts, variant, requests)
        last_rows = max(r.last_rows for r in requests)
        rows = run.draft_tokens + 1
        num_positions = rows + max(r.num_tokens + r.in_flight * rows for r in requests)
        num_pages = min(pages_for(num_positions, run.page_tokens), self.max_pages)
        if run.pin_rows:  # sums over keys, too, have one length whatever is drafted
            num_pages = self.max_pages
        return DecodeBatch(
            slots=self._ints(slots),
            limits=self._ints(padded_limits),
            num_drafts=num_drafts,
            max_kept=max(1, last_rows),
            max_fold=last_rows,
            num_pages=num_pages,
            features=features,
            host_lengths=self._host_lengths(requests, size, num_drafts, max(1, last_rows)),
        )

    def set_limits(self, batch: DecodeBatch, limits: Sequence[int]) -> None:
        """Change the drafts that the requests of `batch` take, which decode() has packed."""
        padded = [*limits, *[0] * (len(batch.slots) - len(limits))]
        batch.limits.copy_(self._ints(padded))
        if batch.key in self._sent:
            self._sent[batch.key] = self._sent[batch.key][0], padded

    def captured_batches(self) -> Iterator[DecodeBatch]:
        """A batch of padding alone for each shape of iteration that can be captured."""
        run, can = self.run, self.device.capabilities
        for size in self.sizes if can.graphs else ():
            for depth in self.depths:
                for features in CAPTURED_FEATURES if can.sampled_graphs else (NO_FEATURES,):
                    yield self._captured([run.max_slots] * size, [0] * size, depth, features, ())

    def _captured(
        self,
        slots: list[int],
        limits: list[int],
        num_drafts: int,
        features: SamplingFeatures,
        requests: Sequence[RunningRequest],
    ) -> DecodeBatch:
        """The batch that the captured iteration of this shape reads, with these values in it.

        Its numbers of rows and pages are the largest possible; counts on the device say how many of
        them are real.
        """
        width, size = self.run.draft_tokens + 1, len(slots)
        host_lengths = self._host_lengths(requests, size, num_drafts, width)
        key = (size, num_drafts, features)
        if key not in self._batches:
            self._batches[key] = DecodeBatch(
                slots=self._ints(slots),
                limits=self._ints(limits),
                num_drafts=num_drafts,
                max_kept=width,
                max_fold=width,
                num_pages=self.max_pages,
                features=features,
                host_lengths=host_lengths,
            )
            self._sent[key] = slots, limits
        batch, (old_slots, old_limits) = self._batches[key], self._sent[key]
        for captured, lengths in zip(batch.host_lengths or (), host_lengths or ()):
            captured[:] = lengths
        if slots != old_slots:
            batch.slots.copy_(self._ints(slots))
        if limits != old_limits:
            batch.limits.copy_(self._ints(limits))
        self._sent[key] = slots, limits
        return batch

    def _host_lengths(
        self, requests: Sequence[RunningRequest], size: int, num_drafts: int, max_kept: int
    ) -> tuple[list[int], ...] | None:
        """DecodeBatch.host_lengths, for devices with the capability.

        The host must know how many rows each slot kept, so nothing but a first token may be in
        flight. Padding stands at the start of the null page.
        """
        if not self.device.capabilities.host_lengths:
            return None
        assert self.device.capabilities.run_ahead == 0, "these devices read each result at once"
        lengths = [r.position for r in requests]
        padding = size - len(requests)
        first = [n - r.kept + max_kept for n, r in zip(lengths, requests)] + [max_kept] * padding
        later = [[n + i for n in lengths] + [1] * padding for i in range(1, num_drafts)]
        rows = num_drafts + 1
        return first, *later, [n + rows for n in lengths] + [rows] * padding

    def prompt(self, group: PaddedSpans) -> PromptChunk:
        """The inputs of a pass over these spans of prompts."""
        spans, width, tokens, following = group.spans, group.width, [], []
        for span in spans:
            prompt = span.request.prompt
            tokens.append(_padded(prompt[span.start : span.stop], width))
            following.append(_padded(prompt[span.start + 1 : span.stop + 1], width))
        ends = [i for i, span in enumerate(spans) if span.ends_prompt]
        longest = max(span.stop for span in spans)
        return PromptChunk(
            slots=self._ints([span.request.slot for span in spans]),
            tokens=self._ints(tokens),
            following=self._ints(following),
            first=self._ints([span.start for span in spans]),
            counts=self._ints([span.count for span in spans]),
            draft_counts=self._ints([span.count - span.ends_prompt for span in spans]),
            ends=self._ints(ends) if ends else None,
            num_pages=pages_for(longest, self.run.page_tokens),
            host_lengths=[longest] if self.device.capabilities.host_lengths else None,
        )

    def first_features(self, samplings: Sequence[Sampling]) -> SamplingFeatures:
        """What requests whose first tokens are picked together need beside their best logits."""
        features = features_of(samplings)
        # The kernels of these variants alone are there from the start.
        return captured_as(features) if self.device.capabilities.sampled_graphs else features

    def captured_prompt(self, chunk: PromptChunk) -> PromptChunk:
        """The chunk that the captured prefill of this width reads, with the values of `chunk`.

        It makes a first token always; that one means something where the prompt ends.
        """
        width = chunk.tokens.shape[1]
        if width not in self._chunks:
            ends = self._ints([0])
            self._chunks[width] = replace(chunk, num_pages=self.max_pages, ends=ends)
        captured = self._chunks[width]
        for name in ("slots", "tokens", "following", "first", "counts", "draft_counts"):
            getattr(captured, name).copy_(getattr(chunk, name))
        return captured

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        # Through numpy: torch.tensor takes four times as long over a list of a prompt's length.
        return self.device.send(torch.from_numpy(np.array(values, dtype=np.int64)))


def _padded(tokens: list[int], width: int) -> list[int]:
    return tokens + [0] * (width - len(tokens))
