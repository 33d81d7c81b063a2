"""The planted checkpoint keeps its promise, and the counts computed from its chain are right."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from typer.testing import CliRunner

from outrider.benchmarks import planted, planted_weights, shards
from outrider.model.config import RunConfig, load_config
from outrider.model.plan import memory_plan
from outrider.model.step import Sampling
from outrider.model.weights import settle
from tests import checkpoints
from tests.draft_reference import draft_hidden
from tests.ranks import Team

VOCAB = planted.SIZES["tiny"]["vocab_size"]
RELEASES = [("tiny", None), ("tiny", "fp8"), ("tiny-moe", None), ("tiny-moe", "fp8")]
"""Sizes of the same vocabulary, so that their chains are the same, in each form."""


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: f"{release[0]}-{release[1]}")
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of accept 0.8425 and seed 0."""
    size, quantization = request.param
    folder = tmp_path_factory.mktemp("planted") / "checkpoint"
    planted.write(folder, size, accept=0.8425, seed=0, quantization=quantization)
    return folder


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by flat names, those of FP8 dequantised, float32."""
    index, files = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    stored = {}
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}
    weights = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            tensor = tensor.float() * stored[f"{name}_scale_inv"][rows[:, None], columns].float()
        weights[name.replace("model.language_model.", "model.", 1)] = tensor.float()
    return weights


@torch.inference_mode()
def test_target_and_draft_find_the_planted_tokens(release: Path) -> None:
    """transformers' target, and a draft of plain torch, in float32, on what the files stand for."""
    text = json.loads((release / "config.json").read_text())["text_config"]
    text.setdefault("tie_word_embeddings", False)
    weights = plain_weights(release)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    model, normed = checkpoints.transformers_model(text, weights), []
    model.model.norm.register_forward_hook(lambda module, args, out: normed.append(out[0]))
    tokens = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(5))
    chain = planted.chain(VOCAB, 0.8425, 0)
    logits = model(tokens[None]).logits[0]
    assert torch.equal(logits.argmax(-1), chain.next[tokens])
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 33  # as planted.MAX_TEMPERATURE claims
    drafts = draft_hidden(text, weights, normed[0], chain.next[tokens]) @ head.t()
    assert torch.equal(drafts.argmax(-1), chain.guess[chain.next[tokens]])


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"dtype": "bfloat16"}),
        (2, {"quantization": "fp8", "expert_parallel": True, "draft_body": "sharded"}),
    ],
)
def test_the_engine_answers_with_the_chain_and_the_counts(
    release: Path, size: int, changes: dict[str, Any]
) -> None:
    team = Team(release, tensor_parallel=size, draft_tokens=4, **changes)
    (out,) = team.generate([([5, 9, 17], Sampling(max_tokens=40))])
    want = planted.expected_counts(planted.chain(VOCAB, 0.8425, 0), 17, 40, 4)
    assert out.tokens == want.tokens
    counts = (out.iterations, out.drafted, out.accepted)
    assert counts == (want.iterations, want.drafted, want.accepted)


@torch.inference_mode()
def test_a_head_of_its_own_is_no_copy_of_the_embedding(tmp_path: Path) -> None:
    """An engine that scored with the embedding would find other tokens."""
    planted.write(tmp_path, "tiny-moe", accept=0.8425, seed=0)
    weights = plain_weights(tmp_path)
    text = planted.text_config("tiny-moe") | {"tie_word_embeddings": True}
    del weights["lm_head.weight"]
    tokens = torch.arange(100)
    logits = checkpoints.transformers_model(text, weights)(tokens[None]).logits[0]
    right = logits.argmax(-1) == planted.chain(VOCAB, 0.8425, 0).next[tokens]
    assert right.float().mean() < 0.1


@pytest.mark.parametrize("size", ["tiny", "tiny-moe"])
def test_transformers_prints_the_chain(size: str, planted_tiny: Path, tmp_path: Path) -> None:
    folder, kind = planted_tiny, Qwen3_5ForCausalLM
    if size == "tiny-moe":
        folder, kind = tmp_path, Qwen3_5MoeForCausalLM
        planted.write(folder, size, accept=0.8425, seed=0)
    model = kind.from_pretrained(folder, dtype=torch.float32)
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
    block = planted_weights.Planting(sizes=planted.SIZES[size], tied=True).block
    assert 3 * block + 1 <= config["hidden_size"]
    width = config.get("shared_expert_intermediate_size") or config["intermediate_size"]
    assert block <= width
    assert config["layer_types"][-1] == "full_attention"
    assert config["num_hidden_layers"] % planted.FULL_ATTENTION_INTERVAL == 0


PUBLISHED = {
    "0.8b": (752_393_024, 20_452_864),
    "2b": (1_881_825_088, 60_828_160),
    "4b": (4_205_751_296, 120_599_552),
    "9b": (8_953_803_264, 243_290_624),
    "27b": (26_895_998_464, 424_699_392),
}
"""Parameters of the text model and of the draft, from the published configurations."""


