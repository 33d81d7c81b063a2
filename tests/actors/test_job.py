"""Files of prompts: every line answered once, over any number of runs; exit codes by outcome."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider.actors import job
from outrider.actors.engine import Engine, Sampling
from outrider.model.config import ConfigError
from tests.actors.conftest import hold_ray
from tests.test_end_to_end import PROMPTS, TINY


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def test_a_line_without_an_id_of_its_own_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for text, rule in (
        ('{"id": "a"}\n{"prompt": "x"}\n', r"in\.jsonl:2: .*id"),
        ('{"id": "a"}\n\n{"id": "a"}\n', r"in\.jsonl:3: .*'a' was there before"),
        ("{\n", r"in\.jsonl:1: not JSON"),
        ("[]\n", r"in\.jsonl:1: expected an object"),
        ('{"id": 5}\n', r"in\.jsonl:1: expected an object"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rule):
            job.read_lines(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        job.read_lines(tmp_path / "absent")


def test_the_output_of_a_killed_run_keeps_only_whole_answers(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert job.answered(path) == set()
    path.write_text('{"id": "a", "text": "é"}\n{"id": "b", "error": "no"}\n{"id": "c", "te')
    assert job.answered(path) == {"a"}
    assert lines_of(path) == [{"id": "a", "text": "é"}]


def test_no_more_lines_than_allowed_are_under_way_and_all_are_written(tmp_path: Path) -> None:
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

    said: list[str] = []
    with (tmp_path / "out").open("w") as out:
        lines = [job.InputLine(str(i), {}) for i in range(20)]
        counts = job.work_through(lines, answer, out, at_once=2, say=said.append)
    assert counts == (19, 1)
    assert most == 2
    assert sorted(int(r["id"]) for r in lines_of(tmp_path / "out")) == list(range(20))
    assert said[-1].startswith("20 of 20 lines, 1 refused")


@pytest.mark.ray
def test_a_job_answers_its_file_and_a_rerun_only_the_rest(
    tmp_path: Path, no_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_ray(None)
    prompts: list[dict[str, Any]] = [
        {"id": f"p{i}", "prompt": text, "max_tokens": 12, "temperature": 0}
        for i, text in enumerate(PROMPTS[:3])
    ]
    chat = {
        "id": "chat",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "seed": 1,
    }
    wrong = {"id": "wrong", "prompt": "a", "best_of": 2}
    source = write(tmp_path / "in.jsonl", [*prompts, chat, wrong])
    output = write(tmp_path / "out.jsonl", [{"id": "p1", "text": "from an earlier run"}])
    args = ["--input", str(source), "--output", str(output), "--set", f"model={TINY}"]
    assert job.main(args) == job.SOME_REFUSED
    records = {record["id"]: record for record in lines_of(output)}
    assert list(records) == ["p1", *[i for i in records if i != "p1"]]
    assert records.keys() == {"p0", "p1", "p2", "chat", "wrong"}
    assert records["p1"] == {"id": "p1", "text": "from an earlier run"}
    assert "best_of" in records["wrong"]["error"]
    assert records["chat"]["finish_reason"] in ("length", "stop")
    assert records["p0"]["usage"]["speculation"]["drafted_tokens"] > 0
    assert "5 lines, 1 answered before" in capsys.readouterr().err

    write(source, [*prompts, chat])
    assert job.main(args) == 0  # all are there: no engine starts
    assert "4 lines, 4 answered before" in capsys.readouterr().err
    with Engine.from_config(None, model=str(TINY), draft_tokens=0) as engine:
        right = engine.generate(PROMPTS[:3], Sampling(max_tokens=12))
    for i in (0, 2):
        assert records[f"p{i}"]["text"] == right[i].text

    assert job.main(["--input", str(tmp_path / "none"), "--output", str(output)]) == 2
