"""Sampled text is a function of prompt, seed and parameters: nothing that makes it fast changes it.

    REQUESTS: greedy, drawn, filtered, edited and reporting ones; `right`: their texts, K = 0, alone

`right` is held to transformers: each token is picked by hand (tests/sampling.py) from the oracle's
logits. Every comparison asserts that drafts were made and that some of sampled requests were kept.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from outrider.model.config import Ablation
from outrider.model.step import Sampling
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.model.test_edits import edited_by_hand
from tests.model.test_speculation import PATTERNS, predicted, prompt_of
from tests.ranks import ForcedDrafter, Output, Team, record_drafts, serve
from tests.sampling import pick_by_hand

NUM_NEW = 16
HOW: dict[str, dict] = {
    "drawn": {"temperature": 1.0, "seed": 3},
    "greedy": {},
    "seed of 63 bits": {"temperature": 0.8, "seed": (1 << 62) + 3},
    "top_k": {"temperature": 0.7, "top_k": 20, "seed": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.8, "seed": 5},
    "more than candidates": {"temperature": 1.0, "top_k": 120, "top_p": 0.99, "seed": 6},
    "all filters": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "seed": 7},
    "edited": {
        "temperature": 0.6, "top_k": 30, "seed": 8, "frequency_penalty": 0.7,
        "repetition_penalty": 1.2, "logit_bias": ((17, 3.0), (42, 2.0)), "logprobs": 2,
    },
    "greedy, edited": {"presence_penalty": 1.5},
    "greedy, reporting": {"logprobs": 3},
}  # fmt: skip
REQUESTS = [
    (prompt_of(length, seed=8), Sampling(max_tokens=NUM_NEW, ignore_eos=True, **how))
    for length, how in zip((9, 33, 2, 17, 70, 5, 12, 40, 8, 3), HOW.values(), strict=True)
]
SAMPLED = [index for index, (_, how) in enumerate(REQUESTS) if how.temperature]


@pytest.fixture(scope="module")
def folder(varied: Checkpoint) -> Path:
    return varied.folder


@pytest.fixture(scope="module")
def right(folder: Path) -> list[Output]:
    team = Team(folder, draft_tokens=0)
    outs = [team.generate([request])[0] for request in REQUESTS]
    assert all(len({*out.tokens}) >= NUM_NEW // 2 for out in outs)
    return outs


def check(outs: list[Output], right: list[Output], *, drafts: bool = True) -> None:
    for name, out, want in zip(HOW, outs, right, strict=True):
        assert (out.tokens, out.finish) == (want.tokens, want.finish), name
        assert [[i for i, _ in row] for row in out.logprobs] == [
            [i for i, _ in row] for row in want.logprobs
        ]
        assert (out.drafted > 0) == drafts, name
    if drafts:
        assert sum(outs[index].accepted for index in SAMPLED) > 0


def test_each_token_is_picked_by_hand_from_the_oracles_logits(
    varied: Checkpoint, right: list[Output]
) -> None:
    model = varied.oracle()
    for name, (prompt, how), out in zip(HOW, REQUESTS, right):
        with torch.inference_mode():
            text = torch.tensor([prompt + out.tokens])
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        for index, token in enumerate(out.tokens):
            edited = edited_by_hand(logits[index], prompt, out.tokens[:index], how)
            assert token == pick_by_hand(edited, how, len(prompt) + index), (name, index)


@pytest.mark.parametrize("draft_tokens", range(9))
def test_the_number_of_drafts_changes_no_text(
    folder: Path, right: list[Output], draft_tokens: int
) -> None:
    """All requests in ragged batches: some wait for a slot, others join late."""
    team = Team(folder, draft_tokens=draft_tokens, max_slots=4)
    check(team.generate(REQUESTS, stagger=1), right, drafts=draft_tokens > 0)


@pytest.mark.parametrize("draft_body", ["local", "sharded"])
@pytest.mark.parametrize(("tensor_parallel", "draft_tokens"), [(2, 3), (2, 8), (4, 3)])
def test_ranks_and_draft_homes_change_no_text(
    folder: Path, right: list[Output], tensor_parallel: int, draft_tokens: int, draft_body: str
) -> None:
    team = Team(
        folder, draft_tokens=draft_tokens, tensor_parallel=tensor_parallel, draft_body=draft_body
    )
    check(team.generate(REQUESTS), right)


@pytest.mark.parametrize("prefill_chunk", [5, 16, 256])
def test_chunks_of_prompts_change_no_text(
    folder: Path, right: list[Output], prefill_chunk: int
) -> None:
    team = Team(folder, draft_tokens=3, prefill_chunk=prefill_chunk, max_slots=10, num_pages=200)
    check(team.generate(REQUESTS), right)


def test_alone_and_together_the_drafts_are_the_same_too(folder: Path, right: list[Output]) -> None:
    team = Team(folder, draft_tokens=3, max_slots=10, num_pages=200)
    alone = [team.generate([request])[0] for request in REQUESTS]
    check(alone, right)
    together = team.generate(REQUESTS)
    assert [out.kept for out in together] == [out.kept for out in alone]


def test_captured_iterations_change_no_text(folder: Path, right: list[Output]) -> None:
    team = Team(folder, draft_tokens=3)
    (runner,) = team.runners
    captured = record(runner)
    for _ in range(2):
        check(serve(runner, REQUESTS), right)
    features = {key[2] for key in captured() if len(key) == 3}
    assert {each.filtered for each in features} == {False, True}


@pytest.mark.parametrize(
    "changes",
    [{"draft_head": "fp8"}, {"ablation": Ablation(argmax_drafts=True)}],
    ids=["fp8 head", "argmax drafts"],
)
def test_another_drafter_changes_no_text(
    folder: Path, right: list[Output], changes: dict[str, object]
) -> None:
    usual, *others = (
        Team(folder, draft_tokens=3, **keys)
        for keys in ({}, changes, {**changes, "tensor_parallel": 2})
    )
    drafts = record_drafts(usual.runners[0])
    check(usual.generate(REQUESTS), right)
    for team in others:
        offered = record_drafts(team.runners[0])
        check(team.generate(REQUESTS), right)
        both = drafts.keys() & offered.keys()
        assert any(drafts[at] != offered[at] for at in both if at[0] in SAMPLED)


@pytest.mark.parametrize("pattern", ["all", "none", "uneven"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_forced_drafts_of_sampled_requests_are_counted_as_predicted(
    folder: Path, right: list[Output], pattern: str, tensor_parallel: int
) -> None:
    """Every row of a verify pass picks the token that the position has, whatever was drafted."""
    k, team = 5, Team(folder, draft_tokens=5, tensor_parallel=tensor_parallel)
    answers = {tuple(prompt): out.tokens for (prompt, _), out in zip(REQUESTS, right)}
    for runner in team.runners:
        runner.use_drafter(ForcedDrafter(runner, answers, PATTERNS[pattern]))
    counts = predicted(PATTERNS[pattern], NUM_NEW, k)
    for out, want in zip(team.generate(REQUESTS, stagger=1), right, strict=True):
        assert out.tokens == want.tokens
        assert (out.kept, out.drafted, out.accepted) == counts


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_one_kept_id_is_the_greedy_text(folder: Path, tensor_parallel: int) -> None:
    prompts = [prompt for prompt, _ in REQUESTS[:3]]
    team = Team(folder, draft_tokens=3, tensor_parallel=tensor_parallel)
    greedy = team.generate([(p, Sampling(max_tokens=NUM_NEW)) for p in prompts])
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        how = Sampling(max_tokens=NUM_NEW, temperature=1.5, seed=1, **narrow)  # type: ignore[arg-type]
        outs = team.generate([(p, how) for p in prompts])
        assert [out.tokens for out in outs] == [out.tokens for out in greedy]
        assert [out.kept for out in outs] == [out.kept for out in greedy]


def test_seeds_that_differ_anywhere_give_other_texts(folder: Path) -> None:
    team = Team(folder, draft_tokens=3)
    seeds = (0, 1, 1 << 31, 1 << 32, 1 << 33, 1 << 62)
    requests = [
        (REQUESTS[0][0], Sampling(max_tokens=NUM_NEW, temperature=1.2, seed=s)) for s in seeds
    ]
    texts = Counter(tuple(out.tokens) for out in team.generate(requests))
    assert len(texts) == len(seeds)
    again = Sampling(max_tokens=NUM_NEW, temperature=1.2, seed=1 << 32)
    assert tuple(team.generate([(REQUESTS[0][0], again)])[0].tokens) in texts


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_used_slot_forgets_how_its_last_tenant_picked(
    folder: Path, right: list[Output], tensor_parallel: int
) -> None:
    """One slot, and a strongly edited tenant before each of the others."""
    team = Team(folder, draft_tokens=3, tensor_parallel=tensor_parallel, max_slots=1)
    strong = Sampling(
        max_tokens=4, temperature=0.5, top_k=2, seed=1, presence_penalty=-2.0, min_tokens=3,
        logit_bias=tuple((i, 50.0) for i in range(3)), stop_ids=(5, 6),
    )  # fmt: skip
    followers = [0, 7, 1, 8, 3, 9]
    outs = team.generate(
        [request for index in followers for request in ((prompt_of(4), strong), REQUESTS[index])]
    )
    assert [out.tokens for out in outs[1::2]] == [right[index].tokens for index in followers]
    assert {*outs[0].tokens} <= {0, 1, 2}
