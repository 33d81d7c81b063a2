"""`model` of cluster.yaml: a folder, a hub id, or an error that says what was given."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from outrider.model.config import ConfigError
from outrider.model.folder import resolve_model


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m") == resolve_model("./m") == tmp_path / "m"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(name)


def test_a_gguf_file_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    for given in (file, tmp_path):
        with pytest.raises(ConfigError) as caught:
            resolve_model(str(given))
        for words in (f"{given}", "model-Q4_K_M.gguf is a GGUF file", "Hugging Face folder"):
            assert words in str(caught.value)


def test_a_safetensors_file_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match=r"one safetensors file.*with its config\.json"):
        resolve_model(str(file))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"Set `model` .* to its folder, {tmp_path}"):
        resolve_model(str(file))


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a file.*model folder"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))


def test_a_hub_id_without_a_network_says_so() -> None:
    with pytest.raises(ConfigError, match="hub could not be reached"):
        resolve_model("outrider-test/not-there")


def test_weights_are_downloaded_only_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outrider plan` of a hub id needs its config.json alone."""
    asked: list[set[str]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(set(allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for wanted in (True, False):
        assert resolve_model("owner/name", with_weights=wanted) == tmp_path
    assert asked[0] - asked[1] == {"*.safetensors"}
    assert "*.json" in asked[1]
