"""What crosses between driver and ranks: commands in, progress out. No tensors.

    driver -- Join, Leave --> leader -- StepPlan --> every rank -- StepEvent --> driver

All ranks apply the same StepPlan at the same iteration boundary, so they hold the same slot table;
`StepPlan.digest` lets a follower notice at once when it does not.
Letters: K drafted tokens an iteration | kept: tokens an iteration yields, 1..K+1
"""

from __future__ import annotations

import msgspec

MAX_DRAFT_TOKENS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 128


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request picks its tokens. temperature 0 is greedy and computes no probability.

    Edits of the logits apply in this order: repetition, frequency and presence penalty, bias,
    min_tokens; then temperature, top_k, top_p, min_p. The token at a position is a function of
    (prompt, seed, position): drafts, batch and tensor parallelism do not change it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: the driver draws one and reports it."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the answer holds the token."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer: divided by it above 0, multiplied below."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    min_tokens: int = 0
    """No stop id, EOS or stop string ends the answer before it has as many tokens."""
    logprobs: int | None = None
    """Report each token's log probability and so many of the likeliest; None: neither.

    They are those of the model's own distribution, before any edit, temperature or filter.
    """
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
            ("presence_penalty", abs(self.presence_penalty) <= 2.0, "must lie in [-2, 2]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2.0, "must lie in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "must lie in (0, 10]"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(i >= 0 and abs(v) <= 100.0 for i, v in self.logit_bias),
                f"must hold at most {MAX_LOGIT_BIAS} token ids, each with a value in [-100, 100]",
            ),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in [0, max_tokens]"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"must lie in [0, {MAX_LOGPROBS}]",
            ),
            (
                "stop_ids",
                len(self.stop_ids) <= MAX_STOP_IDS and all(i >= 0 for i in self.stop_ids),
                f"must hold at most {MAX_STOP_IDS} token ids, 0 or more",
            ),
            (
                "draft_tokens",
                self.draft_tokens is None or 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS,
                f"must lie in [0, {MAX_DRAFT_TOKENS}]",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: {rule}")

    @property
    def edits(self) -> bool:
        """True when the logits are changed before a token is picked from them."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return neutral != (0.0, 0.0, 1.0) or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def needs_logits(self) -> bool:
        """True when the best (value, id) pair is not all that is wanted of a row."""
        return self.temperature > 0 or self.edits or self.logprobs is not None


class Join(msgspec.Struct, frozen=True, tag=True):
    """Put a request into a free slot. Its `sampling` has a seed."""

    slot: int
    request: int
    """Number of the request, never reused: tells two tenants of one slot apart."""
    tokens: list[int]
    pages: list[int]
    """KV pages in order; they cover prompt + max_tokens + the rows an iteration may overshoot."""
    sampling: Sampling
    end_ids: list[int] = []
    """Token ids that end the answer: the request's stop ids, and EOS unless it is ignored."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Drop a request before its end. Unknown (already finished) requests are ignored."""

    slot: int
    request: int


class StepPlan(msgspec.Struct, frozen=True):
    """The leader's word to every rank: apply these commands, then step once if there is work."""

    seq: int
    commands: list[Join | Leave]
    digest: int
    """Digest of the leader's slot table before the commands."""
    stop: bool = False
    depth: int | None = None
    """Drafts an iteration at most; None: K."""


class Progress(msgspec.Struct, frozen=True):
    """What one request gained in one step."""

    request: int
    slot: int
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    """Of `drafted`, those the target agreed with, also behind the end of the answer."""
    verified: bool = True
    """False for the first token, which the prefill yields without a verify pass."""
    logprobs: list[list[tuple[int, float]]] = []
    """Where asked for: of each of `tokens` its (id, log probability), then the likeliest ones'."""
    finish: str | None = None
    """"stop" (EOS or stop id), "length", or None while it goes on."""


class StepEvent(msgspec.Struct, frozen=True):
    """One step of the leader."""

    iteration: int
    step_s: float
    progress: list[Progress]
    depth: int | None = None
    """Of its StepPlan."""
