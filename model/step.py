"""What crosses between the driver and the ranks: commands in, progress out. No tensors.

    driver -- Join, Leave, Grow --> leader -- StepPlan --> every rank
    leader -- StepEvent --> driver

All ranks apply the same StepPlan before the same step, so they hold the same slot table. A follower
whose table differs notices it by `StepPlan.digest`. The leader is rank 0, the others are followers.
Letters: K drafted tokens an iteration
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from outrider.model.reply_form import Thought

MAX_DRAFT_TOKENS = 16
MAX_LOGPROBS, MAX_LOGPROB_IDS = 20, 128
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 128
MAX_GRAMMAR_CHARS = 1 << 18
MAX_ALLOWED_IDS = MAX_BANNED_IDS = 1024
MAX_BANNED_SEQUENCES, MAX_SEQUENCE_TOKENS = 128, 2048
SMALLEST_TOP_P = 1e-6
JSON_WHITESPACE = r"( |\n {0,40})?"
"""Between the parts of a JSON text that a grammar allows: none, one space, or a new line and its
indentation. Without an upper bound a model might answer with nothing but spaces."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer must match from its first token, or the end of its thought, to its
    end."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    """A JSON schema as JSON; a regular expression (of Rust's crate regex, which has no look-around
    and no back-references); a JSON list of texts; or a grammar in Lark's form or in GBNF."""
    thought: Thought = "none"
    """Of a chat. begun: any text may come first, up to </think>. possible: so it may behind a
    <think>."""
    calls: str = ""
    """A grammar in Lark's form: what may stand in the place of a text that matches."""

    def __post_init__(self) -> None:
        if (count := len(self.text) + len(self.calls)) > MAX_GRAMMAR_CHARS:
            rule = f"at most {MAX_GRAMMAR_CHARS} are allowed"
            raise ValueError(f"sampling.grammar: a text of {count} characters: {rule}")


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request picks its tokens. ValueError names the field and the rule it breaks.

    The logits are edited in this order: repetition, frequency and presence penalty, bias, allowed
    and banned ids, min_tokens. Then temperature, top_k, top_p and min_p apply. The token at a
    position is a function of prompt, seed and position: drafts, batch and tensor parallelism do not
    change it.

    None leaves temperature, top_k, top_p, min_p or repetition_penalty to the model: the driver puts
    in what its generation_config.json says (`with_defaults`). Where that says nothing either, None
    changes nothing: it is greedy, without filters and penalty.
    """

    max_tokens: int = 16
    """Length of the answer in tokens, unless something ends it before."""
    temperature: float | None = None
    """0 takes the likeliest token. Otherwise logits are divided by it and a token is drawn."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: float | None = None
    """Draw among the likeliest tokens whose probabilities reach this sum; 1 for all."""
    min_p: float | None = None
    """Draw among tokens that have this share of the largest probability at least; 0 for all."""
    seed: int | None = None
    """Of the random numbers; None has the driver draw one, which it reports."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the answer holds the token already."""
    repetition_penalty: float | None = None
    """Divides the logit of each token in prompt or answer where it is above 0, and multiplies it
    where it is below; 1 for neither."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit."""
    allowed_ids: tuple[int, ...] = ()
    """The only token ids that the answer may hold; empty: all. EOS is none of them unless it is
    named."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that the answer never holds."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of two token ids or more that the answer never holds one behind the other."""
    min_tokens: int = 0
    """No stop id, EOS or stop string ends the answer before it has this many tokens."""
    logprobs: int | None = None
    """Reports the log probability of each token and its top n; None reports nothing.

    They belong to the model's own distribution, before any edit, temperature or filter.
    """
    logprob_ids: tuple[int, ...] = ()
    """Together with logprobs: the token ids that are reported in the place of the top n."""
    prompt_logprobs: int | None = None
    """As logprobs, for each token of the prompt but its first, which follows nothing."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside EOS."""
    ignore_eos: bool = False
    """Whether the answer goes on after EOS."""
    draft_tokens: int | None = None
    """The most drafts an iteration for this request; None takes the engine's, which is also the
    most."""

    grammar: Grammar | None = None
    """What the answer must match; None for any text. EOS ends the answer where the grammar may end,
    and at once where it must."""

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            (
                "temperature",
                self.temperature is None or 0.0 <= self.temperature <= 100.0,
                "must lie in [0, 100]",
            ),
            ("top_k", self.top_k is None or self.top_k >= 0, "must be 0 (off) or more"),
            ("top_p", self.top_p is None or 0.0 < self.top_p <= 1.0, "must lie in (0, 1]"),
            ("min_p", self.min_p is None or 0.0 <= self.min_p <= 1.0, "must lie in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "must lie in [0, 2^63)"),
            ("presence_penalty", abs(self.presence_penalty) <= 2.0, "must lie in [-2, 2]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2.0, "must lie in [-2, 2]"),
            (
                "repetition_penalty",
                self.repetition_penalty is None or 0.0 < self.repetition_penalty <= 10.0,
                "must lie in (0, 10]",
            ),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(i >= 0 and abs(v) <= 100.0 for i, v in self.logit_bias),
                f"must hold at most {MAX_LOGIT_BIAS} token ids, each with a value in [-100, 100]",
            ),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in [0, max_tokens]"),
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
            (
                "min_tokens",
                self.grammar is None or self.min_tokens == 0,
                "must be 0 with a grammar, which says itself where an answer may end",
            ),
            (
                "ignore_eos",
                self.grammar is None or not self.ignore_eos,
                "must be false with a grammar, whose answers end with EOS",
            ),
        )
        for name, holds, rule in rules + self._rules_of_ids() + self._rules_of_logprobs():
            if not holds:
                raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: {rule}")

    def _rules_of_ids(self) -> tuple[tuple[str, bool, str], ...]:
        """Field, whether it keeps its rule, and the rule: of allowed_ids and banned_ids."""
        return (
            (
                "allowed_ids",
                len(self.allowed_ids) <= MAX_ALLOWED_IDS and all(i >= 0 for i in self.allowed_ids),
                f"must hold at most {MAX_ALLOWED_IDS} token ids, 0 or more",
            ),
            (
                "allowed_ids",
                not self.allowed_ids or not set(self.allowed_ids) <= set(self.banned_ids),
                "all of them are in banned_ids: one token must be left",
            ),
            (
                "banned_sequences",
                len(self.banned_sequences) <= MAX_BANNED_SEQUENCES
                and all(
                    2 <= len(one) <= MAX_SEQUENCE_TOKENS and min(one) >= 0
                    for one in self.banned_sequences
                ),
                f"must hold at most {MAX_BANNED_SEQUENCES} sequences of 2 to "
                f"{MAX_SEQUENCE_TOKENS} token ids, 0 or more",
            ),
            (
                "banned_sequences",
                not (self.banned_sequences and self.allowed_ids),
                "not together with allowed_ids: no token might be left",
            ),
            (
                "banned_ids",
                len(self.banned_ids) <= MAX_BANNED_IDS and all(i >= 0 for i in self.banned_ids),
                f"must hold at most {MAX_BANNED_IDS} token ids, 0 or more",
            ),
            (
                "allowed_ids",
                self.grammar is None
                or not (self.allowed_ids or self.banned_ids or self.banned_sequences),
                "not together with a grammar, nor what is banned: no token might be left",
            ),
        )

    def _rules_of_logprobs(self) -> tuple[tuple[str, bool, str], ...]:
        """As _rules_of_ids: of what is reported of the model's distribution."""
        asked = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        rule = f"must lie in [0, {MAX_LOGPROBS}]"
        named = self.logprob_ids
        return (
            *(
                (name, count is None or 0 <= count <= MAX_LOGPROBS, rule)
                for name, count in asked.items()
            ),
            (
                "logprob_ids",
                len(named) <= MAX_LOGPROB_IDS and all(i >= 0 for i in named),
                f"must hold at most {MAX_LOGPROB_IDS} token ids, 0 or more",
            ),
            ("logprob_ids", not named or self.logprobs is not None, "only together with logprobs"),
        )

    def with_defaults(self, defaults: Mapping[str, float]) -> Sampling:
        """The same request, with values of `defaults` in fields that are None."""
        left_open = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return msgspec.structs.replace(self, **left_open)

    @property
    def constrained(self) -> bool:
        """Whether the tokens before one say which it may be: it has masks then."""
        return self.grammar is not None or bool(self.banned_sequences)

    @property
    def edits(self) -> bool:
        """Whether logits are changed before a token is picked from them."""
        repetition = self.repetition_penalty or 1.0
        neutral = (self.presence_penalty, self.frequency_penalty, repetition)
        ids = self.logit_bias or self.allowed_ids or self.banned_ids
        return neutral != (0.0, 0.0, 1.0) or bool(ids) or self.min_tokens > 0

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn. A kept set of one token is the likeliest: no vocabulary is so
        large that its likeliest token has less than SMALLEST_TOP_P."""
        top_p = self.top_p or 1.0
        return bool(self.temperature) and self.top_k != 1 and top_p > SMALLEST_TOP_P

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from some of the tokens only."""
        return self.draws and bool(self.top_k or (self.top_p or 1.0) < 1.0 or self.min_p)


