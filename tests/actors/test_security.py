"""`outrider serve` and its neighbours: where it listens, and who gets its clients' requests.

docs/security.md says what is promised. Those that take long run with --slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.actors.footprint import Footprint
from tests.actors.served import free_port
from tests.actors.test_lifecycle import serve_command

pytestmark = pytest.mark.ray

FIXED_PORTS = {8265, 8404, 8500, 9000, 9101, 9500, 10001, 44217, 44227, 52365}
"""What Ray and Serve would have in every cluster."""


def listening(processes: list[psutil.Process]) -> list[tuple[str, str, int]]:
    """Name, address and port of whatever takes TCP connections or datagrams of anybody."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (one.type == 2 and not one.raddr):
                    address = one.laddr.ip.removeprefix("::ffff:")
                    found.append((process.name(), address, one.laddr.port))
    return found


def test_a_server_listens_on_loopback_alone_at_ports_of_its_own(repo: Path) -> None:
    """Whatever else it listens at, whoever it is: Ray's servers, replicas, ranks, HAProxy."""
    port = free_port()
    with serve_command(repo, port) as process:
        footprint = Footprint.of(process.pid)
        found = listening(footprint.processes)
        names = {name for name, _, _ in found}
        assert {"raylet", "gcs_server", "haproxy", "ray::RankActor.run"} <= names, names
        beyond = [one for one in found if one[1] != "127.0.0.1"]
        assert beyond == []
        assert ("haproxy", "127.0.0.1", port) in found
        assert not FIXED_PORTS & {number for _, _, number in found}
        assert_private_files(footprint)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        footprint.wait_until_gone()


def assert_private_files(footprint: Footprint) -> None:
    """No other user reaches a socket or shared memory: of a path to it, one part is closed."""
    there = {path for path in footprint.files if path.exists() and not path.is_dir()}
    for path in there:  # shared memory is unlinked once all ranks have it
        modes = {part: stat.S_IMODE(part.stat().st_mode) for part in (path, *path.parents)}
        assert any(mode & 0o077 == 0 for mode in modes.values()), modes
    assert any("session_" in str(path) for path in there)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clients_never_reach_the_model_of_another_server(repo: Path) -> None:
    """While B's replica is killed and comes back, B's clients get B's answers or errors."""
    ports = free_port(), free_port()
    with serve_command(repo, ports[0]) as a, serve_command(repo, ports[1]) as b:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        replicas = [httpx.get(url + "/health").json()["driver"]["pid"] for url in urls]
        assert Footprint.of(a.pid).pids >= {replicas[0]}
        os.kill(replicas[1], signal.SIGKILL)
        answers, statuses = Counter[int](), Counter[int]()
        deadline_s = time.monotonic() + 90
        while time.monotonic() < deadline_s and not set(answers) - set(replicas):
            got = httpx.get(urls[1] + "/health", timeout=30)
            statuses[got.status_code] += 1
            if got.status_code == 200:
                answers[got.json()["driver"]["pid"]] += 1
            time.sleep(0.1)
        assert replicas[0] not in answers, (answers, statuses)
        assert len(set(answers) - set(replicas)) == 1, (answers, statuses)
        assert 404 not in statuses
        for process in (a, b):
            process.send_signal(signal.SIGINT)
        assert (a.wait(60), b.wait(60)) == (0, 0)


@pytest.mark.slow
def test_sigterm_to_all_processes_drains(repo: Path) -> None:
    """As systemd and shells send it. The stream goes on to its end, and nothing is left."""
    port = free_port()
    body = {"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with serve_command(repo, port) as process:
        footprint = Footprint.of(process.pid)
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            for one in footprint.processes:
                one.send_signal(signal.SIGTERM)
            *events, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert process.wait(60) == 0
        footprint.wait_until_gone()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_outlives_a_server_that_is_killed(repo: Path) -> None:
    """HAProxy did, and kept the port, so that the next start failed."""
    port = free_port()
    with serve_command(repo, port) as process:
        footprint = Footprint.of(process.pid)
        agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
        names = {one: one.name() for one in footprint.processes}  # while all of them live
        others = [one for one, name in names.items() if name not in agents]
        assert "haproxy" in names.values()
        process.kill()
        process.wait()
        Footprint(others, frozenset()).wait_until_gone()
        # Ray's agents look for GCS for a minute before they end. Nobody is left to remove files.
        Footprint(footprint.processes, frozenset()).wait_until_gone(timeout_s=90)
    with serve_command(repo, port) as process:
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["raylet", "ray::DashboardAgent", "gcs_server"])
def test_a_server_that_loses_a_part_of_ray_says_so_and_ends(repo: Path, name: str) -> None:
    """Within 30 s, and without a process of it. Where replicas are left, streams end with an error
    event."""
    port = free_port()
    body = {"prompt": "a", "max_tokens": 3500, "stream": True, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with serve_command(repo, port) as process:
        footprint = Footprint.of(process.pid)
        (lost,) = [one for one in footprint.processes if one.name() == name]
        lines: list[str] = []
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=60) as stream,
        ):
            for line in stream.iter_lines():
                if not lines:
                    lost.kill()
                lines.append(line)
        _, err = process.communicate(timeout=30)
        part = "gcs_server" if name == "gcs_server" else "raylet"
        assert process.returncode == 1
        assert f"EngineDeadError: Ray's {part} (pid " in err
        assert "Traceback" not in err
        footprint.wait_until_gone()
        if name == "gcs_server":
            *_, error, done = [line for line in lines if line]
            assert '"code":"draining"' in error
            assert done == "data: [DONE]"


@pytest.mark.slow
def test_an_haproxy_that_is_killed_is_back_within_seconds_and_never_says_404(repo: Path) -> None:
    port = free_port()
    with serve_command(repo, port) as process:
        family = Footprint.of(process.pid).processes
        next(one for one in family if one.name() == "haproxy").kill()
        killed_s, seen = time.monotonic(), []
        while not seen or seen[-1] != 200:
            assert time.monotonic() - killed_s < 8, seen  # 4 s where nothing else runs
            with contextlib.suppress(httpx.TransportError):
                seen.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code)
            time.sleep(0.05)
        assert set(seen) <= {503, 200}
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
