"""The plan's bytes are what a rank allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.model.config import ConfigError, RunConfig, load_config
from outrider.model.plan import check_pages, memory_plan, overshoot_rows, pages_for
from tests import checkpoints, layouts, quantised
from tests.ranks import Team


@pytest.mark.parametrize("draft_body", ["local", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16", "draft_head": "fp8", "num_snapshots": 3}, {"draft_tokens": 0}],
)
@pytest.mark.parametrize("tied", [True, False])
def test_estimate_equals_allocation(
    tmp_path: Path, draft_body: str, size: int, changes: dict, tied: bool
) -> None:
    text = checkpoints.config(tie_word_embeddings=tied)
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text))
    assert_plan_is_allocation(Team(folder, tensor_parallel=size, draft_body=draft_body, **changes))


def assert_plan_is_allocation(team: Team) -> None:
    for runner in team.runners:
        plan = memory_plan(runner.model, team.run_config)
        assert runner.allocated_bytes() == {
            "weights": plan.weight_bytes,
            "states": plan.slot_bytes * plan.num_slots,
            "kv": plan.kv_page_bytes * team.run_config.num_pages,
            "snapshots": plan.snapshot_bytes * plan.num_snapshots,
        }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("text", "form", "changes"),
    [
        (checkpoints.mixture_config(), "plain", {"dtype": "bfloat16"}),
        (checkpoints.mixture_config(), "plain", {"expert_parallel": True, "quantization": "fp8"}),
        (checkpoints.mixture_config(), "fp8", {"draft_body": "sharded", "expert_parallel": True}),
        (checkpoints.mixture_config(), "gptq", {"dtype": "bfloat16", "draft_tokens": 0}),
        (checkpoints.next_config(), "plain", {"quantization": "fp8"}),
        (checkpoints.next_config(), "fp8", {"dtype": "bfloat16"}),
        (checkpoints.config(), "fp8", {"draft_head": "fp8"}),
        (checkpoints.config(), "gptq", {}),
        (checkpoints.config(), "plain", {"drafter": "lookup"}),
        (checkpoints.config(), "plain", {"drafter": "both", "page_tokens": 16}),
    ],
)
def test_every_format_is_planned_as_it_is_stored(
    tmp_path: Path, text: dict, form: str, changes: dict, size: int
) -> None:
    """Blocks of 32, through which cuts go, so that their scales are stored more than once."""
    weights = layouts.released(text, checkpoints.random_weights(text))
    if form == "plain":
        folder = checkpoints.write(tmp_path, text, weights)
    else:
        made = (quantised.fp8 if form == "fp8" else quantised.gptq)(weights, 32)
        folder = checkpoints.write(tmp_path, text, made.tensors, quantization=made.config)
    assert_plan_is_allocation(Team(folder, tensor_parallel=size, **changes))


def test_a_local_draft_holds_all_its_kv_heads_and_a_sharded_one_its_share(tmp_path: Path) -> None:
    text = checkpoints.config()
    model = load_config(checkpoints.write(tmp_path, text, checkpoints.random_weights(text)))

    def draft_bytes(body: str) -> int:
        run = RunConfig(model_dir="", tensor_parallel=2, draft_body=body)
        return memory_plan(model, run).kv_token_bytes["draft"]

    assert draft_bytes("local") == 2 * draft_bytes("sharded")


def test_published_sizes_of_qwen3_5_2b_at_tp2(tmp_path: Path) -> None:
    """Bytes per rank computed by hand from the published configuration, in bfloat16."""
    from outrider.benchmarks import planted

    folder = tmp_path
    config = planted.nested_config(planted.text_config("2b"))
    (folder / "config.json").write_text(json.dumps(config))
    model = load_config(folder)
    run = RunConfig(model_dir="", tensor_parallel=2, dtype="bfloat16", draft_tokens=5)
    plan = memory_plan(model, run)
    # Norms stay in float32, those of q and k once a head (4 + 1 here, 8 + 2 in the draft).
    norms = 2 * (24 * 2 + 1) * 2048 + 6 * (4 * (4 + 1) - 2 * 2) * 256
    layers = plan.parts["target layers"] - norms
    assert layers / 1e6 == pytest.approx(1373.376, abs=0.001)
    assert plan.parts["embedding"] / 1e6 == pytest.approx(1017.119, abs=0.001)
    body = plan.parts["draft body"] - 2 * 5 * 2048 - (4 * (8 + 2) - 2 * 2) * 256
    assert body / 1e6 == pytest.approx(121.656, abs=0.001)
    assert plan.kv_token_bytes == {"target": 6144, "draft": 2048}
    assert plan.snapshot_bytes == 9_437_184 + 331_776 + 2 * 2048


def test_pages_and_budget(tmp_path: Path) -> None:
    text = checkpoints.config()
    model = load_config(checkpoints.write(tmp_path, text, checkpoints.random_weights(text)))
    run = RunConfig(model_dir="", num_pages=1)
    plan = memory_plan(model, run)
    assert plan.pages_that_fit(plan.total_bytes(7)) == 7
    assert plan.pages_that_fit(plan.total_bytes(7) - 1) == 6
    assert plan.pages_that_fit(0) < 0
    assert [pages_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert overshoot_rows(3) == 8
    with pytest.raises(ConfigError, match="num_pages = 1"):
        check_pages(run, plan)
