"""The planted checkpoint keeps its promise, and the counts computed from its chain are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import Qwen3_5ForCausalLM

from outrider.benchmarks import planted

VOCAB = planted.SIZES["tiny"]["vocab_size"]


def test_transformers_prints_the_chain(planted_tiny: Path) -> None:
    model = Qwen3_5ForCausalLM.from_pretrained(planted_tiny, dtype=torch.float32)
    prompt = torch.tensor([[5, 9, 17]])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = planted.expected_counts(planted.chain(VOCAB, 0.8425, 0), 17, 48, draft_tokens=0)
    assert output[0, prompt.shape[1] :].tolist() == expected.tokens


def test_next_is_one_cycle_through_the_vocabulary() -> None:
    following = planted.chain(VOCAB, 0.5, seed=3).next.tolist()
    seen, token = set(), 0
    while token not in seen:
        seen.add(token)
        token = following[token]
    assert len(seen) == VOCAB


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8425, 1.0])
def test_share_of_right_guesses_is_the_one_asked_for(accept: float) -> None:
    chain = planted.chain(50_000, accept, seed=1)
    assert (chain.guess == chain.next).float().mean().item() == pytest.approx(accept, abs=0.01)


def test_acceptance_over_the_whole_cycle_is_near_the_geometric_mean() -> None:
    share, drafts = 0.8425, 5
    counts = planted.expected_counts(planted.chain(50_000, share, 0), 0, 50_000, drafts)
    geometric = sum(share**i for i in range(1, drafts + 1)) / drafts
    assert counts.accepted / counts.drafted == pytest.approx(geometric, abs=0.02)


@settings(deadline=None, max_examples=60)
@given(
    accept=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    start=st.integers(0, 63),
    num_tokens=st.integers(1, 100),
    draft_tokens=st.integers(0, 16),
)
def test_expected_counts_equal_a_loop_over_rows(
    accept: float, seed: int, start: int, num_tokens: int, draft_tokens: int
) -> None:
    """Draft all, ask the target at every row of [last, drafts], keep the agreeing prefix."""
    chain = planted.chain(64, accept, seed)
    target = [int(token) for token in chain.next]
    draft = [int(token) for token in chain.guess]
    tokens, iterations, drafted, accepted = [target[start]], 0, 0, [0] * draft_tokens
    while len(tokens) < num_tokens:
        rows = [tokens[-1]]
        limit = min(draft_tokens, num_tokens - len(tokens) - 1)
        drafted += limit
        for _ in range(limit):
            rows.append(draft[rows[-1]])
        answers = [target[row] for row in rows]
        agree = [row == answer for row, answer in zip(rows[1:], answers)]
        prefix = [*agree, False].index(False)
        tokens += answers[: prefix + 1]
        accepted = [count + (i < prefix) for i, count in enumerate(accepted)]
        iterations += 1
    counts = planted.expected_counts(chain, start, num_tokens, draft_tokens)
    assert counts == planted.Expected(
        tokens=tokens,
        iterations=iterations,
        drafted=drafted,
        accepted=sum(accepted),
        accepted_per_position=accepted,
    )


@pytest.mark.parametrize(("accept", "kept", "drafted"), [(1.0, 5, 32), (0.0, 1, 22)])
def test_right_and_wrong_drafters_keep_everything_and_nothing(
    accept: float, kept: int, drafted: int
) -> None:
    counts = planted.expected_counts(planted.chain(VOCAB, accept, 0), 3, 1 + 8 * kept, 4)
    assert (counts.iterations, counts.drafted, counts.accepted) == (8, drafted, 8 * (kept - 1))


@pytest.mark.parametrize("size", planted.SIZES)
def test_heads_and_blocks_fit_in_every_size(size: str) -> None:
    config = planted.text_config(size)
    assert 3 * planted._block(config["hidden_size"]) + 1 <= config["hidden_size"]
    assert planted._block(config["hidden_size"]) <= config["intermediate_size"]
    assert config["layer_types"][-1] == "full_attention"
    assert config["num_hidden_layers"] % planted.FULL_ATTENTION_INTERVAL == 0


def test_file_holds_real_checkpoints_names_and_dtypes(planted_tiny: Path) -> None:
    config = json.loads((planted_tiny / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    with safe_open(planted_tiny / "model.safetensors", framework="pt") as file:
        float32 = [name for name in file.keys() if file.get_tensor(name).dtype == torch.float32]
        assert "mtp.layers.0.self_attn.q_proj.weight" in file.keys()
    assert {name.rsplit("linear_attn.", 1)[1] for name in float32} == {"A_log", "norm.weight"}