def shapes(size: str, **changes: int) -> dict[str, torch.Size]:
    """Name and shape of each tensor of a size, without its numbers."""
    sizes = planted.SIZES[size] | changes
    tokens = torch.zeros(sizes["vocab_size"], dtype=torch.int64, device="meta")
    pieces = list(
        planted_weights.pieces(
            sizes,
            tokens,
            tokens,
            tied=size in planted.TIED,
            random=torch.Generator(),
            device="meta",
        )
    )
    assert len(pieces) == planted_weights.num_pieces(sizes)
    return {name: tensor.shape for piece in pieces for name, tensor in piece.items()}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_published_parameters(size: str) -> None:
    counts = {True: 0, False: 0}
    for name, shape in shapes(size).items():
        counts[name.startswith("mtp.")] += shape.numel()
    assert (counts[False], counts[True]) == PUBLISHED[size]


@pytest.mark.parametrize("size", [*PUBLISHED, "35b-a3b"])
def test_the_plan_of_a_size_is_of_its_weights(size: str, tmp_path: Path) -> None:
    """In bfloat16 on one rank: but for norms and decay rates two bytes a weight."""
    (tmp_path / "config.json").write_text(
        json.dumps(planted.nested_config(planted.text_config(size)))
    )
    run = RunConfig(model_dir="", dtype="bfloat16")
    planned = sum(memory_plan(load_config(tmp_path), run).parts.values())
    weights = sum(PUBLISHED.get(size, (34_660_610_688, 844_640_768)))
    assert 0 < planned - 2 * weights < 1e-3 * weights


def test_the_plan_from_the_config_alone_is_that_with_the_files(release: Path) -> None:
    """`outrider plan` with a hub id downloads no weights: the config says which are in codes."""
    model = load_config(release)
    for size in (1, 2, 4):
        run = RunConfig(model_dir="", dtype="bfloat16", tensor_parallel=size)
        assert memory_plan(model, run) == memory_plan(settle(model, release), run)


def test_mixture_has_the_published_tensors() -> None:
    """Of the 1811 tensors of 35B-A3B 785 are the draft's; four layers tell all that counts."""
    names = shapes("35b-a3b", num_hidden_layers=4)
    draft = [name for name in names if name.startswith("mtp.")]
    assert len(draft) == 785
    own = planted_weights.TARGET + "layers.3.mlp."
    assert names[own + "experts.gate_up_proj"] == (256, 1024, 2048)
    assert names[own + "experts.down_proj"] == (256, 2048, 512)
    assert names[own + "gate.weight"] == (256, 2048)
    assert len(names) - len(draft) == 3 + 3 * 18 + 15


def test_file_equals_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).to(torch.bfloat16).t(),
        "a": torch.randn(7, 3).to(torch.float8_e4m3fn),
        "d": torch.randn(2, 2),
        "c": torch.randn(4).to(torch.bfloat16),
    }
    shards.write_file(tmp_path / "ours", tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_writer_holds_a_few_pieces_at_most(tmp_path: Path) -> None:
    """When a piece is made, those before it have been written and freed but for a few."""
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def pieces() -> Iterator[dict[str, Tensor]]:
        nonlocal most
        for number in range(30):
            tensor = torch.zeros(1 << 18)
            held.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in held))
            yield {f"layers.{number}.weight": tensor}
            del tensor

    weight_map = shards.write_shards(tmp_path, pieces(), 30)
    assert len(weight_map) == 30
    assert most <= shards.MAX_WRITERS


def test_index_names_every_tensor_and_all_bytes(release: Path) -> None:
    index, in_files, size = release / "model.safetensors.index.json", {}, 0
    for path in sorted(release.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                assert name not in in_files
                in_files[name] = path.name
                size += file.get_tensor(name).nbytes
    assert (release / "model.safetensors").is_file() == (not index.is_file())
    if index.is_file():
        table = json.loads(index.read_text())
        assert table["weight_map"] == in_files
        assert table["metadata"]["total_size"] == size
        assert len(set(in_files.values())) == 6  # tables, four layers, the rest
    is_fp8 = "quantization" in json.loads((release / "planted.json").read_text())
    settings = json.loads((release / "config.json").read_text()).get("quantization_config")
    assert (settings is not None) == is_fp8
    scaled = {name.removesuffix("_scale_inv") for name in in_files if name.endswith("_scale_inv")}
    assert bool(scaled) == is_fp8
    if is_fp8:
        kept = {f"{module}.weight" for module in settings["modules_to_not_convert"]}
        assert kept == {name for name in in_files if name.endswith(".weight")} - scaled


@pytest.mark.parametrize("words", [["--size", "3b"], ["--quantization", "int3"], ["--accept", "2"]])
def test_wrong_arguments_are_named(words: list[str], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(planted.main)
    result = CliRunner().invoke(app, [str(tmp_path), *words])
    assert result.exit_code == 2
    assert words[1] in result.output


def test_file_holds_real_checkpoints_names_and_dtypes(planted_tiny: Path) -> None:
    config = json.loads((planted_tiny / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    with safe_open(planted_tiny / "model.safetensors", framework="pt") as file:
        float32 = [name for name in file.keys() if file.get_tensor(name).dtype == torch.float32]
        assert "mtp.layers.0.self_attn.q_proj.weight" in file.keys()
    assert {name.rsplit("linear_attn.", 1)[1] for name in float32} == {"A_log", "norm.weight"}
