"""The requests of a benchmark: their prompts, and how they pick their tokens.

    options -> sampling_settings -> Protocol -> (prompt, Sampling) of each request

Settings are those fields of Sampling that differ from greedy's, by name, as reports show them. So
engines under measurement take no defaults of their model (serve.generation_defaults: neutral). The
i-th request of a set has the protocol's seed + i: so a sampled request that is asked again has the
same prompt and seed, and must get the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.model.step import Sampling

Settings = Mapping[str, Any]
GREEDY: Settings = {}
Request = tuple[list[int], Sampling]
"""A prompt's token ids, and how its answer is made."""


def sampling_settings(
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    penalty: float = 0.0,
    logprobs: int | None = None,
) -> Settings:
    """The settings that a benchmark's options ask for.

    penalty: presence and frequency penalty alike. Raises ValueError for a value that Sampling
    refuses, and for filters of draws where nothing is drawn.
    """
    if temperature == 0 and (top_p < 1 or top_k > 0):
        raise ValueError(
            f"--top-p {top_p:g}, --top-k {top_k}: they choose among the tokens that may be drawn, "
            "so they need a --temperature above 0"
        )
    asked = {
        "temperature": (temperature, 0.0),
        "top_p": (top_p, 1.0),
        "top_k": (top_k, 0),
        "presence_penalty": (penalty, 0.0),
        "frequency_penalty": (penalty, 0.0),
        "logprobs": (logprobs, None),
    }
    settings = {name: value for name, (value, greedy) in asked.items() if value != greedy}
    Sampling(**settings)
    return settings


def label(settings: Settings) -> str:
    """The settings in words, such as "temperature 0.8, top_p 0.95"; "greedy" where they draw
    nothing and change nothing."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "greedy"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The requests that every engine answers."""

    prompt: int
    """Tokens of a prompt, which are random ids."""
    new: int
    """Tokens of an answer; no end of sequence stops it."""
    requests: int
    """Requests of a round, rounded up to a multiple of the batch size."""
    rounds: int
    warmup: int
    """Requests before the rounds, which are not counted."""
    seed: int
    """Of the random ids, and of the first request's draws."""
    sampling: Settings

    def traffic(self, vocab: int, count: int, *, warm: bool = False) -> list[Request]:
        """The first `count` requests of the timed set, or with `warm` of the set that warms up."""
        random = np.random.default_rng([self.seed, warm])
        return [
            (
                random.integers(0, vocab, self.prompt).tolist(),
                Sampling(max_tokens=self.new, ignore_eos=True, seed=self.seed + i, **self.sampling),
            )
            for i in range(count)
        ]
