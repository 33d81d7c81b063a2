"""How requests pick their tokens: what a batch of them needs, and what the device knows of each.

    Sampling of a batch's requests -> features_of -> captured_as -> a variant of the iteration
    Join -> SamplingMemory.reset -> SlotSampling, which Ops.pick_ids reads

Edits of logits (penalties, bias, bans) depend only on the text before the token that a row makes.
For the row of a draft, the drafts before it belong to that text, just as if they had been emitted
already. So the answer is the same with and without drafts.
Letters: S slots + 1 | v ids of this rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider.model.step import MAX_LOGPROBS, Join, Sampling
from outrider.parallel.device import Device
from outrider.parallel.operands import SamplingFeatures, SlotSampling
from outrider.parallel.sampling import BANNED, COUNT_SHIFT, IN_PROMPT

SMALLEST_TEMPERATURE = 1e-6
"""A smaller temperature above 0 counts as this one: logits divided by it remain finite."""

NO_FEATURES = SamplingFeatures()
CAPTURED_FEATURES = (
    NO_FEATURES,
    SamplingFeatures(drawn=True),
    SamplingFeatures(drawn=True, filtered=True, edited=True, logprobs=MAX_LOGPROBS, masked=True),
)
"""The variants of an iteration that are captured: few enough to capture all of them at the start.
Each slot's own settings say what is done for it, and the host drops what nobody asked for."""


def features_of(samplings: Sequence[Sampling]) -> SamplingFeatures:
    """What these requests need together."""
    return SamplingFeatures(
        drawn=any(sampling.draws for sampling in samplings),
        filtered=any(sampling.filters for sampling in samplings),
        edited=any(sampling.edits for sampling in samplings),
        masked=any(sampling.constrained for sampling in samplings),
        logprobs=MAX_LOGPROBS if any(s.logprobs is not None for s in samplings) else None,
    )


def captured_as(features: SamplingFeatures) -> SamplingFeatures:
    """The first of CAPTURED_FEATURES that includes these."""
    if replace(features, drawn=False) != NO_FEATURES:
        return CAPTURED_FEATURES[2]
    return CAPTURED_FEATURES[1 if features.drawn else 0]


