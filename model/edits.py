"""What a request wants done with the logits before a token is picked, and what it wants to know.

    text (prompt, emitted, drafts) -> penalties -> bias and bans -> edited logits      log_probs
A row's edits depend on the text before its own token alone: that of a draft sees the drafts before
it, just as if they had been emitted. So the text is the same with and without drafts.
Letters: S slots + 1 | N rows | V vocabulary | P positions | A added values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.model.step import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, Join, Sampling
from outrider.parallel.device import Device

ALWAYS = 1 << 62
"""More tokens than any answer has."""


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What the rows of a pass that need all logits need them for; decided by the host."""

    drawn: bool = False
    """Some have a temperature."""
    edited: bool = False
    logprobs: int | None = None
    """Likeliest tokens to report; None: no log probabilities at all."""

    @staticmethod
    def of(samplings: Sequence[Sampling]) -> SamplingFeatures:
        return SamplingFeatures(
            drawn=any(how.temperature > 0 for how in samplings),
            edited=any(how.edits for how in samplings),
            logprobs=max(
                (how.logprobs for how in samplings if how.logprobs is not None), default=None
            ),
        )

    def captured_as(self) -> SamplingFeatures:
        """The features that a captured iteration has for these: a superset of them."""
        if self.edited or self.logprobs is not None:
            return CAPTURED_FEATURES[2]
        return CAPTURED_FEATURES[1 if self.drawn else 0]


NO_FEATURES = SamplingFeatures()
CAPTURED_FEATURES = (
    NO_FEATURES,
    SamplingFeatures(drawn=True),
    SamplingFeatures(drawn=True, edited=True, logprobs=MAX_LOGPROBS),
)
"""Iterations are captured for these alone, so that all of them can be captured at the start."""


class LogitEdits:
    """Penalties, bias and bans of each slot, and the text that they count in."""

    def __init__(self, num_slots: int, positions: int, device: Device, *, num_eos: int) -> None:
        """num_eos: token ids that end an answer of this model beside a request's own."""
        where, self._send = device.torch_device, device.send
        self.text = torch.zeros(num_slots, positions, dtype=torch.int64, device=where)
        self.prompt = torch.zeros(num_slots, dtype=torch.int64, device=where)
        self.presence, self.frequency = torch.zeros(2, num_slots, device=where)
        self.repetition = torch.ones(num_slots, device=where)
        shape = (num_slots, MAX_LOGIT_BIAS + MAX_STOP_IDS + num_eos)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=where)
        self.values = torch.zeros(shape, device=where)
        self.until = torch.zeros(shape, dtype=torch.int64, device=where)
        """[S, A]: values are added to the logits of ids for the first `until` tokens"""
        self._used: set[int] = set()

    def reset(self, join: Join) -> None:
        """Hand a slot to a request; costs nothing while neither it nor its last tenant edits."""
        slot, how = join.slot, join.sampling
        if not how.edits and slot not in self._used:
            return
        (self._used.add if how.edits else self._used.discard)(slot)
        banned = join.end_ids if how.min_tokens else ()
        added = [*how.logit_bias, *((token, float("-inf")) for token in banned)]
        until = [ALWAYS] * len(how.logit_bias) + [how.min_tokens] * len(banned)
        padding = self.ids.shape[1] - len(added)
        self.text[slot, : len(join.tokens)] = self._send(torch.tensor(join.tokens))
        self.prompt[slot] = len(join.tokens)
        self.presence[slot], self.frequency[slot] = how.presence_penalty, how.frequency_penalty
        self.repetition[slot] = how.repetition_penalty
        self.ids[slot] = self._send(torch.tensor([i for i, _ in added] + [0] * padding))
        values = [value for _, value in added] + [0.0] * padding
        self.values[slot] = self._send(torch.tensor(values))
        self.until[slot] = self._send(torch.tensor(until + [0] * padding))

    def note(self, slots: Tensor, first: Tensor, tokens: Tensor) -> None:
        """tokens [B, R] stand at positions first [B], first + 1, ... of the slots [B]."""
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        at = (first.unsqueeze(1) + ahead).clamp_(max=self.text.shape[1] - 1)
        self.text[slots.unsqueeze(1), at] = tokens

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, reach: int) -> Tensor:
        """logits [N, V] of rows of slots [N] that make the tokens at positions [N], edited.

        reach: no position is beyond it. A slot without edits gets its logits back, bit for bit.
        """
        text = self.text[slots, :reach]
        place = torch.arange(text.shape[1], device=text.device)
        first = self.prompt[slots].unsqueeze(1)
        known = place < positions.unsqueeze(1)
        none = torch.zeros_like(logits)
        seen = none.scatter_add(1, text, known.to(logits.dtype)) > 0
        count = none.scatter_add(1, text, (known & (place >= first)).to(logits.dtype))
        factor = self.repetition[slots].unsqueeze(1)
        logits = torch.where(
            seen, torch.where(logits > 0, logits / factor, logits * factor), logits
        )
        logits = logits - self.frequency[slots].unsqueeze(1) * count
        logits = logits - self.presence[slots].unsqueeze(1) * (count > 0)
        active = positions.unsqueeze(1) - first < self.until[slots]
        added = self.values[slots].masked_fill(~active, 0.0)
        return logits.scatter_add(1, self.ids[slots], added)


def log_probs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """logits [N, V], tokens [N] -> ids [N, 1 + num_top] and their log probabilities, float32.

    The first column is the token itself, the others are the likeliest, best first; of a vocabulary
    smaller than num_top, all of it.
    """
    logs = torch.log_softmax(logits, -1)
    best, ids = logs.topk(min(num_top, logits.shape[-1]), -1)
    own = tokens.unsqueeze(1)
    return torch.cat((own, ids), 1), torch.cat((logs.gather(1, own), best), 1)
