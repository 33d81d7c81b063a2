"""The scripts in examples/, run as a user runs them, on the bundled checkpoint."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors.job import read_lines
from tests.actors.conftest import hold_ray

pytestmark = pytest.mark.ray
JOB_ON_A_CLUSTER = """
import sys
from pathlib import Path
import ray
from examples.submit_job import submit
context = ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=False,
                   object_store_memory=100 << 20)
done = submit(f"http://{context.dashboard_url}", Path(sys.argv[1]), Path(sys.argv[2]))
ray.shutdown()
sys.exit(not done)
"""


def python(repo: Path, *args: str, limit_s: float = 200) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environ = {"RAY_AUTH_TOKEN": secrets.token_hex(32), **os.environ}
    done = subprocess.run(
        [sys.executable, *args], cwd=repo, timeout=limit_s, capture_output=True, text=True,
        env={**environ, "PATH": path, "PYTHONPATH": str(repo)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_driver_script_answers(repo: Path) -> None:
    hold_ray(None)
    out = python(repo, "examples/offline.py")
    assert out.startswith("To create a new project,")
    assert out.count("---") == 3
    accepted, drafted = (int(word) for word in out.splitlines()[-1].split() if word.isdigit())
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_the_job_is_submitted_and_answers_its_file(repo: Path, tmp_path: Path) -> None:
    hold_ray(None)
    output = tmp_path / "out.jsonl"
    out = python(repo, "-c", JOB_ON_A_CLUSTER, "examples/prompts.jsonl", str(output))
    assert "3 of 3 lines, 0 refused" in out
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    wanted = {line.id for line in read_lines(repo / "examples" / "prompts.jsonl")}
    assert {answer["id"] for answer in answers} == wanted
    assert all(answer["text"] for answer in answers)