def words_of(num_ids: int) -> int:
    """Numbers of 32 bits that hold a bit for each of the ids."""
    return -(-num_ids // 32)


class SamplingMemory:
    """SlotSampling of all slots. num_slots: S; num_rows: X, the most rows of a slot in the target;
    vocab_size: of all ranks together."""

    def __init__(self, num_slots: int, num_rows: int, vocab_size: int, device: Device) -> None:
        where, self._send = device.torch_device, device.send
        self.width = vocab_size // device.tp.size
        self.first_id = device.tp.rank * self.width
        self.integers = torch.zeros(3, num_slots, dtype=torch.int64, device=where)
        self.numbers = torch.zeros(6, num_slots, device=where)
        self.flags = torch.zeros(4, num_slots, dtype=torch.bool, device=where)
        self.history = torch.zeros(num_slots, self.width, dtype=torch.int32, device=where)
        self.bias = torch.zeros(num_slots, self.width, device=where)
        masks = (num_slots, num_rows, words_of(self.width))
        self.masks = torch.zeros(masks, dtype=torch.int32, device=where)
        self._neutral = set(range(num_slots))
        """Slots whose tensors are those of a request that only wants its likeliest tokens."""
        seed, top_k, banned_until = self.integers
        scale, top_p, log_min_p, repetition, frequency, presence = self.numbers
        drawn, edited, reported, masked = self.flags
        self.by_slot = SlotSampling(
            seed=seed,
            drawn=drawn,
            scale=scale.fill_(1.0),
            top_k=top_k,
            top_p=top_p,
            log_min_p=log_min_p,
            reported=reported,
            edited=edited,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            banned_until=banned_until,
            history=self.history,
            bias=self.bias,
            masked=masked,
            masks=self.masks,
        )

    @staticmethod
    def slot_bytes(width: int, num_rows: int) -> int:
        """Bytes of one slot's tables, which hold `width` ids, and masks for each of its rows."""
        return 4 * (2 * width + num_rows * words_of(width))

    def reset(self, join: Join) -> None:
        """Take over a request's settings; does nothing where one that only wants its likeliest
        tokens follows another."""
        slot, sampling = join.slot, join.sampling
        drawn = sampling.draws
        reported, masked = sampling.logprobs is not None, sampling.constrained
        if drawn or sampling.edits or reported or masked:
            self._neutral.discard(slot)
        elif slot in self._neutral:
            return
        else:
            self._neutral.add(slot)
        temperature, min_p = sampling.temperature or 0.0, sampling.min_p
        banned_until = len(join.tokens) + sampling.min_tokens
        integers = (sampling.seed or 0, sampling.top_k or 0, banned_until)
        numbers = (
            1.0 / max(temperature, SMALLEST_TEMPERATURE) if drawn else 1.0,
            sampling.top_p or 1.0,
            math.log(min_p) if min_p else -math.inf,
            sampling.repetition_penalty or 1.0,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self.integers[:, slot] = self._send(torch.tensor(integers, dtype=torch.int64))
        self.numbers[:, slot] = self._send(torch.tensor(numbers))
        flags = (drawn, sampling.edits, reported, masked)
        self.flags[:, slot] = self._send(torch.tensor(flags))
        if sampling.edits:
            self._reset_tables(join)

    def _reset_tables(self, join: Join) -> None:
        """Count the prompt and what there is of the answer, and set bans and bias. What may not be
        said has a bias of -inf."""
        sampling, history, bias = join.sampling, self.history[join.slot], self.bias[join.slot]
        flags: dict[int, int] = dict.fromkeys(self._local(join.tokens), IN_PROMPT)
        for index in self._local(join.end_ids if sampling.min_tokens else ()):
            flags[index] = flags.get(index, 0) | BANNED
        for index in self._local(join.emitted):
            flags[index] = flags.get(index, 0) + (1 << COUNT_SHIFT)
        added: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            for index in self._local((token,)):
                added[index] = added.get(index, 0.0) + value
        if sampling.allowed_ids:
            added = {index: added.get(index, 0.0) for index in self._local(sampling.allowed_ids)}
        added |= dict.fromkeys(self._local(sampling.banned_ids), -math.inf)
        rest = -math.inf if sampling.allowed_ids else 0.0
        for table, values, filler in ((history, flags, 0), (bias, added, rest)):
            table.fill_(filler)
            if values:
                index = self._send(torch.tensor(list(values)))
                table[index] = self._send(torch.tensor(list(values.values()), dtype=table.dtype))

    def set_masks(self, slot: int, masks: np.ndarray) -> None:
        """What may follow in the first rows of a slot: LookAhead.masks [rows, bytes], all ids."""
        start, stop = self.first_id, self.first_id + self.width
        if start % 8:  # only where the ranks' shares begin inside of bytes
            bits = np.unpackbits(masks, axis=1, bitorder="little")[:, start:stop]
            part = np.packbits(bits, axis=1, bitorder="little")
        else:
            part = masks[:, start // 8 : -(-stop // 8)]
        words = np.zeros((len(masks), self.masks.shape[2]), dtype="<i4")
        words.view(np.uint8)[:, : part.shape[1]] = part
        self.masks[slot, : len(masks)] = self._send(torch.from_numpy(words))

    def _local(self, ids: Sequence[int]) -> list[int]:
        """Those of the ids that this rank has, as indices into its tables."""
        local = (token - self.first_id for token in ids)
        return [index for index in local if 0 <= index < self.width]

    def tables(self) -> list[Tensor]:
        """The tensors whose bytes the memory plan counts."""
        return [self.history, self.bias, self.masks]
