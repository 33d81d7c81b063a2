"""The command line with real engines: what it prints, its exit codes, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from outrider.actors import cli
from outrider.actors.options import USER_ERROR
from outrider.benchmarks import planted
from outrider.model.step import Sampling
from tests.actors.cluster.test_imports import hostile_folder, imported_from
from tests.actors.footprint import Footprint
from tests.actors.http.test_parameters import tiny_with
from tests.conftest import RunningCluster
from tests.ranks import Team


def run(folder: Path, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.actors.cli", *args]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, **kwargs
    )


def copied(planted_tiny: Path, folder: Path) -> Path:
    return Path(shutil.copytree(planted_tiny, folder / "model"))


CHAIN = planted.chain(1024, 0.8425, 0)


def expected(start: int, num_tokens: int) -> planted.Expected:
    return planted.expected_counts(CHAIN, start, num_tokens, draft_tokens=3)


def ends_with_a_full_iteration(start: int, num_tokens: int) -> bool:
    """The last K+1 tokens come from one iteration, so that no draft of it reaches past the end."""
    counts = expected(start, num_tokens)
    whole = 1 + counts.iterations + counts.accepted == num_tokens
    return whole and expected(start, num_tokens - 3).iterations == counts.iterations


@pytest.mark.ray
def test_two_ranks_print_the_chain_as_json(
    repo: Path, planted_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started in a folder whose modules have the names of what driver and ranks import."""
    folder = hostile_folder(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(repo))
    length = next(n for n in range(20, 60) if ends_with_a_full_iteration(17, n))
    args = ["--model", str(planted_tiny), "--prompt-ids", "17", "--prompt-ids", "5,3,900"]
    args += ["--max-tokens", str(length), "--ignore-eos", "--json", "--draft-tokens", "3"]
    done = run(folder, "generate", *args)
    assert done.returncode == 0, done.stderr
    assert imported_from(folder) == []
    assert "s: starting Ray on this machine\n" in done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["prompt_ids"] == [17]
    assert first["token_ids"] == expected(17, length).tokens
    assert second["token_ids"] == expected(900, length).tokens
    assert first["finish_reason"] == second["finish_reason"] == "length"
    counts = expected(17, length)
    assert first["stats"]["iterations"] == counts.iterations
    assert first["stats"]["drafted"] == counts.drafted
    assert first["stats"]["accepted"] == counts.accepted > 0
    assert first["stats"]["accepted_per_position"] == counts.accepted_per_position


@pytest.mark.ray
def test_what_no_option_says_is_as_generation_config_says(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repo))
    model = tiny_with(tmp_path, {"temperature": 0.9, "top_k": 8})
    args = ["--model", str(model), "--tensor-parallel", "1", "--prompt-ids", "17,3,900"]
    args += ["--max-tokens", "24", "--seed", "7", "--ignore-eos", "--json"]
    done = run(tmp_path, "generate", *args)
    assert done.returncode == 0, done.stderr
    assert "requests default to temperature 0.9, top_k 8 (generation_config.json)" in done.stderr
    hows = ({"temperature": 0.9, "top_k": 8}, {"temperature": 0.9}, {})
    asked = [Sampling(max_tokens=24, seed=7, ignore_eos=True, **how) for how in hows]
    right, *others = Team(model, draft_tokens=0).generate([([17, 3, 900], one) for one in asked])
    assert json.loads(done.stdout)["token_ids"] == right.tokens
    assert right.tokens not in [other.tokens for other in others]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor-parallel", "3"], "cannot be split over 3 ranks"),
        (["--model", "/nope"], "no such folder"),
        (["--draft-tokens", "-1"], "speculation.draft_tokens = -1"),
        (["--set", "parallel.rank_cpus=[4000,4001]"], "may use"),
        (["--set", "limits.max_slot=1"], "did you mean limits.max_slots?"),
    ],
)
def test_what_the_engine_refuses_is_one_line_and_exit_2(
    planted_tiny: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    generate = ["generate", "--prompt-ids", "1", "--model", str(planted_tiny)]
    assert_refused(generate + options, said, capfd)


def test_a_truncated_checkpoint_is_one_line_and_exit_2(
    planted_tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = copied(planted_tiny, tmp_path)
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert_refused(["generate", "--model", str(model), "--prompt-ids", "1"], str(file), capfd)


def test_a_wrong_vocabulary_is_one_line_and_exit_2(
    planted_tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = copied(planted_tiny, tmp_path)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 1024', '"vocab_size": 2048'))
    assert_refused(["generate", "--model", str(model), "--prompt-ids", "1"], "2048", capfd)


def assert_refused(args: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Before Ray starts; what a running engine refuses is in test_engine.py."""
    assert cli.main(args) == USER_ERROR
    assert not ray.is_initialized()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.ray
def test_ctrl_c_ends_with_130_and_leaves_nothing(repo: Path, planted_tiny: Path) -> None:
    args = ["--model", str(planted_tiny), "--prompt-ids", "17", "--echo", "--ignore-eos"]
    command = [
        sys.executable,
        "-m",
        "outrider.actors.cli",
        "generate",
        *args,
        "--max-tokens",
        "4000",
    ]
    with subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"17"  # the engine is up
        footprint = Footprint.of(process.pid)
        assert len(footprint.pids) > 5
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    footprint.wait_until_gone()


CUDA = ["generate", "--prompt-ids", "1", "--set", "device=cuda", "--model"]


@pytest.mark.ray
def test_too_few_gpus_are_counted_before_anything_loads(
    planted_tiny: Path, cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*CUDA, str(planted_tiny)]) == USER_ERROR
    assert "needs GPU: 2, the cluster has GPU: 1" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_a_gpu_that_torch_cannot_use_is_an_error_before_weights_load(
    planted_tiny: Path, cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray gives the rank a GPU; claiming it fails, and the rank says why."""
    assert cli.main([*CUDA, str(planted_tiny), "--tensor-parallel", "1"]) == USER_ERROR
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: rank 0: device: cuda: ")
    assert error.endswith("Set device: cpu in cluster.yaml.")
