"""Mixtures of experts and Qwen3-Next: the target, the draft, and speculation with them.

The target equals transformers in every layout of the files, cut and expert-parallel; the draft
equals tests/draft_reference.py; drafts change no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.model.step import Sampling
from tests import checkpoints, layouts
from tests.draft_reference import draft_hidden
from tests.model.conftest import Checkpoint
from tests.model.test_mtp import ours
from tests.model.test_oracle import assert_same, logits_by
from tests.model.test_speculation import PATTERNS, predicted, prompt_of
from tests.ranks import ForcedDrafter, Output, Team

Weights = dict[str, Tensor]
Layout = Callable[[dict, Weights], Weights]


def one_by_one(text: dict, weights: Weights) -> Weights:
    return weights


def all_fused(text: dict, weights: Weights) -> Weights:
    return layouts.fuse_experts(weights)


@dataclass(frozen=True)
class Case:
    """A model, and how its files hold it."""

    text: dict
    layout: Layout = layouts.released
    nested: bool = True


DENSE_LAYER = {"mlp_only_layers": [1], "norm_topk_prob": False}
EVERY_SECOND = {"decoder_sparse_step": 2, "num_experts_per_tok": 1}
CASES = {
    "mixture": Case(checkpoints.mixture_config()),
    "mixture, one by one, flat": Case(checkpoints.mixture_config(), one_by_one, nested=False),
    "mixture, all fused": Case(checkpoints.mixture_config(num_hidden_layers=8), all_fused),
    "tied mixture": Case(checkpoints.mixture_config(tie_word_embeddings=True)),
    "next": Case(checkpoints.next_config()),
    "next, one layer dense": Case(checkpoints.next_config(**DENSE_LAYER)),
    "next, every second": Case(checkpoints.next_config(**EVERY_SECOND), all_fused),
}
SPLITS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
"""(tensor_parallel, expert_parallel)"""


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    """(folder, ids, transformers' logits of the ids)."""
    made = CASES[request.param]
    weights = checkpoints.random_weights(made.text, seed=3)
    folder = tmp_path_factory.mktemp("mixture")
    checkpoints.write(folder, made.text, made.layout(made.text, weights), nested=made.nested)
    ids = torch.randint(0, 160, (150,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        want = checkpoints.transformers_model(made.text, weights)(torch.tensor([ids])).logits[0]
    return folder, ids, want


@pytest.mark.parametrize(("size", "expert_parallel"), SPLITS)
def test_prefill_equals_transformers(case, size: int, expert_parallel: bool) -> None:
    folder, ids, want = case
    team = Team(folder, tensor_parallel=size, expert_parallel=expert_parallel, prefill_chunk=256)
    assert_same(logits_by(team, ids, [len(ids)]), want)


@pytest.mark.parametrize("chunks", [[133, *[1] * 17], [2, 1, 61, 65, 21]])
def test_chunks_and_steps_equal_transformers(case, chunks: list[int]) -> None:
    folder, ids, want = case
    assert_same(logits_by(Team(folder, prefill_chunk=256), ids, chunks), want)


def swap_halves(weights: Weights) -> Weights:
    """Fused experts read as [up; gate]."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    fused = layouts.fuse_experts(weights)
    return fused | {name: torch.cat(fused[name].chunk(2, 1)[::-1], 1)}


def next_expert(weights: Weights) -> Weights:
    """The experts of one layer counted from another one."""
    fused, name = layouts.fuse_experts(weights), "model.layers.2.mlp.experts.down_proj"
    return fused | {name: fused[name].roll(1, 0)}


def without_shared_gate(weights: Weights) -> Weights:
    """The shared expert as if its gate were shut half at every token."""
    name = "model.layers.3.mlp.shared_expert_gate.weight"
    return weights | {name: torch.zeros_like(weights[name])}


def packed_as_flat(weights: Weights) -> Weights:
    """Rows of in_proj_qkvz that lie in the order of the four projections."""
    name = "model.layers.1.linear_attn.in_proj_"
    rows = torch.cat((weights[f"{name}qkv.weight"], weights[f"{name}z.weight"]))
    packed = layouts.pack_projections(checkpoints.next_config(), weights)
    return packed | {f"{name}qkvz.weight": rows}


@torch.inference_mode()
@pytest.mark.parametrize(
    "fault", [swap_halves, next_expert, without_shared_gate, packed_as_flat, "unnormalised"]
)
def test_wrong_readings_are_far_off(fault: Any) -> None:
    """The oracle tells apart what the tests above would have to find, by far more than rounding."""
    text = checkpoints.next_config()
    weights = checkpoints.random_weights(text, seed=3)
    ids = torch.arange(60)[None]
    want = checkpoints.transformers_model(text, weights)(ids).logits
    if fault == "unnormalised":
        text = text | {"norm_topk_prob": False}
    else:
        weights = fault(weights)
    got = checkpoints.transformers_model(text, weights)(ids).logits
    assert (got - want).abs().max() > 3e-3 * want.abs().max()


@pytest.mark.parametrize("name", ["mixture", "mixture, one by one, flat", "next, one layer dense"])
@pytest.mark.parametrize("draft_body", ["local", "sharded"])
@pytest.mark.parametrize(("size", "expert_parallel"), [(1, False), (2, False), (4, True)])
def test_a_draft_with_experts_equals_the_reference(
    name: str, draft_body: str, size: int, expert_parallel: bool, tmp_path: Path
) -> None:
    made = CASES[name]
    weights = checkpoints.random_weights(made.text, seed=5)
    checkpoints.write(tmp_path, made.text, made.layout(made.text, weights), nested=made.nested)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 160, (40,), generator=random)
    hidden = torch.randn(40, 64, generator=random)
    want = draft_hidden(made.text, weights, hidden, tokens)
    how = {"tensor_parallel": size, "expert_parallel": expert_parallel, "draft_body": draft_body}
    got, drafts = ours(tmp_path, hidden, tokens, [30, *[1] * 4, 6], **how)
    assert (got - want).abs().max() < 2e-6 * want.abs().max()
    assert drafts.tolist() == (want @ weights["lm_head.weight"].t()).argmax(-1).tolist()


NUM_NEW = 24
PROMPTS = [prompt_of(n) for n in (9, 33, 2, 17, 64)]


@pytest.fixture(scope="module", params=["mixture", "next"])
def varied_mixture(request, tmp_path_factory) -> Checkpoint:
    text = CASES[request.param].text
    weights = checkpoints.varied_weights(text)
    folder = tmp_path_factory.mktemp("varied")
    checkpoints.write(folder, text, layouts.released(text, weights))
    return Checkpoint(folder, text, weights)


@pytest.fixture(scope="module")
def off(varied_mixture: Checkpoint) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> its answer without drafts, on one rank, alone."""
    team = Team(varied_mixture.folder, draft_tokens=0)
    how = Sampling(max_tokens=2 * NUM_NEW)
    return {tuple(prompt): team.generate([(prompt, how)])[0].tokens for prompt in PROMPTS}


def test_answers_are_transformers_and_varied(varied_mixture: Checkpoint, off) -> None:
    model = varied_mixture.oracle()
    for prompt in PROMPTS[:2]:
        ids, answer = list(prompt), off[tuple(prompt)]
        with torch.inference_mode():
            for _ in range(NUM_NEW):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer[:NUM_NEW] == ids[len(prompt) :]
    assert all(len(set(answer)) >= NUM_NEW // 2 for answer in off.values())


@pytest.mark.parametrize(
    ("draft_tokens", "size", "changes"),
    [
        (1, 1, {}),
        (3, 2, {}),
        (5, 1, {}),
        (8, 4, {"expert_parallel": True}),
        (3, 2, {"expert_parallel": True, "draft_body": "sharded"}),
    ],
)
def test_on_equals_off_in_ragged_batches(
    varied_mixture: Checkpoint, off, draft_tokens: int, size: int, changes: dict
) -> None:
    """Slots are used again, requests join late, and answers have limits of their own."""
    team = Team(
        varied_mixture.folder,
        draft_tokens=draft_tokens,
        tensor_parallel=size,
        max_slots=3,
        **changes,
    )
    requests = [(p, Sampling(max_tokens=NUM_NEW - 3 * i)) for i, p in enumerate(PROMPTS)]
    outs = team.generate(requests, stagger=2)
    for (prompt, how), out in zip(requests, outs, strict=True):
        team.assert_same(prompt, out.tokens, off[tuple(prompt)][: how.max_tokens])
        assert out.finish == "length"
        assert out.drafted > 0
    assert 0 < sum(out.accepted for out in outs) < sum(out.drafted for out in outs)


@pytest.mark.parametrize("draft_tokens", [3, 5])
def test_forced_drafts_are_counted_and_stop_ids_found(
    varied_mixture: Checkpoint, off, draft_tokens: int
) -> None:
    """Drafts that are right by a pattern; ends at each position of an iteration's drafts."""
    team = Team(varied_mixture.folder, draft_tokens=draft_tokens)
    prompt = next(p for p in PROMPTS if len(set(off[tuple(p)][: draft_tokens + 3])) > draft_tokens)
    answer = off[tuple(prompt)]

    def generate(pattern: str, **how: Any) -> Output:
        for runner in team.runners:
            runner.use_drafter(ForcedDrafter(runner, off, PATTERNS[pattern]))
        return team.generate([(prompt, Sampling(**{"max_tokens": NUM_NEW, **how}))])[0]

    for pattern in PATTERNS:
        for max_tokens in (NUM_NEW, draft_tokens + 2):
            out = generate(pattern, max_tokens=max_tokens)
            assert out.tokens == answer[:max_tokens]
            counts = (out.kept, out.drafted, out.accepted)
            assert counts == predicted(PATTERNS[pattern], max_tokens, draft_tokens)
    for pattern in ("all", "none"):
        for stop in answer[: draft_tokens + 2]:
            out = generate(pattern, stop_ids=(stop,))
            assert (out.tokens, out.finish) == (answer[: answer.index(stop) + 1], "stop")
