"""Loading: every difference between the files and the model is listed, in one error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import outrider.model.weights
from outrider.model.config import ConfigError, RunConfig, load_config
from outrider.model.plan import memory_plan
from outrider.model.weights import check_weights, load, settle
from tests import checkpoints, layouts, quantised
from tests.ranks import Team


def folder_with(tmp_path: Path, weights: dict | None = None, **changes: object) -> Path:
    text = checkpoints.config(**changes)
    return checkpoints.write(tmp_path, text, weights or checkpoints.random_weights(text))


def check(folder: Path, **changes: object) -> None:
    keys: dict = {"model_dir": str(folder), "num_pages": 8, **changes}
    check_weights(folder, load_config(folder), RunConfig(**keys))


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    check(folder_with(tmp_path))


def test_all_differences_come_in_one_error(tmp_path: Path) -> None:
    weights = checkpoints.random_weights(checkpoints.config())
    del weights["model.layers.1.linear_attn.A_log"], weights["mtp.fc.weight"]
    weights["model.norm.weight"] = torch.zeros(3)
    weights["model.layers.9.surprise"] = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        check(folder_with(tmp_path, weights))
    for word in ("layers.1.linear_attn.A_log", "mtp.fc.weight", "norm.weight is [3]", "[64]",
                 "layers.9.surprise", "missing", "unused", "shape"):  # fmt: skip
        assert word in str(caught.value)
    assert "visual" not in str(caught.value)


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_draft_that_the_saver_dropped_is_one_line_with_the_way_out(
    tmp_path: Path, num_files: int
) -> None:
    text = checkpoints.config()
    weights = checkpoints.random_weights(text)
    weights = {name: t for name, t in weights.items() if not name.startswith("mtp.")}
    folder = checkpoints.write(tmp_path, text, weights, num_files=num_files)
    with pytest.raises(ConfigError) as caught:
        check(folder, draft_tokens=4)
    message = str(caught.value)
    assert "cluster.yaml speculation.drafter: lookup" in message
    assert "speculation.draft_tokens: 0 (now 4)" in message
    assert message.count("mtp.") == 1, "not a list of its tensors"
    with pytest.raises(ConfigError, match=r"\(now auto\)"):
        check(folder, draft_tokens=5, auto_depth=True)
    check(folder, draft_tokens=0)
    check(folder, drafter="lookup")


QUANTISED = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "int32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", QUANTISED.values(), ids=QUANTISED.keys())
def test_weights_that_are_no_plain_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """They loaded as the plain numbers that their codes happen to be."""
    weights = checkpoints.random_weights(checkpoints.config())
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"):
        weights[name] = weights[name].to(dtype)
    folder = folder_with(tmp_path, weights)
    run = RunConfig(model_dir=str(folder), num_pages=8)
    for attempt in (
        lambda: check(folder),
        lambda: load(load_config(folder), run, 0, torch.device("cpu")),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        stored = str(dtype).removeprefix("torch.").split("_")[0]
        kind = {"float8": "F8_", "bool": "BOOL", "uint8": "U8", "int8": "I8", "int32": "I32"}
        for words in ("layers.1.mlp.up_proj.weight is " + kind[stored], "; 1 more)",
                      "quantised checkpoint", "BF16"):  # fmt: skip
            assert words in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "method"),
    [("qweight", "GPTQ"), ("weight_scale_inv", "FP8"), ("weight_offset", "Ascend")],
)
def test_a_quantised_checkpoint_is_known_by_what_lies_beside_its_weights(
    tmp_path: Path, suffix: str, method: str
) -> None:
    """Without quantization_config: one line, not a list of all tensors that have another name."""
    weights = checkpoints.random_weights(checkpoints.config())
    weights[f"model.layers.0.mlp.up_proj.{suffix}"] = torch.zeros(2)
    if suffix == "qweight":
        del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=f"quantised checkpoint.*{method}") as caught:
        check(folder_with(tmp_path, weights))
    assert "missing" not in str(caught.value)


def test_what_is_not_loaded_may_be_quantised(tmp_path: Path) -> None:
    weights = checkpoints.random_weights(checkpoints.config())
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"].to(torch.int8)
    weights["mtp.fc.weight_scale"] = torch.ones(1)
    weights["model.visual.merger.weight_scale"] = torch.ones(1)
    folder = folder_with(tmp_path, weights)
    check(folder, draft_tokens=0)
    with pytest.raises(ConfigError, match=r"quantised checkpoint.*mtp\.fc\.weight is I8\)"):
        check(folder)


def test_a_tensor_that_is_stored_twice_is_named(tmp_path: Path) -> None:
    weights = checkpoints.random_weights(checkpoints.config())
    weights["model.language_model.norm.weight"] = weights["model.norm.weight"] + 1
    folder = checkpoints.write(tmp_path, checkpoints.config(), weights, nested=False)
    with pytest.raises(ConfigError, match=r"norm\.weight is stored a second time"):
        check(folder)


def test_float64_and_float16_files_load(tmp_path: Path) -> None:
    weights = checkpoints.random_weights(checkpoints.config())
    for name, dtype in (("model.norm.weight", torch.float64), ("mtp.fc.weight", torch.float16)):
        weights[name] = weights[name].to(dtype)
    folder = folder_with(tmp_path, dict(weights))
    run = RunConfig(model_dir=str(folder), num_pages=8)
    params = load(load_config(folder), run, 0, torch.device("cpu"))
    assert torch.equal(params["norm.weight"], weights["model.norm.weight"].float())
    assert torch.equal(params["mtp.fc.weight"], weights["mtp.fc.weight"].float())


def tied_with_a_head(tmp_path: Path, change: float, **changes: object) -> Path:
    """config.json ties; the files hold a head, equal to the embedding but for `change` in one
    number of its last row."""
    text = checkpoints.config(tie_word_embeddings=True, **changes)
    weights = checkpoints.random_weights(text)
    head = weights["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    return checkpoints.write(tmp_path, text, weights | {"lm_head.weight": head})


def test_a_tied_checkpoints_own_head_is_used(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(outrider.model.weights, "COMPARED_ROWS", 48)  # several pieces, one uneven
    folder = tied_with_a_head(tmp_path, 2.0)
    stated = load_config(folder)
    model = settle(stated, folder)
    assert stated.tie_word_embeddings
    assert not model.tie_word_embeddings
    check_weights(folder, model, RunConfig(model_dir=str(folder), num_pages=8))
    team = Team(folder, tensor_parallel=2)
    it = team.runners[1].executor
    assert it.head.weight[-1, -1] == it.target.embed_tokens[-1, -1] + 2.0
    assert it.drafter.head is it.head
    assert team.runners[1].allocated_bytes()["weights"] == (
        memory_plan(model, team.run_config).weight_bytes
    )


def test_a_tied_checkpoints_equal_head_is_shared(tmp_path: Path) -> None:
    folder = tied_with_a_head(tmp_path, 0.0)
    model = load_config(folder)
    assert settle(model, folder) == model
    check(folder)
    it = Team(folder, tensor_parallel=2).runners[1].executor
    assert it.head.weight.data_ptr() == it.target.embed_tokens[80:].data_ptr()


def test_a_tied_head_of_another_shape_is_an_error(tmp_path: Path) -> None:
    text = checkpoints.config(tie_word_embeddings=True)
    weights = checkpoints.random_weights(text) | {"lm_head.weight": torch.zeros(3, 64)}
    folder = checkpoints.write(tmp_path, text, weights)
    model = settle(load_config(folder), folder)
    with pytest.raises(ConfigError, match=r"lm_head.weight is \[3, 64\]"):
        check_weights(folder, model, RunConfig(model_dir=str(folder), num_pages=8))


def test_a_folder_without_weights_leaves_the_tie_as_it_is_stated(tmp_path: Path) -> None:
    """`outrider plan` needs config.json alone."""
    folder = tied_with_a_head(tmp_path, 2.0)
    (folder / "model.safetensors").unlink()
    assert settle(load_config(folder), folder).tie_word_embeddings


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check(folder)


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    text = checkpoints.config()
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text), num_files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        check(folder)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        check(folder)


def test_drafts_asked_of_a_checkpoint_without_any_are_refused(tmp_path: Path) -> None:
    text = checkpoints.config(mtp_num_hidden_layers=0)
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text))
    with pytest.raises(ConfigError, match="draft_tokens: 0"):
        check(folder)
    check(folder, draft_tokens=0)


def test_drafts_may_stay_unloaded(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    run = RunConfig(model_dir=str(folder), num_pages=8, draft_tokens=0)
    check(folder, draft_tokens=0)
    params = load(load_config(folder), run, 0, torch.device("cpu"))
    assert not any(name.startswith("mtp.") for name in params)


def test_norms_and_decay_rates_stay_float32_in_a_bfloat16_run(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    run = RunConfig(model_dir=str(folder), num_pages=8, dtype="bfloat16")
    params = load(load_config(folder), run, 0, torch.device("cpu"))
    kept = {n for n, t in params.items() if t.dtype == torch.float32}
    assert kept == {n for n in params if "norm" in n or n.endswith("A_log")}
    assert len(kept) == 3 * (2 + 2) + (2 + 2) + 1 + 3 + (2 + 2)


def test_tied_bytes_are_stored_once(tmp_path: Path) -> None:
    it = Team(folder_with(tmp_path), tensor_parallel=2).runners[1].executor
    table = it.target.embed_tokens
    assert it.drafter.draft.embed_tokens is table
    assert it.drafter.head is it.head
    assert it.head.weight.data_ptr() == table[80:].data_ptr()


def test_loading_reports_bytes_up_to_the_total(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    seen: list[tuple[int, int]] = []
    run = RunConfig(model_dir=str(folder), num_pages=8)
    load(load_config(folder), run, 0, torch.device("cpu"), lambda *done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def quantised_folder(
    tmp_path: Path, change: Callable[[dict], object], form: str = "fp8", **config: object
) -> Path:
    """A tiny release in codes whose files were changed."""
    text = checkpoints.mixture_config(**config)
    weights = layouts.released(text, checkpoints.random_weights(text))
    made = quantised.fp8(weights, 16) if form == "fp8" else quantised.gptq(weights, 16)
    tensors = dict(made.tensors)
    change(tensors)
    return checkpoints.write(tmp_path, text, tensors, quantization=made.config)


UP = "model.layers.0.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight_scale_inv": t[f"{UP}.weight_scale_inv"][:-1]}),
            (r"up_proj\.weight_scale_inv is \[", "is needed for", "blocks of 16 x 16"),
        ),
        (
            "fp8",
            lambda t: t.pop(f"{UP}.weight_scale_inv"),
            (r"experts\.2\.up_proj\.weight: FP8 without the weight_scale_inv",),
        ),
        ("fp8", lambda t: t.pop(f"{UP}.weight"), ("FP8 with a scale for each block",)),
        (
            "fp8",
            lambda t: [t.pop(f"{UP}.weight"), t.pop(f"{UP}.weight_scale_inv")],
            (r"missing: layers\.0\.mlp\.experts\.2\.up_proj\.weight$",),
        ),
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].to(torch.float8_e5m2)}),
            (r"up_proj\.weight is F8_E5M2",),
        ),
        (
            "gptq",
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][1:]}),
            (r"up_proj\.scales is \[", "is needed"),
        ),
        ("gptq", lambda t: t.pop(f"{UP}.scales"), ("scales are missing beside qweight",)),
    ],
)
def test_codes_that_do_not_fit_their_tables_are_named(
    tmp_path: Path, form: str, change: Callable[[dict], object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(quantised_folder(tmp_path, change, form))
    for pattern in words:
        assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("table", "value", "words"),
    [("qzeros", 0x11111111, "qzeros are not all 7"), ("g_idx", 0, "g_idx reorders columns")],
)
def test_int4_weights_of_another_kind_are_named(
    tmp_path: Path, table: str, value: int, words: str
) -> None:
    """quantization_config says that they are symmetric and in order; the tables do not."""
    folder = quantised_folder(tmp_path, lambda t: t[f"{UP}.{table}"].fill_(value), "gptq")
    run = RunConfig(model_dir=str(folder), num_pages=8)
    model = settle(load_config(folder), folder)
    with pytest.raises(ConfigError, match=words):
        load(model, run, 0, torch.device("cpu"))


def test_a_list_of_many_missing_tensors_is_short(tmp_path: Path) -> None:
    def without_experts(tensors: dict) -> None:
        for name in [n for n in tensors if ".layers.0.mlp.experts." in n]:
            del tensors[name]

    with pytest.raises(ConfigError, match=r"and \d+ more") as caught:
        check(quantised_folder(tmp_path, without_experts))
    assert len(str(caught.value)) < 1500


def test_the_files_decide_which_weights_are_codes(tmp_path: Path) -> None:
    """A release's list of plain modules may lack some: what has scales is read with them."""
    text = checkpoints.config()
    made = quantised.fp8(checkpoints.random_weights(text), 16)
    name = "model.layers.0.mlp.up_proj"
    tensors = {n: t for n, t in made.tensors.items() if n != f"{name}.weight_scale_inv"}
    tensors[f"{name}.weight"] = made.dequantised[f"{name}.weight"]
    folder = checkpoints.write(tmp_path, text, tensors, quantization=made.config)
    stated = load_config(folder)
    assert stated.quantisation is not None
    assert stated.quantisation.covers("layers.0.mlp.up_proj.weight")
    model = settle(stated, folder)
    check_weights(folder, model, RunConfig(model_dir=str(folder), num_pages=8))
    run = RunConfig(model_dir=str(folder), num_pages=8)
    params = load(model, run, 0, torch.device("cpu"))
    gate_up = params["layers.0.mlp.gate_up_proj.weight"]
    parts = [made.dequantised[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(gate_up, torch.cat(parts)), "one part is plain, so the matrix is"


@pytest.mark.parametrize("size", [2, 4])
def test_weights_rounded_at_load_are_one_model_at_every_cut(tmp_path: Path, size: int) -> None:
    """Blocks of 128 x 128 are those of the whole weight, also where a cut goes through them."""
    text = checkpoints.mixture_config()
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text))
    model = load_config(folder)

    def shares(ranks: int) -> list[dict]:
        run = RunConfig(
            model_dir=str(folder), num_pages=8, tensor_parallel=ranks, quantization="fp8",
            draft_body="sharded",
        )  # fmt: skip
        return [load(model, run, rank, torch.device("cpu")) for rank in range(ranks)]

    (whole,), cut = shares(1), shares(size)
    name = "layers.0.mlp.shared_expert.down_proj.weight"
    parts = [share[name].dequantised(torch.float32) for share in cut]
    assert torch.equal(torch.cat(parts, 1), whole[name].dequantised(torch.float32))
    assert cut[0][name].block[1] < 128, "a cut goes through a block"
    name = "layers.0.mlp.experts.down_proj"
    parts = [share[name].dequantised(torch.float32) for share in cut]
    assert torch.equal(torch.cat(parts, 2), whole[name].dequantised(torch.float32))


