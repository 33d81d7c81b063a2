"""Files of prompts: every line answered once, over any number of runs; exit codes by outcome."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from outrider.actors import job
from outrider.actors.driver.assembly import limits_of
from outrider.actors.engine import Engine, Sampling
from outrider.actors.http.prompts import banned_tokens
from outrider.model.config import ConfigError, load_config
from outrider.model.text import Tokenizer
from tests.actors.footprint import held_cpus, wait_until_free
from tests.conftest import RunningCluster
from tests.templates import IN_TAGS, folder_with
from tests.test_end_to_end import PROMPTS, TINY

BREAKS = "one\u2028two\u2029three\u0085four\x1cfive"
"""Line breaks to str.splitlines, and to no one who writes JSON lines."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").split("\n") if text]


def write(path: Path, records: list[Any]) -> Path:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.ray
def test_a_chat_of_a_file_has_its_thought_and_calls_apart(tiny: Engine, tmp_path: Path) -> None:
    """Likely tokens spell the tags; a grammar makes the call."""
    tokenizer = Tokenizer(folder_with(tmp_path, IN_TAGS))
    limits = limits_of(tiny.spec, load_config(TINY), tiny.run)
    runner = job.JobRunner(tiny, limits, tokenizer)
    number = {"type": "integer", "minimum": 10, "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"]}
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Count."}], "max_tokens": 200, "seed": 2,
        "tools": [{"type": "function", "function": {"name": "count", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "count"}},
        "logit_bias": {str(token): 12 for token in tokenizer.encode("</think>")},
    }  # fmt: skip
    record = runner.answer(job.InputLine("a", fields))
    assert "error" not in record, record
    assert record["finish_reason"] == "tool_calls"
    assert record["text"] == ""
    (call,) = record["tool_calls"]
    assert 10 <= json.loads(call["function"]["arguments"])["n"] <= 99
    assert record["reasoning_content"]
    assert record["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    plain = runner.answer(job.InputLine("b", {**fields, "tools": [], "tool_choice": None}))
    assert plain["finish_reason"] == "length"
    assert plain["text"] or plain["reasoning_content"]


def test_a_line_without_an_id_of_its_own_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for text, rule in (
        ('{"id": "a"}\n{"prompt": "x"}\n', r"in\.jsonl:2: .*id"),
        ('{"id": "a"}\n\n{"id": "a"}\n', r"in\.jsonl:3: .*'a' was there before"),
        ("{\n", r"in\.jsonl:1: not JSON"),
        ("[" * 100_000 + "\n", r"in\.jsonl:1: not JSON"),
        ("[]\n", r"in\.jsonl:1: expected an object"),
        ('{"id": 5}\n', r"in\.jsonl:1: expected an object"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rule):
            job.read_lines(path)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"in\.jsonl: cannot be read: .*utf-8"):
        job.read_lines(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        job.read_lines(tmp_path / "absent")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line_and_a_byte_order_mark_is_none(
    tmp_path: Path, end: str
) -> None:
    path = tmp_path / "in.jsonl"
    text = json.dumps({"id": "a", "prompt": BREAKS.replace("\x1c", "")}, ensure_ascii=False)
    path.write_text(f'\ufeff{text}{end}{{"id": "b"}}{end}', "utf-8", newline="")
    assert [line.id for line in job.read_lines(path)] == ["a", "b"]


def test_the_output_of_a_killed_run_keeps_only_whole_answers(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert job.prepare_output(path) == set()
    whole = {"id": "a", "text": BREAKS}
    for rest in ('{"id": "c", "te', '{"i', ""):
        write(path, [whole, {"id": "b", "error": "no"}])
        with path.open("a") as file:
            file.write(rest)
        assert job.prepare_output(path) == {"a"}
        assert lines_of(path) == [whole]
    path.write_bytes(path.read_bytes() + '{"id": "ä"'.encode()[:-2])  # within a character
    assert job.prepare_output(path) == {"a"}
    assert lines_of(path) == [whole]


def test_an_output_that_needs_no_change_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [{"id": "a", "text": BREAKS}])
    before = path.stat().st_ino
    assert job.prepare_output(path) == {"a"}
    assert path.stat().st_ino == before
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path / "far.jsonl", [{"id": "b", "error": ""}]))
    assert job.prepare_output(link) == set()
    assert link.is_symlink()
    assert (tmp_path / "far.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# my notes\n\nnothing to lose\n", 1),
        ("hello", 1),
        ("5\n", 1),
        ("null\n", 1),
        ("[]\n", 1),
        ('{"a":1}\n', 1),
        ('{"id": 5, "text": "x"}\n', 1),
        ('{"id": "a", "prompt": "the input"}', 1),
        ('{"id": "a", "text": "x"}\n{"id": "b", "tex\n', 2),
        ("[" * 100_000, 1),
    ],
)
def test_a_file_that_is_no_output_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: int
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    source = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}])
    assert job.main(["--input", str(source), "--output", str(path), "--model", str(TINY)]) == 2
    err = capsys.readouterr().err
    assert f"error: {path}:{line}: is no answer of a job" in err
    assert "Traceback" not in err
    assert path.read_text() == text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "notes.txt"]


