"""What is known before Ray is asked: the address, who answers there, tokens, room for its files."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.utils import validate_socket_filepath

from outrider.actors.cluster import address, placement
from outrider.actors.cluster.address import obstacle, running_address, temp_problem
from outrider.actors.cluster.reader import load_spec
from outrider.actors.errors import EngineDeadError
from outrider.model.config import ConfigError
from tests.actors.cluster.listeners import GRPC, WEB, listening

FREE_PORT = "127.0.0.1:9"


@pytest.fixture
def head() -> Iterator[str]:
    """Something that answers, as the head of a cluster does."""
    with listening(GRPC) as place:
        yield place


def started(root: Path, head: str, environ: str) -> None:
    """What /proc of a made-up machine says of the process that listens at `head`."""
    process = root / "proc" / "77"
    process.mkdir(parents=True)
    port = head.rpartition(":")[2]
    (process / "cmdline").write_text(f"/x/gcs_server\0--log_dir=/x\0--gcs_server_port={port}\0")
    (process / "environ").write_text(environ)


def test_a_cluster_is_joined_where_one_is_named() -> None:
    spec = load_spec(None, {"model": "m"})
    assert running_address(spec, {}) is None
    assert running_address(spec, {"RAY_ADDRESS": "local"}) is None
    assert running_address(spec, {"RAY_ADDRESS": "h:1"}) == "h:1"
    named = load_spec(None, {"model": "m", "ray.address": "auto"})
    assert running_address(named, {"RAY_ADDRESS": "h:1"}) == "auto"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (FREE_PORT, r"nothing answers at 127\.0\.0\.1:9 .*refused.*ray start --head"),
        ("no.such.host.invalid:6379", "nothing answers at no.such.host.invalid:6379"),
        ("127.0.0.1:99999", "nothing answers"),
        ("127.0.0.1", "must be HOST:PORT"),
        ("auto", "no cluster was started on this machine"),
    ],
)
def test_a_wrong_address_is_known_at_once(tmp_path: Path, given: str, says: str) -> None:
    found = obstacle(given, {}, tmp_path)
    assert found is not None
    assert re.search(says, found), found


@pytest.mark.parametrize(("answer", "tls", "is_head"), [
    (GRPC, "0", True), (WEB, "0", False), (b"", "0", False), (WEB, "1", True)
])  # fmt: skip
def test_a_server_that_is_no_head_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes, tls: str, is_head: bool
) -> None:
    """Ray asks one for 200 s. With TLS nothing can be told from outside."""
    monkeypatch.setattr(address, "CONNECT_TIMEOUT_S", 0.3)
    with listening(answer) as place:
        found = obstacle(place, {"RAY_USE_TLS": tls}, tmp_path)
    if is_head:
        assert found is None
    else:
        assert (found or "").startswith(f"what answers at {place} is no head of a Ray cluster")


def test_auto_is_what_the_head_left_behind(tmp_path: Path, head: str) -> None:
    for folder in ("tmp/ray", "other/ray"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tmp/ray/ray_current_cluster").write_text(head + "\n")
    (tmp_path / "other/ray/ray_current_cluster").write_text(FREE_PORT)
    assert obstacle("auto", {}, tmp_path) is None
    assert "127.0.0.1:9" in (obstacle("auto", {"RAY_TMPDIR": "other"}, tmp_path) or "")


@pytest.mark.parametrize(
    ("theirs", "mine", "says"),
    [
        ("RAY_AUTH_MODE=token", {}, "RAY_AUTH_MODE=token, and here it is not set: export"),
        ("RAY_AUTH_MODE=token", {"RAY_AUTH_MODE": "disabled"}, "here it is disabled"),
        ("X=1", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}, "RAY_AUTH_MODE=disabled, and"),
        ("RAY_AUTH_MODE=token", {"RAY_AUTH_MODE": "token"}, "there is no token"),
        ("RAY_AUTH_MODE=token", {"RAY_AUTH_MODE": "TOKEN", "RAY_AUTH_TOKEN": "t"}, None),
        ("X=1", {}, None),
    ],
)
def test_a_cluster_of_this_machine_says_whether_it_wants_a_token(
    tmp_path: Path, head: str, theirs: str, mine: dict[str, str], says: str | None
) -> None:
    started(tmp_path, head, f"A=b\0{theirs}\0")
    found = obstacle(head, mine, tmp_path)
    assert found is None if says is None else says in (found or "")


def test_a_token_may_lie_in_the_home_or_in_a_named_file(tmp_path: Path, head: str) -> None:
    mine = {"RAY_AUTH_MODE": "token", "HOME": "/home/x"}
    assert "there is no token" in (obstacle(head, mine, tmp_path) or "")
    (tmp_path / "home/x/.ray").mkdir(parents=True)
    (tmp_path / "home/x/.ray/auth_token").write_text("t")
    assert obstacle(head, mine, tmp_path) is None
    named = {**mine, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "t")}
    assert "there is no token" in (obstacle(head, named, tmp_path) or "")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as Ray's sockets need."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_no_room_for_rays_files_is_known_before_it_starts(
    short: Path, monkeypatch: pytest.MonkeyPatch, no_cluster: None
) -> None:
    where = {"RAY_TMPDIR": str(short / "not" / "yet")}
    assert temp_problem(where) is None
    monkeypatch.setattr(address, "TEMP_BYTES", 1 << 62)
    assert "MiB free and needs" in (temp_problem(where) or "")
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    with pytest.raises(ConfigError, match=f"{short}/ray, which has .* RAY_TMPDIR to another"):
        placement.connect_ray(load_spec(None, {"model": "m"}))
    assert not ray.is_initialized()


def test_a_place_that_cannot_hold_rays_files_is_named(short: Path) -> None:
    file = short / "file"
    file.touch()
    found = temp_problem({"RAY_TMPDIR": str(file)})
    assert found is not None
    assert found.startswith(f"Ray cannot keep its files in {file}/ray, because {file} is no folder")


def test_a_folder_is_too_long_exactly_where_ray_refuses_it(short: Path) -> None:
    """Ray names its sockets after the session; the longest that Linux takes has 107 bytes."""
    session = f"session_2026-11-30_12-34-56_123456_{os.getpid()}"
    for extra in (0, 1):
        room = 107 + extra - len(f"{short}//ray/{session}/sockets/plasma_store")
        socket = short / ("x" * room) / "ray" / session / "sockets" / "plasma_store"
        found = temp_problem({"RAY_TMPDIR": str(short / ("x" * room))})
        if extra:
            with pytest.raises(OSError, match="path length cannot exceed"):
                validate_socket_filepath(str(socket))
            assert "bytes where at most" in (found or "")
        else:
            validate_socket_filepath(str(socket))
            assert found is None


def test_an_address_that_cannot_be_joined_is_blamed_on_where_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cluster: None
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: m\nray: {{address: '{FREE_PORT}'}}\n")
    with pytest.raises(ConfigError, match=rf"{file}: ray\.address = '{FREE_PORT}': nothing answer"):
        placement.connect_ray(load_spec(file))
    monkeypatch.setenv("RAY_ADDRESS", FREE_PORT)
    with pytest.raises(ConfigError, match=rf"environment: RAY_ADDRESS = '{FREE_PORT}': nothing"):
        placement.connect_ray(load_spec(None, {"model": "m"}))


def test_a_refusal_of_ray_itself_is_one_error_of_ours(
    head: str, monkeypatch: pytest.MonkeyPatch, no_cluster: None
) -> None:
    """A remote cluster's token cannot be seen from here; Ray's own answer is passed on."""

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    spec = load_spec(None, {"model": "m", "ray.address": head})
    with pytest.raises(ConfigError, match=r"Failed to connect.*RAY_AUTH_MODE is not set here"):
        placement.connect_ray(spec)
    with pytest.raises(EngineDeadError, match="Ray did not start: Failed"):
        placement.start_private(num_cpus=1, namespace="x", object_store_bytes=75 << 20)
