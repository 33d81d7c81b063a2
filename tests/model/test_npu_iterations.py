"""Whole requests on the NPU backend over a fake of torch_npu: the CPU backend's tokens.

Iterations are captured and replayed as on the device (tests/npu.py); prompts run uncaptured.
"""

from __future__ import annotations

import pytest
import torch

from outrider.model.config import Ablation, ConfigError
from outrider.model.step import Grammar, Sampling
from outrider.model.warmup import warm_up
from outrider.parallel.device import Device
from tests.npu import open_fake
from tests.ranks import ForcedDrafter, Team

NUM_NEW = 14
PAGE = 128


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 158, (length,), generator=generator).tolist()


REQUESTS = [
    (prompt_of(1), Sampling(max_tokens=NUM_NEW)),
    (prompt_of(120), Sampling(max_tokens=NUM_NEW)),  # crosses a page while it decodes
    (prompt_of(40), Sampling(max_tokens=NUM_NEW, draft_tokens=1)),
    (prompt_of(7), Sampling(max_tokens=5)),
    (prompt_of(131), Sampling(max_tokens=NUM_NEW)),
]


@pytest.fixture(scope="module")
def folder(varied):
    return varied.folder


@pytest.fixture(scope="module")
def plain(folder):
    team = Team(folder, draft_tokens=0, page_tokens=PAGE, num_pages=16)
    answers = [team.generate([request])[0].tokens for request in REQUESTS]
    assert all(len(set(tokens)) >= len(tokens) // 2 for tokens in answers)
    return answers


def npu_team(folder, monkeypatch, **changes) -> Team:
    monkeypatch.setattr("tests.ranks.open_device", lambda kind, index, group: open_fake(group))
    return Team(folder, **{"page_tokens": PAGE, "num_pages": 16, **changes})


def replays(team: Team) -> int:
    return team.runners[0].device.ops._runtime.replays


@pytest.mark.parametrize(
    ("draft_tokens", "size", "body"), [(0, 1, "local"), (3, 1, "local"), (2, 2, "sharded")]
)
def test_tokens_equal_the_cpu_backends(
    folder, plain, monkeypatch, draft_tokens: int, size: int, body: str
) -> None:
    """Slots that come and go, padded batches, own K, prompts over a page: all through replays."""
    team = npu_team(
        folder, monkeypatch, draft_tokens=draft_tokens, tensor_parallel=size, draft_body=body
    )
    some = REQUESTS if size == 1 else REQUESTS[:2]
    outputs = team.generate(some, stagger=2)
    assert [out.tokens for out in outputs] == plain[: len(some)]
    assert replays(team) > 10
    calls = team.runners[0].device.ops._npu.calls
    assert calls["npu_fused_infer_attention_score"] > 0
    assert all((out.drafted > 0) == (draft_tokens > 0) for out in outputs)


def test_a_trained_draft_is_accepted_as_on_the_cpu(repo, monkeypatch) -> None:
    """Where many drafts survive, every iteration's lists differ: tokens and kept rows agree."""
    how = Sampling(max_tokens=24, ignore_eos=True)
    requests = [([6, 200, 31, 57, 90], how), (list(range(60, 160)), how)]
    keys = {"draft_tokens": 3, "page_tokens": PAGE, "num_pages": 16, "tensor_parallel": 2}
    want = Team(repo / "examples" / "tiny", **keys).generate(requests, stagger=1)
    team = npu_team(repo / "examples" / "tiny", monkeypatch, **keys)
    assert team.generate(requests, stagger=1) == want
    assert len({kept for out in want for kept in out.kept}) >= 3
    assert replays(team) > 5


def test_grammars_are_kept_as_on_the_cpu(repo, monkeypatch) -> None:
    """Their iterations run uncaptured, between replays of those without a grammar."""
    ends = {"stop_ids": (0, 2), "max_tokens": 24}
    held = Sampling(grammar=Grammar("regex", r"[a-z]{9,20}\(x, [0-9]{1,3}\)"), **ends)
    requests = [([6, 200, 31], Sampling(**ends)), ([90, 8], held), ([31, 57], held)]
    keys = {"draft_tokens": 3, "page_tokens": PAGE, "num_pages": 16, "tensor_parallel": 2}
    want = Team(repo / "examples" / "tiny", **keys).generate(requests, stagger=5)
    team = npu_team(repo / "examples" / "tiny", monkeypatch, **keys)
    assert team.generate(requests, stagger=5) == want
    assert sum(out.accepted for out in want[1:]) > 0
    assert replays(team) > 0


@pytest.mark.parametrize("old", ["no_graph", "sync_each_draft"])
def test_ablations_keep_the_tokens(folder, plain, monkeypatch, old: str) -> None:
    """Uncaptured iterations read the same lists; a graph for each piece updates its own."""
    monkeypatch.setattr(Device, "synchronise", lambda self: None)
    team = npu_team(folder, monkeypatch, draft_tokens=3, ablation=Ablation(**{old: True}))
    outputs = team.generate(REQUESTS[:3], stagger=2)
    assert [out.tokens for out in outputs] == plain[:3]
    assert all(out.drafted > 0 for out in outputs)
    assert (replays(team) == 0) == (old == "no_graph")


def test_the_host_lists_follow_what_was_kept(folder, plain, monkeypatch) -> None:
    """Drafts that are right or wrong by turns: each iteration keeps another number of rows."""
    answers = {tuple(prompt): tokens for (prompt, _), tokens in zip(REQUESTS, plain, strict=True)}
    team = npu_team(folder, monkeypatch, draft_tokens=4)
    monkeypatch.setattr(team.runners[0].device.ops, "capture", None)
    for runner in team.runners:  # this drafter reads the host's tables: nothing can be captured
        runner.graphs._eager.update((n, 4) for n in (1, 2, 4))
        runner.use_drafter(
            ForcedDrafter(runner, answers, lambda at, i: (at * 7 + i) % 5 != 0 and i < at % 5)
        )
    outputs = team.generate(REQUESTS, stagger=1)
    assert [out.tokens for out in outputs] == plain
    assert len({kept for out in outputs for kept in out.kept}) > 2


@pytest.mark.parametrize("size", [1, 2])
def test_sampled_requests_run_uncaptured_with_the_same_draws(
    folder, monkeypatch, size: int
) -> None:
    """Drawn, filtered, edited, reporting and greedy ones side by side."""
    ways: list[dict] = [
        {"temperature": 0.9, "seed": 5},
        {},
        {"temperature": 1.1, "seed": 6, "top_k": 100, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.5, "logit_bias": ((9, 2.0),)},
    ]
    requests = [
        (prompt_of(9 + 7 * index), Sampling(max_tokens=NUM_NEW, **way))
        for index, way in enumerate(ways)
    ]
    keys = {"draft_tokens": 3, "tensor_parallel": size}
    want = Team(folder, page_tokens=PAGE, num_pages=16, **keys).generate(requests)
    got = npu_team(folder, monkeypatch, **keys).generate(requests)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert [out.kept for out in got] == [out.kept for out in want]
    assert all(out.drafted > 0 for out in got)


def test_warm_up_captures_each_batch_size_and_depth_and_no_prompt(folder, monkeypatch) -> None:
    runner = npu_team(folder, monkeypatch, draft_tokens=1, max_slots=2).runners[0]
    warm_up(runner)
    assert sorted(runner.graphs._graphs) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(replay is not None for replay, _ in runner.graphs._graphs.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draft_tokens": 16}, "speculation.draft_tokens = 16: .* set it to 15 or less"),
        ({"page_tokens": 16}, "cache.page_tokens = 16: this device needs a multiple of 128"),
    ],
)
def test_what_the_device_cannot_do_names_the_key(folder, monkeypatch, changes, says) -> None:
    with pytest.raises(ConfigError, match=says):
        npu_team(folder, monkeypatch, **changes)
