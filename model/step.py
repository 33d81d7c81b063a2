"""What crosses between driver and ranks: commands in, progress out. No tensors.

    driver -- Join, Leave --> leader -- Plan --> every rank -- StepEvent --> driver

All ranks apply the same Plan at the same iteration boundary, so they hold the same slot table;
`Plan.digest` lets a follower notice at once when it does not.
Letters: K drafted tokens an iteration | kept: tokens an iteration yields, 1..K+1
"""

from __future__ import annotations

import msgspec

MAX_DRAFT_TOKENS = 16


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request picks its tokens. temperature 0 is greedy and computes no probability.

    Filters apply in this order: temperature, top_k, top_p, min_p. The token at a position is a
    function of (prompt, seed, position): drafts, batch and tensor parallelism do not change it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: the driver draws one and reports it."""
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    draft_tokens: int | None = None
    """This request's K; None takes the engine's. Larger values are cut to the engine's."""

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "must lie in [0, 100]"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must lie in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must lie in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "must lie in [0, 2^63)"),
            ("stop_ids", all(i >= 0 for i in self.stop_ids), "must hold token ids, 0 or more"),
            (
                "draft_tokens",
                self.draft_tokens is None or 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS,
                f"must lie in [0, {MAX_DRAFT_TOKENS}]",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: {rule}")


class Join(msgspec.Struct, frozen=True, tag=True):
    """Put a request into a free slot. `sampling` has its seed, and the EOS ids in `stop_ids`."""

    slot: int
    request: int
    """Number of the request, never reused: tells two tenants of one slot apart."""
    tokens: list[int]
    pages: list[int]
    """KV pages in order; they cover prompt + max_tokens + the rows an iteration may overshoot."""
    sampling: Sampling


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Drop a request before its end. Unknown (already finished) requests are ignored."""

    slot: int
    request: int


class Plan(msgspec.Struct, frozen=True):
    """The leader's word to every rank: apply these commands, then run up to `burst` iterations."""

    seq: int
    commands: list[Join | Leave]
    burst: int
    digest: int
    """Digest of the leader's slot table before the commands."""
    stop: bool = False


class Progress(msgspec.Struct, frozen=True):
    """What one request gained in one step."""

    request: int
    slot: int
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    """Of `drafted`, those the target agreed with, also past an end of sequence."""
    verified: bool = True
    """False for the first token, which the prefill yields without a verify pass."""
    finish: str | None = None
    """"stop" (EOS or stop id), "length", or None while it goes on."""


class StepEvent(msgspec.Struct, frozen=True):
    """One step of the leader."""

    iteration: int
    step_s: float
    progress: list[Progress]
