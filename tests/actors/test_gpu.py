"""Engines on NVIDIA GPUs against the CPU, token for token; skipped where there are too few.

float32 on one GPU and on two equals the CPU with and without drafts. In bfloat16 the kernels depend
on the row count, so "drafts on = off" holds with pinned rows.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from outrider.actors.engine import Engine
from outrider.benchmarks import planted
from outrider.model.step import Grammar, Sampling
from outrider.model.text import Tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "tiny"
NEW = 48
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("no_cluster"),
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(MODEL)
    texts = (MODEL / "held_out.txt").read_text().split("\n---\n")
    return [tokenizer.encode(text) for text in texts[:12]]


def answers(
    drafts: tuple[int, ...] = (0, 3), grammar: Grammar | None = None, **keys: object
) -> list[list[list[int]]]:
    """One engine's tokens for each number of drafts; asserts that there were drafts."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine.from_config(None, model=str(MODEL), draft_tokens=3, **keys)
    with engine:
        for k in drafts:
            done = engine.generate(
                prompts(), Sampling(max_tokens=NEW, draft_tokens=k, grammar=grammar)
            )
            assert (sum(c.stats.accepted for c in done) > 0) == (k > 0)
            found.append([c.token_ids for c in done])
    return found


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The CPU's tokens, which do not depend on drafts (tests/model/test_speculation.py)."""
    (plain,) = answers((0,), device="cpu", dtype="float32", tensor_parallel=1)
    return plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_float32_equals_the_cpu_with_and_without_drafts(wanted, ranks) -> None:
    plain, drafted = answers(device="cuda", dtype="float32", tensor_parallel=ranks)
    assert plain == wanted
    assert drafted == wanted


@pytest.mark.parametrize("ranks", [1, 2])
def test_grammars_are_kept_as_on_the_cpu(ranks) -> None:
    """Masks in the kernels of sampled rows, and iterations in two pieces, each a graph."""
    rules = Grammar("regex", r"(def|class) [a-z_]{3,12}\(self(, [a-z]{1,5}){0,3}\): return [0-9]+")
    keys = {"dtype": "float32", "grammar": rules}
    (plain,) = answers((0,), device="cpu", tensor_parallel=1, **keys)
    for found in answers(device="cuda", tensor_parallel=ranks, **keys):
        assert found == plain


def test_bfloat16_with_pinned_rows_is_the_same_with_and_without_drafts() -> None:
    plain, drafted = answers(device="cuda", dtype="bfloat16", tensor_parallel=2, pin_rows=True)
    assert drafted == plain


def test_a_planted_chain_comes_out_with_its_known_acceptance(planted_tiny) -> None:
    chain = planted.chain(planted.SIZES["tiny"]["vocab_size"], 0.8425, 0)
    keys = {"device": "cuda", "tensor_parallel": 2, "max_model_len": 512, "draft_tokens": 5}
    with Engine.from_config(None, model=str(planted_tiny), **keys) as engine:
        run_ahead = engine.stats()["ranks"][0]["run_ahead"]
        starts = [5, 9, 17, 40, 700]
        done = engine.generate([[s] for s in starts], Sampling(max_tokens=60, ignore_eos=True))
    for start, completion in zip(starts, done, strict=True):
        expected = planted.expected_counts(chain, start, 60, 5, run_ahead)
        assert completion.token_ids == expected.tokens
        assert completion.stats.accepted == expected.accepted
