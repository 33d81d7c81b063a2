"""What can be known before Ray is asked: which cluster to join, and what stands in the way.

    spec, environment -> running_address -> obstacle: why joining would fail, or None
    environment -> temp_problem: why a private cluster could not start, or None
Ray itself waits minutes for a wrong address, half a minute on a full disk, and says nothing of a
missing token. Needs no Ray: `outrider doctor` looks the same way. Remembers nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from outrider.actors.cluster.spec import Spec

CONNECT_TIMEOUT_S = 5.0
HTTP2_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The header of a settings frame of length 0: 3 bytes of length, type 4, flags, stream."""
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
TEMP_BYTES = 64 << 20
"""Free space that a private cluster needs for its sockets and logs."""
MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix socket, on Linux."""
SOCKET_OF_SESSION = "/session_2026-11-30_12-34-56_123456_{pid}/sockets/plasma_store"
"""Longest path of a socket in Ray's folder; a session has time and process in its name."""
AUTH_PAGE = "see README.md, On a running Ray cluster"


def running_address(spec: Spec, environ: Mapping[str, str]) -> str | None:
    """Address of the cluster to join; None: a private one is to be started.

    Ray sets RAY_ADDRESS in a job, so that its processes join the cluster which runs it.
    """
    address = spec.ray.address or environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def obstacle(address: str, environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Why this process could not join the cluster at `address`, or None where nothing is known.

    root: where /proc and /tmp lie.
    """
    place = address.removeprefix("ray://")
    if place == "auto":
        place = _current_cluster(environ, root)
        if place is None:
            return "no cluster was started on this machine: `ray start --head` starts one"
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        return 'must be HOST:PORT, "auto" or "local"'
    try:
        is_grpc = _answers_grpc((host.strip("[]"), int(port)), environ)
    except (OSError, OverflowError) as problem:
        return f"nothing answers at {place} ({problem}); `ray start --head` prints the address"
    if not is_grpc:
        return (
            f"what answers at {place} is no head of a Ray cluster (its dashboard, 8265, is "
            "another); `ray start --head` prints the address"
        )
    return _locked_out(_auth_mode(port, root), environ, root)


def _answers_grpc(place: tuple[str, int], environ: Mapping[str, str]) -> bool:
    """Whether a server answers there as gRPC does, which a head speaks; OSError if nothing listens.

    gRPC runs over HTTP/2 (RFC 9113, section 3.4): each side begins with its settings. With Ray's
    TLS the settings cannot be read, and any server is believed.
    """
    with socket.create_connection(place, CONNECT_TIMEOUT_S) as connection:
        if environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True
        try:
            connection.sendall(HTTP2_START)
            frame = connection.recv(len(HTTP2_SETTINGS))
        except OSError:  # it is silent, or ends the connection
            return False
    return frame[3:4] == HTTP2_SETTINGS[3:4]


def _current_cluster(environ: Mapping[str, str], root: Path) -> str | None:
    """The address that `ray start --head` left behind on this machine."""
    try:
        return (_temp_folder(environ, root) / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _temp_folder(environ: Mapping[str, str], root: Path) -> Path:
    """Where Ray keeps its files."""
    return root / (environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "tmp") / "ray"


def temp_problem(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Why Ray could not keep the files of a private cluster, or None."""
    folder = _temp_folder(environ, root)
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    change = "set RAY_TMPDIR to another folder, with a short path"
    if not os.path.isdir(there):
        return f"Ray cannot keep its files in {folder}, because {there} is no folder: {change}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"Ray cannot write its files to {folder}: {change}"
    name = os.fsencode(folder.relative_to(root))
    most = MAX_SOCKET_PATH_BYTES - len(SOCKET_OF_SESSION.format(pid=os.getpid())) - len("/")
    if len(name) > most:
        return (
            f"Ray keeps its sockets below {folder}, a path of {len(name) + 1} bytes where at most "
            f"{most + 1} leave room for their names: {change}"
        )
    free = shutil.disk_usage(there).free
    if free < TEMP_BYTES:
        return (
            f"Ray keeps its files in {folder}, which has {free >> 20} MiB free and needs "
            f"{TEMP_BYTES >> 20} MiB: free some, or {change}"
        )
    return None


def _auth_mode(port: str, root: Path) -> str | None:
    """RAY_AUTH_MODE of the cluster whose head runs on this machine; None: it does not."""
    for command in root.glob("proc/[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
            if words[0].endswith(b"gcs_server") and f"--gcs_server_port={port}".encode() in words:
                lines = command.with_name("environ").read_bytes().split(b"\0")
                modes = [line for line in lines if line.startswith(b"RAY_AUTH_MODE=")]
                return modes[0].partition(b"=")[2].decode().lower() if modes else "disabled"
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return None


def _locked_out(theirs: str | None, environ: Mapping[str, str], root: Path) -> str | None:
    """Why a cluster with this RAY_AUTH_MODE refuses a process with this environment, or None."""
    mine = environ.get("RAY_AUTH_MODE", "disabled").lower()
    if theirs is not None and theirs != mine:
        here = "is not set" if "RAY_AUTH_MODE" not in environ else f"is {mine}"
        return (
            f"that cluster runs with RAY_AUTH_MODE={theirs}, and here it {here}: "
            f"export RAY_AUTH_MODE={theirs} ({AUTH_PAGE})"
        )
    if mine == "token" and not _has_token(environ, root):
        return (
            "RAY_AUTH_MODE=token, and there is no token: put the cluster's into ~/.ray/auth_token "
            f"or name its file in RAY_AUTH_TOKEN_PATH ({AUTH_PAGE})"
        )
    return None


def _has_token(environ: Mapping[str, str], root: Path) -> bool:
    """Whether Ray finds a token: in a variable, in the file that one names, or in the home."""
    if environ.get("RAY_AUTH_TOKEN"):
        return True
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    home = environ.get("HOME", "/").lstrip("/")
    return Path(named).is_file() if named else (root / home / ".ray" / "auth_token").is_file()
