"""Where a model's files lie: the `model` of cluster.yaml -> a local folder.

    "examples/tiny" -> its absolute path        "owner/name" -> a folder of the hub's cache

Any other file or path is an error that says what it is and what to give instead. Nothing here
imports torch, so that `outrider doctor` can use it.
"""

from __future__ import annotations

from pathlib import Path

from outrider.model.config import ConfigError


def resolve_model(name_or_dir: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: a local folder, or a hub id's in huggingface_hub's cache.

    What of a hub id is not in the cache is downloaded, the weights only if they are wanted. Raises
    ConfigError when there is no such folder, when a file is given, and when the hub cannot be
    reached.
    """
    folder = local_folder(name_or_dir)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.txt", *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model = {name_or_dir!r}: neither a local folder nor in the hub's cache, and the hub "
            f"could not be reached, or refused ({type(error).__name__}: {str(error)[:200]}). "
            f"Download it on a machine with a network and set `model` to the folder."
        ) from None


def local_folder(name_or_dir: str) -> Path | None:
    """The absolute path of a local model folder; None for what can only be a hub id.

    Raises ConfigError for a file and for a path that does not exist.
    """
    path = Path(name_or_dir).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        raise ConfigError(f"model = {name_or_dir!r}: {_kind_of_file(files[0])}")
    if path.is_dir():
        return path.resolve()
    looks_local = name_or_dir.startswith(("/", ".", "~")) or name_or_dir.count("/") != 1
    if looks_local or (path.parent.is_dir() and str(path.parent) != "."):
        raise ConfigError(
            f"model = {name_or_dir!r}: no such folder. Set `model` in cluster.yaml or --model to a "
            f"Hugging Face model folder, or to a hub id like owner/name."
        )
    return None


def _kind_of_file(path: Path) -> str:
    """What a file is that was given in place of a model folder, and what to give instead."""
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    folder = path.resolve().parent
    if is_gguf:
        kind, instead = "a GGUF file", "the Hugging Face folder or hub id that it was made from"
    elif path.suffix == ".safetensors" and (folder / "config.json").is_file():
        kind, instead = "one safetensors file", f"its folder, {folder}"
    elif path.suffix == ".safetensors":
        kind, instead = "one safetensors file", "a folder that holds it with its config.json"
    else:
        kind, instead = "a file", "a Hugging Face model folder, or a hub id like owner/name"
    return f"{path.name} is {kind}. Set `model` in cluster.yaml or --model to {instead}."
