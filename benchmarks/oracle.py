"""What answers are compared with: what the checkpoint must give, and the same request's others.

    Oracle(checkpoint, settings) -> expected tokens and counters -> counters, differences
    answers to the same requests -> repeats

A planted checkpoint's text is known for greedy requests, and for sampled ones up to a temperature
at which a draw still takes the likeliest token (planted.MAX_TEMPERATURE). That checks the way of a
sampled request through the engine, not its draws. Where no text is known, one check remains: the
same prompt and seed twice must give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.actors.engine import Engine
from outrider.benchmarks import planted
from outrider.benchmarks.differences import find_differences, margin_of
from outrider.benchmarks.traffic import GREEDY, Settings
from outrider.model.config import load_config
from outrider.model.step import Sampling


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request. Times are in seconds since the request was submitted."""

    prompt: list[int]
    seed: int
    """Of its draws. Requests of one set with the same seed are the same request."""
    tokens: list[int]
    started_s: float
    """Time of the submission on this process's clock."""
    pieces: list[tuple[float, float, int]]
    """For each streamed piece: client's time, driver's time, number of tokens."""
    server: dict[str, Any]
    """The driver's RequestStats."""


class Oracle:
    """The tokens and counters that a checkpoint must give, where they are known.

    `arguments` are those that a planted checkpoint was made with; None for any other checkpoint.
    """

    def __init__(self, folder: Path, settings: Settings = GREEDY) -> None:
        self.vocab = load_config(folder).vocab_size
        file = folder / "planted.json"
        self.arguments = json.loads(file.read_text()) if file.is_file() else None
        self.knows = bool(self.arguments) and (
            settings.get("temperature", 0.0) <= planted.MAX_TEMPERATURE
        )
        if self.arguments:
            accept, seed = self.arguments["accept"], self.arguments["seed"]
            self.chain = planted.chain(self.vocab, accept, seed)

    @cache  # noqa: B019 -- a process has one oracle
    def expected(
        self, last: int, new: int, draft_tokens: int, run_ahead: int
    ) -> planted.Expected | None:
        """What a request must give whose prompt ends in `last`; None where it is not known."""
        if not self.knows:
            return None
        return planted.expected_counts(self.chain, last, new, draft_tokens, run_ahead)


def differences(
    engine: Engine, answers: Sequence[Answer], oracle: Oracle, new: int
) -> list[dict[str, Any]]:
    """Where answers are not what the oracle expects, with the engine's own top-2 margins there."""
    asked = Sampling(max_tokens=1, logprobs=2, draft_tokens=0, ignore_eos=True)

    def top2_margin(tokens: list[int]) -> float:
        (answer,) = engine.generate([tokens], asked)
        return margin_of(answer.logprobs[0])

    expected = [oracle.expected(a.prompt[-1], new, 0, 0) for a in answers]
    compared = [(a.prompt, a.tokens, e.tokens) for a, e in zip(answers, expected) if e is not None]
    return [asdict(difference) for difference in find_differences(compared, top2_margin)]


def counters(
    answers: Sequence[Answer], draft_tokens: int, oracle: Oracle, new: int, run_ahead: int
) -> dict[str, Any]:
    """Sums of the answers' counters, beside what the oracle expects where it knows."""
    total = {
        name: sum(a.server[name] for a in answers) for name in ("iterations", "drafted", "accepted")
    }
    iterations = max(1, total["iterations"])
    by_position = [
        sum(a.server["accepted_per_position"][position] for a in answers) / iterations
        for position in range(draft_tokens)
    ]
    tokens_after_first = sum(len(a.tokens) - 1 for a in answers)
    known: dict[str, Any] = {"exact": None, "expected_accepted": None, "expected_drafted": None}
    if oracle.knows:
        expected = [oracle.expected(a.prompt[-1], new, draft_tokens, run_ahead) for a in answers]
        right = [one for one in expected if one is not None]
        known = {
            "exact": sum(a.tokens == one.tokens for a, one in zip(answers, right, strict=True)),
            "expected_accepted": sum(one.accepted for one in right),
            "expected_drafted": sum(one.drafted for one in right),
        }
    return {
        **total,
        "accepted_share": round(total["accepted"] / max(1, total["drafted"]), 4),
        "accepted_by_position": [round(share, 4) for share in by_position],
        "tokens_per_iteration": round(tokens_after_first / iterations, 3),
        **known,
    }


def repeats(texts: Iterable[tuple[Hashable, Sequence[int]]]) -> dict[str, int]:
    """How often a request was asked again, and how often it got the tokens of its first answer.

    texts: (request, tokens) of each answer; a request is known by its seed, for example.
    """
    first: dict[Hashable, Sequence[int]] = {}
    repeated = same = 0
    for request, tokens in texts:
        if request in first:
            repeated, same = repeated + 1, same + (list(tokens) == list(first[request]))
        else:
            first[request] = tokens
    return {"repeated": repeated, "repeated_same": same}