class Restore(msgspec.Struct, frozen=True):
    """Begin a request behind the first `rows` rows of its prompt, whose state was saved."""

    snapshot: int
    rows: int
    copied_page: int
    """The page that has the last of the rows: others may write their own rows behind them, and the
    draft's key and value of the last one depend on the token that follows."""
    page: int
    """The request's own page for them, which becomes a copy."""


class Save(msgspec.Struct, frozen=True):
    """Save the state behind the first `rows` rows of a prompt."""

    rows: int
    snapshot: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """Put a request into a free slot."""

    slot: int
    request: int
    """Number of this join. It is never used again, so that results of a request that has left
    cannot be taken for those of the next one in its slot, or of its own next join."""
    tokens: list[int]
    """The prompt's token ids."""
    pages: list[int]
    """KV pages in the order of positions. They cover the prompt and the rows of an iteration behind
    it at least; Grow brings more."""
    sampling: Sampling
    """With a seed where it draws."""
    end_ids: list[int] = []
    """Token ids that end the answer: the request's stop ids, and EOS unless it is ignored."""
    emitted: list[int] = []
    """The beginning of the answer, of a request that comes back: it was in a slot before. Its next
    token is the one after these, and drafts and counts go on as if it had never left."""
    restore: Restore | None = None
    """Where to begin; None: at the first token."""
    saves: list[Save] = []
    """The states to save on the way, by rising rows. A prompt here includes `emitted` but its last
    token."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Drop a request before its end. One that has ended already is ignored."""

    slot: int
    request: int


