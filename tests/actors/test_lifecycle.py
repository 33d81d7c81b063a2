"""How engines and servers start and end as their users see it, and what is left: nothing.

The command `outrider serve`, a submitted job, an engine whose driver or whose rank dies or hangs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import ray
from ray.util.placement_group import placement_group_table

from outrider.actors.engine import Chunk, Engine, Sampling
from outrider.actors.errors import EngineDeadError
from outrider.benchmarks import planted
from outrider.model.text import Tokenizer
from tests.actors.cluster.test_imports import hostile_folder, imported_from
from tests.actors.footprint import Footprint, held_cpus, wait_until_free
from tests.actors.served import free_port
from tests.actors.test_engine import CHAIN, rank_pids, start
from tests.conftest import RunningCluster
from tests.test_end_to_end import PROMPTS, TINY

pytestmark = pytest.mark.ray


@contextmanager
def serve_command(
    repo: Path, port: int, *, until: str = "ready: "
) -> Iterator[subprocess.Popen[str]]:
    """`outrider serve` on the bundled checkpoint, once its stderr has said `until`.

    It is started in a folder whose modules have the names of what Serve's and our processes import;
    none of them may do so.
    """
    folder = Path(tempfile.mkdtemp(prefix="serve-"))  # Ray's sockets need a short path
    here = hostile_folder(folder / "here")
    command = [sys.executable, "-m", "outrider.actors.cli", "serve", "--model", str(TINY)]
    command += ["--port", str(port)]
    environ = {
        **os.environ, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(repo)
    }  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=here, env=environ, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline()]
            while until not in lines[-1]:
                assert lines[-1], "".join(lines)
                lines.append(process.stderr.readline())
            assert any(re.match(r"\d+\.\d s: starting Ray Serve", line) for line in lines)
            yield process
            assert imported_from(here) == []
            shutil.rmtree(folder)
        finally:
            process.kill()


def assert_clients_that_leave_are_noticed(port: int) -> None:
    """One client, then 20 at once, send headers, 2 ms later a body, and close after 0.5 s.

    They ask for whole answers of 4,000 tokens, which take longer than the 2 s that the server has.
    """
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    for count in (1, 20):
        before = requests_now(port)
        with ExitStack() as clients:
            sockets = [
                clients.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(count)
            ]
            for client in sockets:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.sendall(head.encode())
            time.sleep(0.002)
            for client in sockets:
                client.sendall(body)
            time.sleep(0.5)
            here = requests_now(port)
            assert here["running"] + here["waiting"] == count
        deadline_s = time.monotonic() + 2
        while (left := requests_now(port))["running"] or left["waiting"]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)
        assert left["aborted_total"] - before["aborted_total"] == count


def requests_now(port: int) -> dict[str, int]:
    """What /metrics counts of requests: running, waiting, aborted_total and others."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = re.findall(r"^outrider_requests_(\w+) (\d+)", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


def test_the_serve_command_answers_and_leaves_nothing_after_ctrl_c(
    tiny: Engine, repo: Path
) -> None:
    """With its own Ray cluster and HAProxy: a completion, a chat, clients that leave, SIGINT."""
    right = tiny.generate(PROMPTS[0], Sampling(max_tokens=24, draft_tokens=0))[0]
    messages: Any = [{"role": "user", "content": "What is a view?"}]
    ids = Tokenizer(TINY).apply_chat_template(messages)
    how = Sampling(max_tokens=24, temperature=0.8, seed=3, draft_tokens=0)
    said = tiny.generate(ids, how)[0]
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with (
        serve_command(repo, port) as process,
        openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client,
    ):
        whole = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0
        )
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (right.text, "length")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 24
        assert whole.usage.model_dump()["speculation"]["accepted_tokens"] > 0
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=messages, max_completion_tokens=24, temperature=0.8,
                seed=3, stream=True,
            )
        )  # fmt: skip
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said.text
        assert chunks[-1].choices[0].finish_reason == said.finish_reason
        assert len(chunks) > 5
        footprint = Footprint.of(process.pid)
        names = [one.name() for one in footprint.processes]
        assert {"raylet", "gcs_server", "haproxy"} <= set(names)
        with_cookies = {"cookie": "a" * 40_000}  # HAProxy refused these, in HTML
        assert client.models.list(extra_headers=with_cookies).data[0].id == "tiny"
        assert sum(name.startswith("ray::RankActor") for name in names) == 2, names
        assert_clients_that_leave_are_noticed(port)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert (out, err) == ("", "ending; requests may go on for 60 s\n")
        footprint.wait_until_gone()


@pytest.mark.slow
def test_a_second_ctrl_c_cuts_what_is_open(repo: Path) -> None:
    port = free_port()
    with (
        serve_command(repo, port) as process,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client,
    ):
        footprint = Footprint.of(process.pid)
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "ending" in process.stderr.readline()
        next(stream)
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match=r"draining|ending|shut"):
            list(stream)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert (out, err) == ("", "")
        footprint.wait_until_gone()


