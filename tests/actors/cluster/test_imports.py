"""Whose folders a worker process may import from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors.cluster.imports import HOME, leave_callers_folders, leave_current_folder

RAY = Path("/site-packages/ray")
BEHIND = [str(RAY / "thirdparty_files"), str(RAY / "_private/workers"), "/pythonpath", "/lib"]
HOSTILE = ("model", "tokenizers", "zmq", "yaml", "msgspec", "secrets", "parallel", "actors")


def hostile_folder(folder: Path) -> Path:
    """A folder whose modules have the names of ours and of what we import, and leave a trace."""
    folder.mkdir()
    for name in HOSTILE:
        trace = f"open({str(folder / name)!r} + '.was_imported', 'w')\n"
        (folder / f"{name}.py").write_text(trace + "raise ImportError('not this one')\n")
    return folder


def imported_from(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.was_imported"))


def test_what_ray_put_before_its_own_folders_is_taken_out() -> None:
    path = ["/the/caller", "/a/script", *BEHIND]
    leave_callers_folders(path, RAY)
    assert path == BEHIND
    leave_callers_folders(path, RAY)
    assert path == BEHIND


def test_the_folder_that_outrider_comes_from_stays() -> None:
    """A checkout that was uploaded with a job, or that a command was started in."""
    path = ["/the/caller", str(HOME), *BEHIND]
    leave_callers_folders(path, RAY)
    assert path == [str(HOME), *BEHIND]
    assert (HOME / "outrider" / "__init__.py").is_file()


def test_a_process_that_ray_did_not_start_is_left_alone() -> None:
    path = ["/a", "/b"]
    leave_callers_folders(path, RAY)
    assert path == ["/a", "/b"]


def test_the_current_folder_is_taken_out_unless_outrider_comes_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's working_dir is the current folder, and Ray puts it into PYTHONPATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    path = ["/lib", str(tmp_path), "", str(tmp_path / "inner" / ".."), str(tmp_path / "inner")]
    leave_current_folder(path)
    assert path == ["/lib", str(tmp_path / "inner")]
    monkeypatch.chdir(HOME)
    path = ["/lib", str(HOME)]
    leave_current_folder(path)
    assert path == ["/lib", str(HOME)]


@pytest.mark.parametrize("in_pythonpath", [False, True])
@pytest.mark.parametrize("module", ["outrider.actors.cli", "outrider.actors.job"])
def test_a_module_that_is_run_imports_nothing_from_the_current_folder(
    tmp_path: Path, repo: Path, module: str, in_pythonpath: bool
) -> None:
    folder = hostile_folder(tmp_path / "here")
    command = [sys.executable, "-m", module, *(["doctor"] if module.endswith("cli") else [])]
    given = f"{folder}:{repo}" if in_pythonpath else str(repo)
    environ = {"PYTHONPATH": given, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: "), done.stderr
    assert imported_from(folder) == []
