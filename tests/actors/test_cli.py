"""The command line: what lands on stdout and stderr, and the exit codes.

Without Ray, a scripted engine stands in for the real one; tests marked ray start the real one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.actors import cli
from outrider.actors.driver.messages import Chunk, Completion, RequestStats
from outrider.actors.errors import EngineDeadError
from outrider.model.config import ConfigError
from outrider.model.step import Sampling

STATS = RequestStats(
    iterations=10,
    drafter="lookup",
    drafted=30,
    accepted=12,
    accepted_per_position=[8, 3, 1],
    ttft_s=0.025,
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
    def from_config(
        cls, path: object, overrides: dict[str, Any], *, on_progress: Callable[[int, int], None]
    ) -> ScriptedEngine:
        logging.getLogger("outrider.made_up").info("starting %d ranks", 2)
        on_progress(0, 0)
        on_progress(3 << 30, 6 << 30)
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


def test_help_shows_every_summary_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert {"generate", "plan", "doctor", "serve", "bench", "job"} <= set(out.split())
    assert "..." not in out.partition("Commands:")[2]
    assert "Continue prompts: print their text, then a line of statistics." in out


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
    assert re.fullmatch(r"\d\.\d s: starting 2 ranks\na line that Ray might print\n", err)
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
            "drafter": "lookup",
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
    assert cli.main(["generate", "--prompt", "x", "--draft-tokens", "auto"]) == 0
    assert engine.made.overrides == {"speculation.draft_tokens": "auto"}
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
    assert err.splitlines()[2:] == [line] * bool(line)


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
        ("generate --prompt a\udcff", "prompt 1 of 1 is not UTF-8: "),
        ("generate --prompt-ids 1,x", 'prompt-ids "1,x": expected token ids'),
        ("generate --prompt-ids 1,-2", 'prompt-ids "1,-2": expected token ids'),
        ("generate --prompt x --top-p 2", "sampling.top_p = 2.0: must lie in (0, 1]"),
        ("generate --prompt x --max-tokens 0", "sampling.max_tokens = 0"),
        ("generate --prompt x --temperature -1", "sampling.temperature = -1.0"),
        ("generate --prompt x --seed -1", "sampling.seed = -1"),
        ("generate --prompt x --max-tokens many", "--max-tokens"),
        ("generate --prompt x --set limits", "expected KEY.SUBKEY=VALUE"),
        ("generate --frobnicate", "No such option: --frobnicate; see outrider generate --help"),
        ("job --input x", "Missing option '--output'; see outrider job --help"),
        ("frobnicate", "No such command 'frobnicate'"),
        ("plan --config nope.yaml", "nope.yaml: cannot be read"),
        ("plan --model nope", "model = 'nope'"),
        ("plan --draft-tokens -1", "speculation.draft_tokens = -1: must be an integer, at least 0"),
        ("plan --draft-tokens 17", "speculation.draft_tokens = 17: must be an integer"),
        ("plan --draft-tokens fast", "speculation.draft_tokens = 'fast': must be an integer"),
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


@pytest.mark.filterwarnings("default")
def test_overlapping_ranges_are_a_warning_on_stderr(
    planted_tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "--model", str(planted_tiny), "--set", "parallel.rank_cpus=[0,0]"]
    assert cli.main(args) == 0
    assert capfd.readouterr().err == "warning: parallel: rank 0 and rank 1 share CPUs 0\n"


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
        + report["num_snapshots"] * report["snapshot_bytes"]
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
