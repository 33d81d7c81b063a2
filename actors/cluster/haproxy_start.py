"""The program that Ray starts as HAProxy: it adds what Ray's configuration lacks, and becomes it.

    SETTINGS BINARY ARGUMENTS...  ->  the file behind -f is edited  ->  BINARY -dS ARGUMENTS...
haproxy.py makes the script that calls this, and writes SETTINGS. Of the standard library alone, so
that a start takes no time. A line of Ray's that is not found any more ends the start with its name.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INSTANCE_HEADER = "x-outrider-instance"
"""Tells a replica that a request came through the HAProxy of its own server."""
WITHOUT_SPLICE = "-dS"
"""Ray turns splicing on: the kernel passes bodies on. With it HAProxy 2.8 does not see that a
client leaves once a body came later than its headers, and the request goes on for nobody."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that this process gets when its parent ends."""


def edited(text: str, settings: Mapping[str, Any]) -> str:
    """Ray's configuration with our limits. SystemExit where it is not what we know.

    settings: error_file (raw HTTP answer), instance, request_timeout_s, connections (most of a
    client, 0: any number), tls (file of certificate and key, "": none).
    """
    rules = _rules(settings)
    lines, section, used = [], "", set()
    for line in text.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        for name, (where, start, change) in rules.items():
            if section == where and line.strip().startswith(start):
                line = change(line)
                used.add(name)
        lines.append(line)
    if missing := rules.keys() - used:
        raise SystemExit(f"Ray's configuration of HAProxy has changed: no {sorted(missing)}")
    return "\n".join(lines) + "\n"


def _rules(
    settings: Mapping[str, Any],
) -> dict[str, tuple[str, str, Callable[[str], str]]]:
    """What is changed -> its section, how its line begins, and the line that comes instead."""
    frontend = []
    if most := settings["connections"]:
        frontend += [
            "stick-table type ipv6 size 100k expire 10m store conn_cur",
            "tcp-request connection track-sc0 src",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {most} }}",
        ]
    frontend.append(f"http-request set-header {INSTANCE_HEADER} {settings['instance']}")
    tls = settings["tls"]
    secure = f" ssl crt {tls} ssl-min-ver TLSv1.2 alpn http/1.1" if tls else ""
    timeout = f"    timeout http-request {settings['request_timeout_s']}s"
    error = f"    errorfile {{}} {settings['error_file']}"
    return {
        "admin socket": ("global", "stats socket", lambda line: line.replace(" 666 ", " 600 ")),
        "system log": ("global", "log ", lambda _: ""),
        "time of headers": ("defaults", "mode http", lambda line: f"{line}\n{timeout}"),
        **{
            f"error {status}": (
                "defaults", f"errorfile {status}", lambda _, status=status: error.format(status)
            )
            for status in (502, 503, 504)
        },
        "metrics": ("frontend prometheus", "bind :", _on_loopback),
        "statistics": ("listen stats", "bind *:", _on_loopback),
        "listener": (
            "frontend http_frontend", "bind ",
            lambda line: "\n    ".join([line + secure, *frontend]),
        ),
        "no application": (
            "backend default_backend", "http-request return status 404",
            lambda _: "    http-request return status 503 default-errorfiles",
        ),
    }  # fmt: skip


def _on_loopback(line: str) -> str:
    return line.replace("bind :", "bind 127.0.0.1:").replace("bind *:", "bind 127.0.0.1:")


def main(arguments: list[str]) -> None:
    """Become HAProxy. It ends with the process that starts it, and SIGTERM does not end it.

    SIGTERM may come to all processes of a server at once: then requests under way are to finish.
    Ray ends HAProxy by SIGUSR1 and SIGKILL.
    """
    settings, binary, *given = arguments
    path = Path(given[given.index("-f") + 1])
    path.write_text(edited(path.read_text("utf-8"), json.loads(Path(settings).read_text("utf-8"))))
    path.chmod(0o600)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, WITHOUT_SPLICE, *given])


if __name__ == "__main__":
    main(sys.argv[1:])
