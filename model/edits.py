"""Edits of logits before a token is picked from them: penalties, bias, bans; and log probabilities.

    text (prompt, answer, drafts) -> penalties -> bias and bans -> edited logits
    logits, tokens -> log_probs
The edits of a row depend only on the text before the token that it makes. For the row of a draft,
the drafts before it belong to that text, just as if they had been emitted already. So the answer is
the same with and without drafts. LogitEdits remembers each slot's text and settings.
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
"""More tokens than any answer has: an edit until then never ends."""


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What the requests of a batch need whole logits for; decided by the host."""

    drawn: bool = False
    """Some request has a temperature."""
    edited: bool = False
    """Some request has its logits edited."""
    logprobs: int | None = None
    """The most likeliest tokens that any request wants reported beside its own, 0 or more; None
    when no request wants log probabilities."""

    @staticmethod
    def of(samplings: Sequence[Sampling]) -> SamplingFeatures:
        """What these need together."""
        tops = [sampling.logprobs for sampling in samplings if sampling.logprobs is not None]
        return SamplingFeatures(
            drawn=any(sampling.temperature > 0 for sampling in samplings),
            edited=any(sampling.edits for sampling in samplings),
            logprobs=max(tops, default=None),
        )

    def captured_as(self) -> SamplingFeatures:
        """The smallest of CAPTURED_FEATURES that includes these."""
        if self.edited or self.logprobs is not None:
            return CAPTURED_FEATURES[2]
        return CAPTURED_FEATURES[1 if self.drawn else 0]


NO_FEATURES = SamplingFeatures()
CAPTURED_FEATURES = (
    NO_FEATURES,
    SamplingFeatures(drawn=True),
    SamplingFeatures(drawn=True, edited=True, logprobs=MAX_LOGPROBS),
)
"""The variants of an iteration that are captured: few enough to capture all of them at the start.
Results that no request asked for are dropped on the host."""


class LogitEdits:
    """Penalties, bias and bans of each slot, and the text that they count in.

    num_slots, num_positions: S, and P of a slot's text. num_eos: token ids that end an answer of
    this model beside a request's own stop ids.
    """

    def __init__(self, num_slots: int, num_positions: int, device: Device, *, num_eos: int) -> None:
        where, self._send = device.torch_device, device.send
        self.text = torch.zeros(num_slots, num_positions, dtype=torch.int64, device=where)
        self.prompt = torch.zeros(num_slots, dtype=torch.int64, device=where)
        self.presence, self.frequency = torch.zeros(2, num_slots, device=where)
        self.repetition = torch.ones(num_slots, device=where)
        shape = (num_slots, MAX_LOGIT_BIAS + MAX_STOP_IDS + num_eos)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=where)
        self.values = torch.zeros(shape, device=where)
        self.until = torch.zeros(shape, dtype=torch.int64, device=where)
        """[S, A]: `values` are added to the logits of `ids` for the first `until` tokens."""
        self._edited_slots: set[int] = set()
        """Slots whose settings may differ from those of a request without edits."""

    def reset(self, join: Join) -> None:
        """Take over a request's settings; does nothing where neither it nor the slot has edits."""
        slot, sampling = join.slot, join.sampling
        if sampling.edits:
            self._edited_slots.add(slot)
        elif slot in self._edited_slots:
            self._edited_slots.remove(slot)
        else:
            return
        banned = join.end_ids if sampling.min_tokens else ()
        added = [*sampling.logit_bias, *((token, float("-inf")) for token in banned)]
        until = [ALWAYS] * len(sampling.logit_bias) + [sampling.min_tokens] * len(banned)
        padding = self.ids.shape[1] - len(added)
        self.text[slot, : len(join.tokens)] = self._send(torch.tensor(join.tokens))
        self.prompt[slot] = len(join.tokens)
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.ids[slot] = self._send(torch.tensor([token for token, _ in added] + [0] * padding))
        values = [value for _, value in added] + [0.0] * padding
        self.values[slot] = self._send(torch.tensor(values))
        self.until[slot] = self._send(torch.tensor(until + [0] * padding))

    def write_text(self, slots: Tensor, first: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, R] into the text of slots [B], from the positions `first` [B] on."""
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        positions = (first.unsqueeze(1) + ahead).clamp_(max=self.text.shape[1] - 1)
        self.text[slots.unsqueeze(1), positions] = tokens

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, num_positions: int) -> Tensor:
        """Edit the logits [N, V] float32 of rows; -> [N, V].

        slots, positions [N] int64: the rows' slots, and where the tokens that they make will stand,
        all below num_positions. Where a slot has no edits its logits come back bit for bit.
        """
        text = self.text[slots, :num_positions]
        index = torch.arange(text.shape[1], device=text.device)
        answer_start = self.prompt[slots].unsqueeze(1)
        written = index < positions.unsqueeze(1)
        zeros = torch.zeros_like(logits)
        in_text = zeros.scatter_add(1, text, written.to(logits.dtype)) > 0
        in_answer = (written & (index >= answer_start)).to(logits.dtype)
        count = zeros.scatter_add(1, text, in_answer)
        factor = self.repetition[slots].unsqueeze(1)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(in_text, repeated, logits)
        logits = logits - self.frequency[slots].unsqueeze(1) * count
        logits = logits - self.presence[slots].unsqueeze(1) * (count > 0)
        active = positions.unsqueeze(1) - answer_start < self.until[slots]
        added = self.values[slots].masked_fill(~active, 0.0)
        return logits.scatter_add(1, self.ids[slots], added)


def log_probs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """logits [N, V], tokens [N] -> ids [N, 1 + num_top] int64, log probabilities of them float32.

    The first column is the token itself, the others are the likeliest ones, best first. Of a
    vocabulary smaller than num_top it is all of them.
    """
    log_probabilities = torch.log_softmax(logits, -1)
    best, ids = log_probabilities.topk(min(num_top, logits.shape[-1]), -1)
    own = tokens.unsqueeze(1)
    values = torch.cat((log_probabilities.gather(1, own), best), 1)
    return torch.cat((own, ids), 1), values
