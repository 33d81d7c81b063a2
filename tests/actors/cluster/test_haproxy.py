"""HAProxy as Ray starts it, with what haproxy_start.py adds to Ray's configuration; no Ray runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from outrider.actors.cluster import haproxy_start
from outrider.actors.cluster.haproxy import prefer_haproxy
from outrider.actors.cluster.reader import load_spec
from outrider.actors.cluster.spec import Spec
from outrider.model.config import ConfigError
from tests.actors.served import free_port

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"


def spec(**serve: object) -> Spec:
    return load_spec(
        None, {"model": "x", **{f"serve.{key}": value for key, value in serve.items()}}
    )


@pytest.fixture
def serve_environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "RAY_SERVE" not in name}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def test_an_haproxy_that_is_not_there_is_an_error(serve_environ: dict[str, str]) -> None:
    serve_environ[BINARY] = "/nowhere"
    with pytest.raises(ConfigError, match=f"{BINARY}='/nowhere'"):
        prefer_haproxy(spec())


def test_haproxy_is_left_out_where_its_start_script_cannot_run(
    serve_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """As where /tmp is mounted noexec."""
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, how: "/or-" not in str(path) and access(path, how)
    )
    assert prefer_haproxy(spec()) is None
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in serve_environ
    assert "noexec" in caplog.text
    assert prefer_haproxy(spec(haproxy=False)) is None


def test_tls_wants_a_certificate_with_its_key_and_haproxy(
    serve_environ: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match=r"serve\.tls = .*cert\.pem.*private key"):
        prefer_haproxy(spec(tls=str(file)))
    write_certificate(file)
    with pytest.raises(ConfigError, match=r"serve\.tls = .*needs HAProxy"):
        prefer_haproxy(spec(tls=str(file), haproxy=False))


def test_a_configuration_of_ray_that_is_not_known_ends_the_start() -> None:
    settings = {"error_file": "e", "instance": "i", "request_timeout_s": 1, "connections": 0}
    with pytest.raises(SystemExit, match=r"has changed: no .*'admin socket'"):
        haproxy_start.edited("global\n    maxconn 3\n", settings | {"tls": ""})


def write_certificate(file: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    key = file.with_suffix(".key")
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(file)], check=True, capture_output=True
    )
    file.write_text(file.read_text() + key.read_text())
    key.unlink()


class Echo(BaseHTTPRequestHandler):
    """Answers with the headers that have come."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({key.lower(): value for key, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


START = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
process.wait()
"""


class Front:
    """HAProxy with Ray's configuration and ours, started by a process that may be killed."""

    def __init__(self, port: int, url: str, instance: str, starter: subprocess.Popen[str]) -> None:
        self.port, self.url, self.instance, self.starter = port, url, instance, starter
        assert starter.stdout is not None
        self.process = psutil.Process(int(starter.stdout.readline()))


@contextmanager
def front(
    environ: dict[str, str], folder: Path, *, with_replica: bool = True, **serve: object
) -> Iterator[Front]:
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

    instance = prefer_haproxy(spec(**serve))
    assert instance is not None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, file = free_port(), folder / "haproxy.cfg"
    replica = haproxy.ServerConfig("one", "127.0.0.1", server.server_port)
    config = haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=str(folder / "admin.sock"),
        metrics_socket_path=str(folder / "metrics.sock"),
        server_state_file=str(folder / "state"),
        stats_port=free_port(),
        metrics_port=free_port(),
        enable_hap_optimization=False,
        http_health_check_path=None,
    )
    backends = {
        "app": haproxy.BackendConfig("app", "/", servers=[replica], app_name="app")
    } if with_replica else {}  # fmt: skip
    api = haproxy.HAProxyApi(config, backends, str(file))
    api._generate_config_file_internal()
    command = [sys.executable, "-c", START, environ[BINARY], "-db", "-f", str(file)]
    scheme = "https" if serve.get("tls") else "http"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        running = Front(port, f"{scheme}://127.0.0.1:{port}", instance, starter)
        try:
            wait_for(lambda: _listens(port))
            yield running
        finally:
            if _lives(running.process):
                running.process.kill()
            server.shutdown()
            server.server_close()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_it_listens_on_loopback_alone_and_names_the_server(
    serve_environ: dict[str, str], tmp_path: Path
) -> None:
    with front(serve_environ, tmp_path) as running:
        sockets = [one for one in running.process.net_connections("inet") if one.laddr]
        assert {one.laddr.ip for one in sockets} == {"127.0.0.1"}
        # Its checks of the server's health are connections too.
        assert [one.status for one in sockets].count(psutil.CONN_LISTEN) == 3
        header = haproxy_start.INSTANCE_HEADER
        got = httpx.get(running.url, headers={header: "forged"}).json()
        assert got[header] == running.instance
        assert "-dS" in running.process.cmdline()
        assert (tmp_path / "admin.sock").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "haproxy.cfg").stat().st_mode & 0o777 == 0o600


def test_unfinished_headers_silence_nobody(serve_environ: dict[str, str], tmp_path: Path) -> None:
    """Of 100 sockets of one client 20 are let in, and those are closed after a second."""
    with (
        front(serve_environ, tmp_path, request_timeout_s=1, client_connections=20) as running,
        ExitStack() as sockets,
    ):
        stalled: list[socket.socket] = []
        answers: list[bytes] = []
        for _ in range(100):
            try:
                one = socket.create_connection(("127.0.0.1", running.port), timeout=10)
            except ConnectionError:  # turned away while it connects
                answers.append(b"")
                continue
            stalled.append(sockets.enter_context(one))
        for one in stalled:
            with suppress(ConnectionError):
                one.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: ")
        started_s = time.monotonic()
        for one in stalled:
            try:
                answers.append(one.recv(100)[:12])
            except ConnectionError:
                answers.append(b"")
        assert time.monotonic() - started_s < 5
        assert 0 < answers.count(b"HTTP/1.1 408") <= 20
        assert answers.count(b"") >= 80
        assert httpx.get(running.url).status_code == 200


def test_without_a_replica_it_is_503_in_the_form_of_the_api(
    serve_environ: dict[str, str], tmp_path: Path
) -> None:
    """Ray's own answers are 404 where it knows of no application yet, and 500 in plain text."""
    with front(serve_environ, tmp_path, with_replica=False) as running:
        got = httpx.post(running.url + "/v1/completions", json={})
        assert (got.status_code, got.headers["retry-after"]) == (503, "1")
        assert got.json()["error"]["code"] == "unavailable"


def test_tls_is_spoken_where_there_is_a_certificate(
    serve_environ: dict[str, str], tmp_path: Path
) -> None:
    certificate = tmp_path / "cert.pem"
    write_certificate(certificate)
    with front(serve_environ, tmp_path, tls=str(certificate)) as running:
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(running.url, verify=trusting).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.url.replace("https", "http"))
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.url, verify=old)


def test_it_outlives_sigterm_and_not_its_parent(
    serve_environ: dict[str, str], tmp_path: Path
) -> None:
    with front(serve_environ, tmp_path) as running:
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        wait_for(lambda: httpx.get(running.url).status_code == 200)
        running.starter.kill()
        wait_for(lambda: not _lives(running.process))
        assert not _listens(running.port)