def work(lines: int, answer: Any, path: Path, at_once: int = 2) -> job.Counts:
    todo = [job.InputLine(str(i), {}) for i in range(lines)]
    with path.open("ab", buffering=0) as out, ThreadPoolExecutor(at_once) as pool:
        return job.work_through(todo, answer, out, pool=pool, at_once=at_once)


def test_no_more_lines_than_allowed_are_under_way_and_all_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, now, most = threading.Lock(), 0, 0
    two = threading.Barrier(2)

    def answer(line: job.InputLine) -> dict[str, Any]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        two.wait(5)
        with lock:
            now -= 1
        return {"id": line.id} | ({"error": "no"} if line.id == "7" else {})

    counts = work(20, answer, tmp_path / "out")
    assert (counts.answered, counts.refused) == (19, 1)
    assert most == 2
    assert sorted(int(r["id"]) for r in lines_of(tmp_path / "out")) == list(range(20))
    assert capsys.readouterr().err.splitlines()[-1].startswith("20 of 20 lines, 1 refused")


def test_what_no_encoding_can_hold_is_written_as_json_can(tmp_path: Path) -> None:
    work(1, lambda line: {"id": line.id, "text": "\ud800 é"}, tmp_path / "out")
    assert (tmp_path / "out").read_text("utf-8") == '{"id": "0", "text": "\\ud800 é"}\n'
    assert job.prepare_output(tmp_path / "out") == {"0"}


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(ConfigError, match="/dev/full: cannot be written: No space left"):
        work(3, lambda line: {"id": line.id, "text": ""}, Path("/dev/full"))


def test_an_output_that_cannot_be_made_is_known_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}])
    for output in (tmp_path / "no" / "out.jsonl", tmp_path):
        args = ["--input", str(source), "--output", str(output), "--model", str(TINY)]
        assert job.main(args) == 2
        assert f"error: {output}: cannot be written: " in capsys.readouterr().err