class Grow(msgspec.Struct, frozen=True, tag=True):
    """Give a request more KV pages, behind those that it has. One that has left is ignored."""

    slot: int
    request: int
    """As in its Join."""
    pages: list[int]


Command = Join | Leave | Grow


class StepPlan(msgspec.Struct, frozen=True):
    """What the leader tells every rank: apply these commands, then step once if there is work."""

    seq: int
    """Number of the plan, from 0."""
    commands: list[Command]
    digest: int
    """Of the leader's slot table before the commands (SlotTable.digest)."""
    stop: bool = False
    """True ends the loop of every rank."""
    depth: int | None = None
    """The most drafts of an iteration from now on; None leaves it at K."""


class Progress(msgspec.Struct, frozen=True):
    """What one request gained in one step."""

    request: int
    slot: int
    tokens: list[int]
    drafted: int = 0
    """Drafts that the step verified for it."""
    accepted: int = 0
    """Of `drafted`, those the target agreed with, also behind the end of the answer."""
    verified: bool = True
    """False for the first token, which the prefill yields without a verify pass."""
    logprobs: list[list[tuple[int, float]]] = []
    """Where asked for, one list for each of `tokens`: the (id, log probability) of the token, then
    those of the likeliest tokens, best first."""
    prompt_logprobs: list[list[tuple[int, float]]] = []
    """Where asked for: of the next tokens of the prompt, in the form of `logprobs`, from its second
    token on. They come in progress of their own, without tokens and before the first of those."""
    finish: str | None = None
    """"stop" (EOS or stop id), "length", or None while the request goes on."""
    error: str = ""
    """Why the request has left its slot without an end of its answer; empty: it has not."""


class StepEvent(msgspec.Struct, frozen=True):
    """What one step of the leader brought."""

    iteration: int
    """Number of the step, from 1."""
    step_s: float
    """How long it took, in seconds."""
    progress: list[Progress]
    depth: int | None = None
    """StepPlan.depth of the step."""


class NumbersError(ArithmeticError):
    """A pass made what is not a number: weights, caches or the device are broken, or a prompt leads
    beyond what the numbers hold. It is here because a driver reads it, which has no torch."""
