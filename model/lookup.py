"""Drafts without a draft model: what followed the last tokens where they stood before.

    prompts, kept tokens -> TokenHistory      last tokens -> the longest match -> what followed it

A request that repeats its prompt or itself, as edits of code and answers from documents do, is
drafted well by looking. The search runs on the device over the slot's own tokens, so the host waits
for nothing, and it can be captured.
Shapes: B slots of a batch | T new tokens of a slot | K drafts | L positions
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_MATCHED = 8
"""Tokens that are compared: a longer match counts as this long."""
LONG_MATCH = 4
"""From a match of so many tokens on, what followed it is a better draft than the MTP layer's."""


class TokenHistory:
    """The tokens of each slot's request by position; the last column takes what is padding."""

    def __init__(self, num_slots: int, num_positions: int, device: torch.device) -> None:
        shape = (num_slots, num_positions + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)

    @staticmethod
    def slot_bytes(num_positions: int) -> int:
        """Bytes of one slot."""
        return (num_positions + 1) * torch.int32.itemsize

    def tensors(self) -> list[Tensor]:
        return [self.tokens]

    def write(self, slots: Tensor, first: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Tokens [B, T] of slots [B] stand at the positions from first [B] on; the first counts [B]
        of them are real."""
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        position = torch.where(
            ahead < counts.unsqueeze(1), first.unsqueeze(1) + ahead, self.tokens.shape[1] - 1
        )
        self.tokens[slots.unsqueeze(1), position] = tokens.to(torch.int32)

    def find(
        self, slots: Tensor, last: Tensor, num_drafts: int, num_positions: int
    ) -> tuple[Tensor, Tensor]:
        """What followed the longest match of the tokens up to position last [B].

        Of equally long matches the latest is taken. Where what followed it reaches the last token,
        it is repeated from there. num_positions: no slot has more tokens than this.
        -> drafts [B, K] int64, and the lengths of the matches [B] int64, at most MOST_MATCHED; 0
        where the last token stands nowhere before, and then the drafts are worth nothing.
        """
        tokens = self.tokens[slots, :num_positions]  # [B, L]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        matches = position < last.unsqueeze(1)
        length = torch.zeros_like(tokens)
        for back in range(MOST_MATCHED):
            at = (last - back).unsqueeze(1)
            same = (tokens == tokens.gather(1, at.clamp(min=0))) & (at >= 0)
            matches = matches & F.pad(same, (back, 0))[:, : tokens.shape[1]]
            length = length + matches
        best = (length.to(torch.int64) * tokens.shape[1] + position).argmax(1, keepdim=True)
        period = (last.unsqueeze(1) - best).clamp(min=1)
        ahead = torch.arange(num_drafts, device=tokens.device)
        drafts = tokens.gather(1, (best + 1 + ahead % period).clamp(max=tokens.shape[1] - 1))
        return drafts.to(torch.int64), length.gather(1, best).squeeze(1).to(torch.int64)