@pytest.mark.ray
def test_a_job_answers_its_file_and_a_rerun_only_the_rest(
    tmp_path: Path, tiny: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[dict[str, Any]] = [
        {"id": f"p{i}", "prompt": text, "max_tokens": 12, "temperature": 0}
        for i, text in enumerate(PROMPTS[:3])
    ]
    chat = {
        "id": "chat",
        "messages": [{"role": "user", "content": BREAKS}],
        "max_tokens": 6,
        "seed": 1,
    }
    forms = {
        "id": "forms", "prompt": "ignored " + PROMPTS[0], "max_tokens": 12, "temperature": 0,
        "truncate_prompt_tokens": len(Tokenizer(TINY).encode(PROMPTS[0])),
        "stop": ["e"], "include_stop_str_in_output": True, "stream": False, "n": 1, "user": None,
        "bad_words": ["a"], "return_token_ids": True, "prompt_logprobs": 1,
    }  # fmt: skip
    wrong = {"id": "wrong", "prompt": "a", "best_of": 2}
    source = write(tmp_path / "in.jsonl", [*prompts, chat, forms, wrong])
    earlier = {"id": "p1", "text": f"from an earlier run: {BREAKS}"}
    output = write(tmp_path / "out.jsonl", [earlier])
    args = ["--input", str(source), "--output", str(output), "--model", str(TINY)]
    assert job.main(args) == job.SOME_REFUSED
    records = {record["id"]: record for record in lines_of(output)}
    assert list(records) == ["p1", *[i for i in records if i != "p1"]]
    assert records.keys() == {"p0", "p1", "p2", "chat", "forms", "wrong"}
    assert records["p1"] == earlier
    assert "best_of" in records["wrong"]["error"]
    assert records["chat"]["finish_reason"] in ("length", "stop")
    assert records["p0"]["usage"]["speculation"]["drafted_tokens"] > 0
    err = capsys.readouterr().err
    assert "6 lines, 1 answered before" in err
    assert "s: starting the driver and 2 ranks" in err

    write(source, [*prompts, chat, forms])
    assert job.main(args) == 0  # all are there: no engine starts
    assert "5 lines, 5 answered before" in capsys.readouterr().err
    right = tiny.generate(PROMPTS[:3], Sampling(max_tokens=12, draft_tokens=0))
    for i in (0, 2):
        assert records[f"p{i}"]["text"] == right[i].text
    told = records["forms"]
    banned = tuple(token for (token,) in banned_tokens(Tokenizer(TINY), ["a"]))
    (form,) = tiny.generate(
        told["prompt_token_ids"],
        Sampling(max_tokens=12, banned_ids=banned, draft_tokens=0, prompt_logprobs=1),
        stop=["e"],
        include_stop=True,
    )
    assert len(told["prompt_token_ids"]) == forms["truncate_prompt_tokens"]
    assert told["text"] == form.text
    assert told["text"].endswith("e")
    first, *scores = form.prompt_logprobs
    assert first is told["prompt_logprobs"][0] is None
    assert len(scores) == len(told["prompt_token_ids"]) - 1
    for mine, row, token in zip(told["prompt_logprobs"][1:], scores, form.prompt_ids[1:]):
        assert row is not None
        assert row[0][0] == token
        assert [value for _, value in mine] == pytest.approx([v for _, v in row], abs=1e-3)

    assert job.main(["--input", str(tmp_path / "none"), "--output", str(output)]) == 2


@pytest.mark.ray
def test_ctrl_c_ends_a_job_within_seconds_and_keeps_what_is_answered(
    tmp_path: Path, repo: Path, cluster: RunningCluster
) -> None:
    """On a running cluster, which gets its CPUs back."""
    held = held_cpus(placement_group_table())
    short = [{"id": f"short{i}", "prompt": "a", "max_tokens": 2} for i in range(2)]
    long = [
        {"id": f"long{i}", "prompt": "a", "max_tokens": 4000, "ignore_eos": True} for i in range(16)
    ]
    source = write(tmp_path / "in.jsonl", [*short, *long])
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "outrider.actors.job", "--input", str(source)]
    command += ["--output", str(output), "--model", str(TINY)]
    with subprocess.Popen(
        command, cwd=repo, env=cluster.environ(), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        took_s = time.monotonic() - sent
        assert process.stderr is not None
        err = process.stderr.read()
    assert code == 130, err
    assert took_s < 20
    assert "Traceback" not in err
    assert {record["id"] for record in lines_of(output)} >= {"short0", "short1"}
    assert all("text" in record for record in lines_of(output))
    assert held_cpus(placement_group_table()) == held
    wait_until_free("CPU", ray.cluster_resources()["CPU"] - held)
