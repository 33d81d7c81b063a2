"""The network equals transformers on tiny random models: prefill, chunks, steps, shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.model.config import RunConfig, load_config
from outrider.model.executor import Executor
from outrider.model.rules import Rule, rules
from outrider.model.step import Join, Sampling
from outrider.model.weights import load
from tests import checkpoints
from tests.ranks import Team

CONFIGS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "three value heads a key head": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_value_head_dim": 8,
    },
    "equal heads": {"linear_num_value_heads": 4, "num_hidden_layers": 8},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
    "two layers a period": {"full_attention_interval": 2},
}
TOLERANCE = 5e-6
"""Of the largest logit: float32 rounds sums of different orders so far apart on different CPUs."""


def logits_by(team: Team, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """All logits of `ids`, prefilled in chunks of the given lengths, rank 0's view."""

    def work(runner):
        it: Executor = runner.executor
        pages = list(range(1, 33))
        with torch.inference_mode():
            join = Join(slot=1, request=0, tokens=ids, pages=pages, sampling=Sampling())
            it.slots.reset(join)
            it.states.reset(1)
            out, start = [], 0
            for count in chunks:
                slots = torch.tensor([1])
                rows = it.slots.rows(
                    slots,
                    torch.tensor([start]),
                    torch.tensor([count]),
                    count,
                    it.slots.table_of(slots, 32),
                    prefill=True,
                )
                hidden = it.target(torch.tensor([ids[start : start + count]]), rows)
                it.states.fold[slots] = 0
                out.append(it.head.logits(hidden[0]))
                start += count
            return torch.cat(out)

    results = team.each(work)
    for other in results[1:]:
        assert torch.equal(other, results[0])
    return results[0]


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request, tmp_path_factory):
    text = checkpoints.config(**CONFIGS[request.param])
    weights = checkpoints.random_weights(text, seed=3)
    folder = checkpoints.write(tmp_path_factory.mktemp("oracle"), text, weights)
    ids = torch.randint(0, 160, (150,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        want = checkpoints.transformers_model(text, weights)(torch.tensor([ids])).logits[0]
    return folder, ids, want


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    error, largest = (got - want).abs().max(), want.abs().max()
    assert error < TOLERANCE * largest, f"error {error:.2e}, largest logit {largest:.2f}"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prefill_equals_transformers(case, size: int) -> None:
    folder, ids, want = case
    team = Team(folder, tensor_parallel=size, prefill_chunk=256)
    assert_same(logits_by(team, ids, [len(ids)]), want)


@pytest.mark.parametrize("chunks", [[133, *[1] * 17], [1] * 150, [64, 64, 22], [2, 1, 61, 65, 21]])
def test_chunks_and_steps_equal_transformers(case, chunks: list[int]) -> None:
    folder, ids, want = case
    assert_same(logits_by(Team(folder, prefill_chunk=256), ids, chunks), want)


@pytest.mark.parametrize("size", [1, 2])
def test_verify_rows_with_any_kept_prefix_equal_transformers(case, size: int) -> None:
    """Six rows with wrong tails, m of them kept, then the rows of the true continuation."""
    folder, ids, want = case
    team = Team(folder, tensor_parallel=size, prefill_chunk=256, draft_tokens=5)

    def work(runner):
        it = runner.executor
        errors = []
        with torch.inference_mode():
            for kept in range(1, 7):
                pages = list(range(1, 33))
                it.slots.reset(
                    Join(slot=0, request=0, tokens=ids, pages=pages, sampling=Sampling())
                )
                it.states.reset(0)
                slots, at, max_fold = torch.tensor([0]), 40, 0
                rows = it.slots.rows(
                    slots,
                    torch.tensor([0]),
                    torch.tensor([at]),
                    at,
                    it.slots.table_of(slots, 32),
                    prefill=True,
                )
                it.target(torch.tensor([ids[:at]]), rows)
                for _ in range(4):
                    tokens = ids[at : at + kept] + [(t + 1) % 160 for t in ids[at + kept : at + 6]]
                    rows = it.slots.rows(
                        slots,
                        torch.tensor([at]),
                        torch.tensor([6]),
                        6,
                        it.slots.table_of(slots, 32),
                        fold=it.states.fold[slots],
                        max_fold=max_fold,
                    )
                    hidden = it.target(torch.tensor([tokens]), rows)
                    errors.append((it.head.logits(hidden[0, :kept]) - want[at : at + kept]).abs())
                    it.states.fold[slots] = torch.tensor([kept])
                    at, max_fold = at + kept, 6
            return torch.cat(errors).max()

    assert max(team.each(work)) < TOLERANCE * want.abs().max()


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    text = checkpoints.config()
    weights = checkpoints.random_weights(text, seed=3)
    folder = checkpoints.write(tmp_path, text, weights)
    ids = list(range(60))
    want = logits_by(Team(folder, prefill_chunk=64), ids, [60])
    got = logits_by(Team(folder, prefill_chunk=64, dtype="bfloat16"), ids, [60])
    assert (got - want).norm() / want.norm() < 0.1


def put_together(rule: Rule, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """What one rank holds of a rule, cut from the checkpoint's weights here."""
    parts = []
    for piece in rule.pieces:
        name = piece.name if piece.name in weights else f"model.{piece.name}"
        row_spans, _ = rule.spans(piece, 0)
        parts += [weights[name][a:b] for a, b in row_spans]
    return torch.cat(parts)


@pytest.mark.parametrize(("nested", "num_files"), [(True, 1), (False, 1), (True, 3), (False, 2)])
def test_every_file_layout_gives_the_same_tensors(
    tmp_path: Path, nested: bool, num_files: int
) -> None:
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text, seed=1)
    folder = checkpoints.write(tmp_path, text, weights, nested=nested, num_files=num_files)
    run = RunConfig(model_dir=str(folder), num_pages=8)
    model = load_config(folder)
    params = load(model, run, 0, torch.device("cpu"))
    table = rules(model, run)
    assert [rule.name for rule in table] == list(params)
    assert {p.name for rule in table for p in rule.pieces} == {
        name.removeprefix("model.") for name in weights
    }
    for rule in table:
        assert torch.equal(params[rule.name], put_together(rule, weights)), rule.name


@pytest.mark.parametrize("size", [2, 4])
def test_shares_put_together_are_the_whole_checkpoint(tmp_path: Path, size: int) -> None:
    """Every cut tensor's shares, summed over ranks, hold each element exactly once."""
    text = checkpoints.config(tie_word_embeddings=False, num_key_value_heads=4)
    weights = checkpoints.random_weights(text, seed=1)
    folder = checkpoints.write(tmp_path, text, weights, nested=False)
    run = RunConfig(model_dir=str(folder), num_pages=8, tensor_parallel=size, draft_body="sharded")
    model = load_config(folder)
    shares = [load(model, run, rank, torch.device("cpu")) for rank in range(size)]
    one = RunConfig(model_dir=str(folder), num_pages=8)
    for rule in rules(model, one):
        whole = put_together(rule, weights)
        total = sum(share[rule.name].double().sum().item() for share in shares)
        copies = 1 if shares[0][rule.name].shape != whole.shape else size
        assert total == pytest.approx(copies * whole.double().sum().item(), abs=1e-6), rule.name
