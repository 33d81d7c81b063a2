"""Parts of the benchmarks that no other test runs: ranks without Ray, the tables that are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.benchmarks import bench, planted, ranks, serving, traffic
from outrider.model.step import Join
from tests.ranks import Team


def test_the_served_checkpoint_is_there() -> None:
    assert (serving.TINY / "config.json").is_file()


def event(name: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start}


def test_a_kernel_counts_for_what_it_adds_after_the_one_before() -> None:
    """From 10 to 30: `a` runs to 16, `b` overlaps it by 2 and adds 4, then 5 idle, `a` again."""
    events = [event("begin", 0, 10), event("a", 10, 16), event("b", 14, 20), event("a", 25, 30)]
    lines = ranks.kernel_table(events, 2, "rounds").splitlines()
    assert lines[0] == "2 rounds of 10.0 us, device busy 75.00%"
    assert [line.split() for line in lines[1:]] == [
        ["5.5", "us", "1.0", "calls", "a"],
        ["2.0", "us", "0.5", "calls", "b"],
    ]


def test_the_table_of_iterations_leaves_out_the_first_quarter_and_the_last() -> None:
    events = [event("prompt", 0, 1), event("chunk", 1, 4)]
    for number in range(8):
        start = 10.0 * (number + 1)
        events += [
            event("verify", start, start + 6),
            event("_commit_kernel", start + 6, start + 10),
        ]
    decode, prompts = ranks.tables(events).split("\n\n")
    assert decode.startswith("4 iterations of 10.0 us, device busy 100.00%")
    assert "4.0 us    1.0 calls  _commit_kernel" in decode
    assert prompts.startswith("1 stretch of prompts of 15.0 us")


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({}, {}, "greedy"),
        ({"temperature": 0.8}, {"temperature": 0.8}, "temperature 0.8"),
        (
            {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
            {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
            "temperature 1, top_p 0.95, top_k 50",
        ),
        (
            {"penalty": 0.5, "logprobs": 5},
            {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 5},
            "presence_penalty 0.5, frequency_penalty 0.5, logprobs 5",
        ),
    ],
)
def test_ranks_are_timed_with_any_kind_of_request(
    planted_tiny: Path, options: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    assert traffic.sampling_settings(**options) == settings
    assert traffic.label(settings) == words
    (runner,) = Team(planted_tiny, draft_tokens=3).runners
    right, wrong = (planted.chain(1024, 0.8425, seed) for seed in (0, 1))
    row = ranks.measure(runner, right, 2, 8, 24, 1, settings)
    assert (row["exact"], row["repeated"], row["sampling"]) == (True, True, settings)
    assert row["differences"] == []
    assert 0.3 < row["accepted"] < 1
    assert row["tok_s"] > 0
    assert ranks.measure(runner, wrong, 2, 8, 24, 1, settings)["exact"] is False


@pytest.mark.parametrize("same_seeds", [True, False])
def test_where_texts_are_not_known_the_same_seed_must_give_the_same_one(
    planted_tiny: Path, same_seeds: bool
) -> None:
    (runner,) = Team(planted_tiny, draft_tokens=3).runners
    apply, joined = runner.apply, []

    def with_seeds(joins: list[Join]) -> None:
        joined.append(joins)
        seed = None if same_seeds else len(joined)
        others = [msgspec.structs.replace(join.sampling, seed=seed) for join in joins if seed]
        apply([msgspec.structs.replace(j, sampling=s) for j, s in zip(joins, others)] or joins)

    runner.apply = with_seeds  # type: ignore[method-assign]
    row = ranks.measure(runner, planted.chain(1024, 0.8425, 0), 2, 8, 24, 1, {"temperature": 20.0})
    assert (row["exact"], row["repeated"], row["differences"]) == (None, same_seeds, [])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"top_p": 0.9}, "--top-p 0.9, --top-k 0: .* need a --temperature above 0"),
        ({"top_k": 3}, "--top-k 3: .* need a --temperature above 0"),
        ({"penalty": 3.0}, r"presence_penalty = 3.0: must lie in \[-2, 2\]"),
        ({"logprobs": 21}, "logprobs = 21"),
    ],
)
def test_settings_that_no_request_may_have_are_refused(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        traffic.sampling_settings(**options)


def test_greedy_and_sampled_speed_stand_side_by_side() -> None:
    """Sampled: 3 tokens an iteration at 60 tok/s; greedy: 4, so at that 80, of its 100."""
    text, other = [[1, 2]], [[3, 4]]
    plain = bench.Runs(
        greedy=bench.Run(tok_s=40.0, outputs=text, iterations=9),
        sampled=bench.Run(tok_s=39.0, outputs=other, iterations=9),
    )
    drafting = bench.Runs(
        greedy=bench.Run(tok_s=100.0, outputs=text, drafted=40, accepted=30, iterations=10),
        sampled=bench.Run(tok_s=60.0, outputs=text, drafted=40, accepted=20, iterations=10),
    )
    assert drafting.line(4) == (
        "TP2 K=4: greedy 100.0 tok/s, 75.0% accepted | sampled 60.0 tok/s, 50.0% accepted | "
        "sampled at greedy's acceptance 80.0 tok/s, 0.800 of it"
    )
    settings = {"temperature": 1.0}
    reference = {1: bench.Run(tok_s=20.0, outputs=text)}
    found = bench.report({0: plain, 4: drafting}, settings, reference, {}, [[0]], lambda ids: 0.0)
    assert (found["tok_s"], found["times_without_drafts"], found["sampling"]) == (
        100,
        2.5,
        settings,
    )
    assert found["engine_by_draft_tokens"][4]["prompts_equal_to_transformers"] == 1
    sampled = found["sampled_by_draft_tokens"]
    assert [sampled[k]["prompts_equal_to_plain_decoding"] for k in (0, 4)] == [1, 0]
    assert sampled[4]["share_of_greedy_at_its_acceptance"] == 0.8