@pytest.mark.slow
def test_ctrl_c_while_a_server_starts_is_quiet_and_leaves_nothing(repo: Path) -> None:
    with serve_command(repo, free_port(), until="ranks, which load the weights") as process:
        footprint = Footprint.of(process.pid)
        assert len(footprint.pids) > 5
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert (out, err) == ("", "")
        footprint.wait_until_gone()


def test_a_submitted_job_answers_its_whole_file(
    cluster: RunningCluster, tiny: Engine, repo: Path, tmp_path: Path
) -> None:
    """examples/submit_job.py, from the repository's root, on a running cluster."""
    lines = [
        {"id": f"line {i}", "prompt": text, "max_tokens": 16, "temperature": 0}
        for i, text in enumerate(PROMPTS[:3])
    ]
    lines.append({"id": "seeded", "prompt": PROMPTS[3], "max_tokens": 16, "seed": 7})
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = held_cpus(placement_group_table())
    for _ in range(20):
        done = subprocess.run(
            [sys.executable, "examples/submit_job.py", cluster.dashboard, str(source), str(output)],
            cwd=repo, env=cluster.environ(), capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        if "No available agent" not in done.stderr:
            break
        time.sleep(2)  # a cluster that has just started takes jobs some seconds later
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 lines, 0 refused" in done.stdout
    records = {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert records.keys() == {line["id"] for line in lines}
    seeded = Sampling(max_tokens=16, temperature=1.0, seed=7, draft_tokens=0)
    plain = Sampling(max_tokens=16, draft_tokens=0)
    right = tiny.generate(PROMPTS[:4], [plain, plain, plain, seeded])
    assert [records[line["id"]]["text"] for line in lines] == [one.text for one in right]
    assert records["line 0"]["usage"]["speculation"]["accepted_tokens"] > 0
    assert held_cpus(placement_group_table()) == held


class Calls:
    """A stream and two calls under way on an engine: five requests that must end with an error."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pool = engine, ThreadPoolExecutor(3)
        how = Sampling(max_tokens=500)
        stream = engine.stream([5], how)
        self._tokens = list(next(stream).token_ids)
        self._streamed = self._pool.submit(self._read, stream)
        prompts = [[[7], [8]], [[9], [17]]]
        self._calls = [self._pool.submit(engine.generate, two, how) for two in prompts]
        while engine.stats()["active"] < 5:
            time.sleep(0.01)

    def _read(self, stream: Iterator[Chunk]) -> None:
        for chunk in stream:
            self._tokens += chunk.token_ids

    def assert_all_end(self, error: str, within_s: float) -> None:
        """With this error, and so does what comes later; the stream's tokens are the chain's."""
        started_s = time.monotonic()
        for call in (self._streamed, *self._calls):
            with pytest.raises(EngineDeadError, match=error):
                call.result(within_s)
        assert time.monotonic() - started_s < within_s
        self._pool.shutdown()
        right = planted.expected_counts(CHAIN, 5, 500, draft_tokens=5).tokens
        assert self._tokens == right[: len(self._tokens)]
        with pytest.raises(EngineDeadError, match=error):
            self._engine.generate([1])
        with pytest.raises(EngineDeadError, match=error):
            next(self._engine.stream([1]))


@contextmanager
def mortal_engine(model: Path, **changes: object) -> Iterator[tuple[Calls, int, list[int]]]:
    """Calls under way on an engine, the pid of its driver, and those of its ranks.

    The block kills or stops one of them. At its end the ranks must be gone, and once the engine is
    closed the driver, the placement group and the files.
    """
    held = held_cpus(placement_group_table())
    with start(model, **changes) as engine:
        driver, ranks = engine.stats()["driver"]["pid"], rank_pids(engine)
        of_ranks, of_all = Footprint.of(*ranks), Footprint.of(driver, *ranks)
        assert len(of_all.pids) >= 3
        assert any(path.parent == Path("/dev/shm") for path in of_ranks.files)
        yield Calls(engine), driver, ranks
        of_ranks.wait_until_gone()
    of_all.wait_until_gone()
    assert held_cpus(placement_group_table()) == held
    wait_until_free("CPU", ray.cluster_resources()["CPU"] - held)


def test_a_killed_driver_ends_every_call_and_its_ranks(
    cluster: RunningCluster, planted_tiny: Path
) -> None:
    with mortal_engine(planted_tiny) as (calls, driver, _):
        os.kill(driver, signal.SIGKILL)
        calls.assert_all_end("the driver process died", within_s=10)


def test_a_killed_rank_ends_every_call_with_its_name(
    cluster: RunningCluster, planted_tiny: Path
) -> None:
    with mortal_engine(planted_tiny, max_losses=0) as (calls, _, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        calls.assert_all_end(rf"rank 1 \(pid {ranks[1]}\) died", within_s=5)


def test_the_watchdog_ends_every_call_when_a_rank_is_stopped(
    cluster: RunningCluster, planted_tiny: Path
) -> None:
    limits_s = {"prefill_s": 3.0, "decode_s": 3.0}
    with mortal_engine(planted_tiny, **limits_s, max_losses=0) as (calls, _, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        says = r"no step for 3 s with 5 requests running \(recovery.\w+_s\); they were killed"
        calls.assert_all_end(says, within_s=15)
