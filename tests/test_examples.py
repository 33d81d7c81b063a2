"""The scripts in examples/, run as a user runs them, on the bundled checkpoint.

examples/submit_job.py runs in tests/actors/test_lifecycle.py, examples/ask_server.py in
tests/actors/test_serve.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.actors.engine import Engine, Sampling
from tests.conftest import RunningCluster

pytestmark = pytest.mark.ray


def python(repo: Path, *args: str, environ: Mapping[str, str] = os.environ) -> str:
    """What python prints with these arguments, run in the repository's root."""
    done = subprocess.run(
        [sys.executable, *args], cwd=repo, timeout=200, capture_output=True, text=True,
        env={**environ, "PYTHONPATH": str(repo)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_driver_script_answers(cluster: RunningCluster, tiny: Engine, repo: Path) -> None:
    """On the running cluster that RAY_ADDRESS names."""
    out = python(repo, "examples/offline.py", environ=cluster.environ())
    prompts = ["To create a new project,", "By default, the server", "A view is a function that"]
    right = tiny.generate(prompts, Sampling(max_tokens=32, draft_tokens=0))
    sampled = Sampling(max_tokens=32, temperature=0.8, seed=7, draft_tokens=0)
    (last,) = tiny.generate(prompts[0], sampled)
    texts = [f"{prompt}{answer.text}\n---\n" for prompt, answer in zip(prompts, right, strict=True)]
    assert out.startswith("".join(texts) + last.text + "\n")
    accepted, drafted = (int(word) for word in out.splitlines()[-1].split() if word.isdigit())
    assert 0 < accepted < drafted
