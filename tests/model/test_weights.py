"""Loading: every difference between the files and the model is listed, in one error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.model.config import ConfigError, RunConfig, load_config
from outrider.model.weights import check_weights, load, resolve_model
from tests import checkpoints
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
    weights["model.layers.9.surprise"] = torch.zeros(1)
    with pytest.raises(ConfigError) as caught:
        check(folder_with(tmp_path, weights))
    for word in ("layers.1.linear_attn.A_log", "mtp.fc.weight", "norm.weight is [3]", "[64]",
                 "layers.9.surprise", "missing", "unused", "shape"):  # fmt: skip
        assert word in str(caught.value)
    assert "visual" not in str(caught.value)


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_with_its_own_draft_embedding_uses_it(tmp_path: Path, tied: bool) -> None:
    folder = folder_with(tmp_path, tie_word_embeddings=tied, mtp_use_dedicated_embeddings=True)
    check(folder)
    it = Team(folder, tensor_parallel=2).runners[1].executor
    draft = it.drafter.draft.embed_tokens
    assert draft.data_ptr() != it.target.embed_tokens.data_ptr()
    assert it.drafter.head.weight.data_ptr() != it.head.weight.data_ptr()
    assert it.drafter.head.weight.shape == it.head.weight.shape == (80, 64)


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


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(name)


def test_a_hub_id_without_a_network_says_so() -> None:
    with pytest.raises(ConfigError, match="hub could not be reached"):
        resolve_model("outrider-test/not-there")