def test_index_and_files_are_compared(tmp_path: Path) -> None:
    text = checkpoints.config()
    folder = checkpoints.write(tmp_path, text, checkpoints.random_weights(text), num_files=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    names = sorted(
        name for name, file in table["weight_map"].items() if file.endswith("02.safetensors")
    )
    table["weight_map"]["model.language_model.extra"] = table["weight_map"].pop(names[0])
    index.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        check(folder)
    for words in ("the index says that it holds model.language_model.extra, it does not",
                  f"holds {names[0]}, which the index does not name", "00002"):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_draft_in_a_file_of_its_own_is_found(tmp_path: Path, num_files: int) -> None:
    """Some savers leave mtp.* in a file that the index does not name."""
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text)
    draft = {n: t for n, t in weights.items() if n.startswith("mtp.")}
    rest = {n: t for n, t in weights.items() if n not in draft}
    folder = checkpoints.write(tmp_path, text, rest, num_files=num_files)
    save_file(draft, folder / "mtp.safetensors")
    save_file({"other": torch.zeros(1)}, folder / "adapter.safetensors")
    (folder / "broken.safetensors").write_bytes(b"none of ours")
    check(folder)
    run = RunConfig(model_dir=str(folder), num_pages=8)
    params = load(load_config(folder), run, 0, torch.device("cpu"))
    assert torch.equal(params["mtp.fc.weight"], weights["mtp.fc.weight"])
