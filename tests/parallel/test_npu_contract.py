"""The NPU backend against the real torch_npu 2.13.0: checks in tests/npu_contract.py, a process.

The package is downloaded once (44 MB) into the user's cache, beside the virtual environment and
never in it: an installed torch_npu is loaded by every `import torch`. CANN's libraries, which no
package carries, are stood in for by stubs that answer each call with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

VERSION = "2.13.0"
CANN = re.compile(r"(acl|Hccl|Msprof|rt[A-Z]|GE|_ZNK?2ge)\w*")
LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
RETURN_TEXT = {"aclGetRecentErrMsg", "aclrtGetSocName"}
CHECKS = (
    "operations", "fake signatures", "captures", "task groups", "device calls", "group options",
    "torch operations", "renamed arguments",
)  # fmt: skip


def download() -> Path:
    """The folder that holds torch_npu; skips the test where no package index is reached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    folder = cache / f"torch_npu-{VERSION}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        target = Path(scratch) / "package"
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        limits = ["--retries", "1", "--timeout", "20", "--no-deps", "--target", str(target)]
        done = run([*pip, *limits, f"torch_npu=={VERSION}"], timeout_s=240)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            pytest.skip(f"torch_npu {VERSION} cannot be downloaded: {reason}")
        if not folder.is_dir():  # another run may have been faster
            target.rename(folder)
    return folder


def run(command: list[str], *, timeout_s: float = 60, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **more)


def symbols(files: list[Path], which: str) -> set[str]:
    lines = run(["nm", "-D", which, *map(str, files)], check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line and line[-1] != ":"}


def write_stubs(package: Path, folder: Path) -> None:
    """Libraries of CANN's names; the first defines all that torch_npu wants of them."""
    own = [*package.glob("torch_npu/lib/*.so"), *package.glob("torch_npu/_C*.so")]
    wanted = symbols(own, "--undefined-only") - symbols(own, "--defined-only")
    names = sorted(name for name in wanted if CANN.fullmatch(name))
    assert len(names) > 50
    answers = ((name, 0 if name in RETURN_TEXT else 100000) for name in names)
    code = "".join(f"long {name}(void) {{ return {answer}; }}\n" for name, answer in answers)
    for library in LIBRARIES:
        (folder / "stub.c").write_text(code)
        output = str(folder / f"lib{library}.so")
        run(["cc", "-shared", "-fPIC", "-w", "-o", output, str(folder / "stub.c")], check=True)
        code = ""


@pytest.fixture(scope="module")
def results(tmp_path_factory, repo: Path) -> dict[str, str]:
    if torch.__version__.partition("+")[0] != VERSION:
        pytest.skip(f"torch {torch.__version__} here; torch_npu {VERSION} pairs with its own")
    absent = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"{' and '.join(absent)} not here: the stubs of CANN cannot be built")
    package, stubs = download(), tmp_path_factory.mktemp("cann")
    write_stubs(package, stubs)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{repo}:{package}",
        "LD_LIBRARY_PATH": f"{stubs}:{Path(torch.__file__).parent / 'lib'}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tests.npu_contract", str(repo / "examples" / "tiny")]
    done = run(command, timeout_s=240, env=environment, cwd=repo)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_the_backend_keeps_to_torch_npus(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""


def test_every_check_ran(results: dict[str, str]) -> None:
    assert tuple(results) == CHECKS
