"""The command line: what lands on stdout and stderr, and the exit codes.

Without Ray, a scripted engine stands in for the real one; tests marked ray start the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors import cli
from outrider.actors.driver.messages import Chunk, Completion, RequestStats
from outrider.actors.errors import EngineDeadError
from outrider.benchmarks import planted
from outrider.model.config import ConfigError
from outrider.model.step import Sampling
from tests.actors.conftest import hold_ray

STATS = RequestStats(
    iterations=10, drafted=30, accepted=12, accepted_per_position=[8, 3, 1], ttft_s=0.025
)


class ScriptedEngine:
    """Answers "abc" in two chunks; remembers what it was asked and whether it was closed."""

    made: ScriptedEngine
    text = "abc"
    failure: BaseException | None = None

    def __init__(self, path: object, overrides: dict[str, Any]) -> None:
        self.path, self.overrides = path, overrides
        self.asked: list[Any] = []
        self.closed = False
        type(self).made = self

    @classmethod
    def from_config(cls, path: object, overrides: dict[str, Any]) -> ScriptedEngine:
        return cls(path, overrides)

    def __enter__(self) -> ScriptedEngine:
        sys.stdout.write("a line that Ray might print\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def stream(self, prompt: str | list[int], sampling: Sampling) -> Iterator[Chunk]:
        self.asked.append((prompt, sampling))
        yield Chunk(token_ids=list(range(12)), text=self.text[:2])
        if self.failure is not None:
            raise self.failure
        yield Chunk(
            token_ids=list(range(11)), text=self.text[2:], finish_reason="length", stats=STATS
        )

    def generate(self, prompts: Sequence[Any], sampling: Sampling) -> list[Completion]:
        self.asked.append((prompts, sampling))
        return [
            Completion(
                prompt_ids=[1, 2],
                token_ids=[3, 4],
                text=self.text,
                finish_reason="stop",
                seed=5,
                stats=STATS,
            )
            for _ in prompts
        ]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[ScriptedEngine]:
    class Fresh(ScriptedEngine):
        pass

    monkeypatch.setitem(sys.modules, "outrider.actors.engine", SimpleNamespace(Engine=Fresh))
    monkeypatch.chdir(tmp_path)
    return Fresh


def run(repo: Path, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.actors.cli", *args]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120, **kwargs)


def test_help_names_the_exit_codes_and_imports_nothing_slow(repo: Path) -> None:
    code = (
        "import sys; from outrider.actors.cli import main; code = main(['--help']); "
        "slow = {'torch', 'ray', 'transformers', 'yaml'} & set(sys.modules); "
        "sys.exit(code or ' '.join(slow) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exit codes: 0 done; 1" in done.stdout


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("outrider")


def test_one_prompt_streams_its_text_and_then_a_line_of_statistics(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x", "--max-tokens", "7", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    text, line = out.splitlines()
    assert text == "abc"
    assert line.startswith(
        "[drafted 30 | accepted 12 (40 %) | by position 80/30/10 % | 2.20 tokens/iteration | "
    )
    assert line.endswith(" tok/s | ttft 25 ms]")
    assert err == "a line that Ray might print\n"
    assert engine.made.asked == [("x", Sampling(max_tokens=7, seed=3))]
    assert engine.made.closed


def test_the_prompt_is_echoed_on_request(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x =", "--echo"]) == 0
    assert capsys.readouterr().out.startswith("x =abc\n[")
    engine.text = ""
    assert cli.main(["generate", "--prompt-ids", "17,18", "--echo"]) == 0
    assert capsys.readouterr().out.startswith("17,18,0,1,2,")


def test_a_checkpoint_without_text_shows_token_ids(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.text = ""
    assert cli.main(["generate", "--prompt-ids", "1, 2"]) == 0
    expected = ",".join(map(str, [*range(12), *range(11)]))
    assert capsys.readouterr().out.splitlines()[0] == expected
    assert engine.made.asked[0][0] == [1, 2]


def test_several_prompts_run_together_and_stand_under_headings(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt-ids", "1,2", "--prompt", "x", "--prompt", "y"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["--- prompt 1 of 3 (stop)", "abc", "--- prompt 2 of 3 (stop)", "abc"]
    assert lines[-1].startswith("[drafted 90 | accepted 36 (40 %) | by position 80/30/10 % | ")
    assert engine.made.asked[0][0] == ["x", "y", [1, 2]]


def test_json_is_one_object_a_prompt_and_nothing_else(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x", "--prompt", "y", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(objects) == 2
    assert objects[0] == {
        "prompt_ids": [1, 2],
        "token_ids": [3, 4],
        "text": "abc",
        "finish_reason": "stop",
        "stats": {
            "iterations": 10,
            "drafted": 30,
            "accepted": 12,
            "accepted_per_position": [8, 3, 1],
            "ttft_s": 0.025,
            "tpot_s": 0.0,
        },
    }


def test_options_become_overrides_and_win_over_set(engine: type[ScriptedEngine]) -> None:
    options = ["--model", "m", "--draft-tokens", "5", "--draft-body", "sharded"]
    options += ["--tensor-parallel", "4", "--set", "limits.max_slots=2", "--set", "model=other"]
    assert cli.main(["generate", "--prompt", "x", *options]) == 0
    assert engine.made.overrides == {
        "model": "m",
        "speculation.draft_tokens": 5,
        "speculation.draft_body": "sharded",
        "parallel.tensor_parallel": 4,
        "limits.max_slots": 2,
    }


def test_the_file_here_is_taken_unless_another_is_named(
    engine: type[ScriptedEngine], tmp_path: Path
) -> None:
    cli.main(["generate", "--prompt", "x"])
    assert engine.made.path is None
    (tmp_path / "cluster.yaml").write_text("model: m")
    cli.main(["generate", "--prompt", "x"])
    assert engine.made.path == Path("cluster.yaml")
    cli.main(["generate", "--prompt", "x", "--config", "other.yaml"])
    assert engine.made.path == Path("other.yaml")


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ConfigError("a\nb"), 2, "error: a b"),
        (EngineDeadError("rank 1 died"), 1, "error: EngineDeadError: rank 1 died"),
    ],
)
def test_a_failure_closes_the_engine_and_is_one_line(
    engine: type[ScriptedEngine],
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
    line: str,
) -> None:
    engine.failure = failure
    assert cli.main(["generate", "--prompt", "x"]) == code
    assert engine.made.closed
    err = capsys.readouterr().err
    assert err.splitlines()[1:] == [line] * bool(line)


def test_a_failure_of_our_own_making_keeps_its_trace(
    engine: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failure = KeyError("slot")
    assert cli.main(["generate", "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: KeyError: 'slot'"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("generate", "give --prompt TEXT or --prompt-ids 1,2,3"),
        ("generate --prompt=", "prompt 1 of 1 is empty"),
        ("generate --prompt x --prompt-ids=", "prompt 2 of 2 is empty"),
        ("generate --prompt-ids 1,x", 'prompt-ids "1,x": expected token ids'),
        ("generate --prompt-ids 1,-2", 'prompt-ids "1,-2": expected token ids'),
        ("generate --prompt x --top-p 2", "sampling.top_p = 2.0: must lie in (0, 1]"),
        ("generate --prompt x --max-tokens 0", "sampling.max_tokens = 0"),
        ("generate --prompt x --temperature -1", "sampling.temperature = -1.0"),
        ("generate --prompt x --seed -1", "sampling.seed = -1"),
        ("generate --prompt x --max-tokens many", "--max-tokens"),
        ("generate --prompt x --set limits", "expected KEY.SUBKEY=VALUE"),
        ("generate --frobnicate", "No such option: --frobnicate"),
        ("frobnicate", "No such command 'frobnicate'"),
        ("plan --config nope.yaml", "nope.yaml: cannot be read"),
        ("plan --model nope", "model = 'nope'"),
        ("plan --draft-tokens -1", "speculation.draft_tokens = -1: must be an integer, at least 0"),
        ("plan --draft-body whole", '\'whole\': must be "local" or "sharded"'),
        ("plan --set speculation.draft_token=1", "did you mean speculation.draft_tokens?"),
        ("plan --set parallel.rank_cpus=[4000,4001]", "this process may use"),
        ("plan --set parallel.rank_cpus=[0]", "needs one a rank"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    engine: type[ScriptedEngine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    repo: Path,
    args: str,
    said: str,
) -> None:
    monkeypatch.chdir(repo)
    assert cli.main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert said in err


def test_overlapping_ranges_are_a_warning_on_stderr(repo: Path, planted_tiny: Path) -> None:
    done = run(repo, "plan", "--model", str(planted_tiny), "--set", "parallel.rank_cpus=[0,0]")
    assert done.returncode == 0, done.stderr
    assert "warning: parallel: rank 0 and rank 1 share CPUs 0\n" in done.stderr
    assert "Traceback" not in done.stderr


PLAN = ["--tensor-parallel", "2", "--memory-gib", "1", "--set", "limits.max_model_len=1000"]


def test_the_plan_reads_no_weights(
    planted_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(planted_tiny / "config.json", tmp_path)
    assert cli.main(["plan", "--model", str(tmp_path), *PLAN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weight_bytes"] == sum(report["parts"].values())
    assert {"target layers", "embedding", "draft body"} <= set(report["parts"])
    # float32, keys and values: 1 full layer with 1 of 2 kv heads, the draft with both, 64 wide
    assert report["kv_token_bytes"] == {"target": 4 * 2 * 64, "draft": 4 * 2 * 2 * 64}
    assert report["num_pages"] == 8 * 63 + 1
    assert report["total_bytes"] == (
        report["weight_bytes"]
        + report["num_slots"] * report["slot_bytes"]
        + report["num_pages"] * report["kv_page_bytes"]
    )
    assert report["pages_that_fit"] > report["num_pages"]


def test_the_plan_is_a_table(planted_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(planted_tiny), *PLAN]) == 0
    table = capsys.readouterr().out
    for name in ("target layers", "draft body", "KV a token, draft", "505 pages", "pages that fit"):
        assert name in table


def test_a_plan_that_does_not_fit_still_shows_its_numbers(
    planted_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--memory-gib", "0.001", "--json"]
    assert cli.main(["plan", "--model", str(planted_tiny), *options]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["pages_that_fit"] == 0
    assert "lower limits.max_model_len" in err


def test_the_memory_of_a_device_must_be_told(
    planted_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", str(planted_tiny), "--set", "device=cuda"]) == 2
    assert "--memory-gib" in capsys.readouterr().err


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
def test_two_ranks_print_the_chain_as_json(repo: Path, planted_tiny: Path) -> None:
    length = next(n for n in range(20, 60) if ends_with_a_full_iteration(17, n))
    args = ["--model", str(planted_tiny), "--prompt-ids", "17", "--prompt-ids", "5,3,900"]
    args += ["--max-tokens", str(length), "--ignore-eos", "--json", "--draft-tokens", "3"]
    done = run(repo, "generate", *args)
    assert done.returncode == 0, done.stderr
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
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt-ids", "1", "--tensor-parallel", "3"], "cannot be split over 3 ranks"),
        (["--prompt-ids", "1", "--model", "/nope"], "no such folder"),
        (["--prompt-ids", "1", "--draft-tokens", "-1"], "speculation.draft_tokens = -1"),
        (["--prompt-ids", "1", "--set", "parallel.rank_cpus=[4000,4001]"], "may use"),
        (["--prompt-ids", "1", "--set", "limits.max_slot=1"], "did you mean limits.max_slots?"),
        (["--prompt-ids", "1,2,3,4", "--set", "limits.max_model_len=4"], "limits.max_model_len"),
        (["--prompt-ids", "99999"], "99999"),
        (["--prompt", "text"], "tokenizer"),
    ],
)
def test_what_the_engine_refuses_is_one_line_and_exit_2(
    repo: Path, planted_tiny: Path, options: list[str], said: str
) -> None:
    done = run(repo, "generate", "--model", str(planted_tiny), *options)
    assert_refused(done, said)


@pytest.mark.ray
def test_a_truncated_checkpoint_is_one_line_and_exit_2(
    repo: Path, planted_tiny: Path, tmp_path: Path
) -> None:
    model = copied(planted_tiny, tmp_path)
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert_refused(run(repo, "generate", "--model", str(model), "--prompt-ids", "1"), str(file))


@pytest.mark.ray
def test_a_wrong_vocabulary_is_one_line_and_exit_2(
    repo: Path, planted_tiny: Path, tmp_path: Path
) -> None:
    model = copied(planted_tiny, tmp_path)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 1024', '"vocab_size": 2048'))
    assert_refused(run(repo, "generate", "--model", str(model), "--prompt-ids", "1"), "2048")


def assert_refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ray
def test_ctrl_c_ends_with_130_and_leaves_no_process(repo: Path, planted_tiny: Path) -> None:
    psutil = pytest.importorskip("psutil")
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
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


class OneGpu:
    """Ray that counts one GPU on a machine without any."""

    def __init__(self) -> None:
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )

    def close(self) -> None:
        ray.shutdown()


CUDA = ["generate", "--prompt-ids", "1", "--set", "device=cuda", "--model"]


@pytest.mark.ray
def test_too_few_gpus_are_counted_before_anything_loads(
    planted_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_ray("gpu", OneGpu)
    assert cli.main([*CUDA, str(planted_tiny), "--tensor-parallel", "2"]) == cli.USER_ERROR
    assert "needs GPU: 2, the cluster has GPU: 1" in capsys.readouterr().err


@pytest.mark.ray
def test_no_gpu_is_an_error_of_the_configuration(
    planted_tiny: Path, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*CUDA, str(planted_tiny)]) == cli.USER_ERROR
    assert "needs GPU: 2, the cluster has GPU: 0" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_a_gpu_that_torch_cannot_use_is_an_error_before_weights_load(
    planted_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray gives the rank a GPU; claiming it fails, and the rank says why."""
    hold_ray("gpu", OneGpu)
    assert cli.main([*CUDA, str(planted_tiny), "--tensor-parallel", "1"]) == cli.USER_ERROR
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: rank 0: device: cuda: ")
    assert error.endswith("Set device: cpu in cluster.yaml.")
