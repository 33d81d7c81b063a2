"""`outrider doctor`: each check in its good and its bad state, on a made-up machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors import cli
from outrider.actors.cluster import address, doctor
from outrider.actors.cluster.doctor import Check, examine, report
from outrider.actors.cluster.reader import load_spec
from outrider.parallel import affinity
from tests.actors.cluster.listeners import GRPC, listening

CUDA = {"device": "cuda"}
NPU = {"device": "npu", "tensor_parallel": 2}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Path:
    """Two cards, a driver, CANN, 16 CPUs."""
    root = tmp_path / "root"
    for name in ("davinci0", "davinci1", "davinci_manager", "nvidia0", "nvidiactl", "shm/x"):
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    driver = root / doctor.DRIVERS["npu"][0]
    driver.parent.mkdir(parents=True)
    driver.write_text("Version=25.2.0\n")
    (root / "cann" / "lib64").mkdir(parents=True)
    (root / "cann" / "lib64" / "libascendcl.so").touch()
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: frozenset(range(16)))
    monkeypatch.setattr(affinity, "npu_topology", lambda: "NPU0  X  HCCS  0-7\nNPU1  HCCS  X  8-15")
    versions = {"torch_npu": "2.13.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    return root


def checks(machine: Path, repo: Path, environ: dict[str, str] | None = None, **keys: object):
    spec = load_spec(None, {"model": repo / "examples" / "tiny", **NPU, **keys})
    environ = {"ASCEND_HOME_PATH": str(machine / "cann"), **(environ or {})}
    found = examine(spec, environ, machine)
    assert len({check.id for check in found}) == len(found)
    return {check.id: check for check in found}


def test_a_machine_that_has_everything_is_runnable(machine: Path, repo: Path) -> None:
    found = checks(machine, repo)
    assert [c for c in found.values() if c.state != "ok"] == []
    assert found["device.count"].found == "2 in /dev"
    assert found["cpus.ranks"].found == "ranks 0-7 | 8-15; driver not pinned"
    assert found["cpus.near"].found == "NPU0: 0-7, NPU1: 8-15"
    assert found["env.HCCL_OP_EXPANSION_MODE"].found == "AIV (ours)"
    assert found["checkpoint.files"].found == "1 files, headers and lengths agree"
    text, code = report(list(found.values()), as_json=False)
    assert code == 0
    assert text.endswith(f"0 of {len(found)} checks block a run")


@pytest.mark.parametrize(
    ("environ", "keys", "id", "state", "says"),
    [
        ({}, {"tensor_parallel": 4}, "device.count", "error", "4 are needed"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, {}, "device.visible", "error", "rising"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0"}, {}, "device.visible", "error", "at least 2"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "4,11"}, {}, "device.visible", "ok", ""),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, CUDA, "device.visible", "error", "it shows 1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, CUDA, "device.visible", "ok", ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, CUDA, "device.visible", "error", "it shows 0"),
        ({"ASCEND_HOME_PATH": "/nowhere"}, {}, "cann", "error", "set_env.sh"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, {}, "cann.launch_blocking", "error", "unset it"),
        ({}, {"rank_cpus": ["0-3", "90"]}, "cpus.ranks", "error", "CPUs of this machine"),
        ({}, {"rank_cpus": ["0-3", "4-99"]}, "cpus.ranks", "warning", "CPUs 16-99"),
        ({}, {"rank_cpus": ["0-3", "4-9"]}, "cpus.count", "warning", "5 or more"),
        ({"TASK_QUEUE_ENABLE": "2"}, {}, "env.TASK_QUEUE_ENABLE", "ok", ""),
        ({"RAY_worker_niceness": "15"}, {}, "ray.niceness", "warning", "RAY_worker_niceness=0"),
        ({}, {"object_store_bytes": 1 << 60}, "memory.shm", "warning", "--shm-size"),
        ({}, {"model": "/nowhere/x"}, "checkpoint", "error", "folder"),
        ({}, {"model": __file__}, "checkpoint", "error", "folder"),
        ({}, {"model": "Qwen/Qwen3.5-2B"}, "checkpoint", "warning", "downloaded"),
        ({}, {"tensor_parallel": 3}, "checkpoint.config", "error", "named"),
        ({}, {"device": "cuda"}, "device.driver", "error", "NVIDIA"),
    ],
)
def test_each_lack_has_its_state_and_advice(
    machine: Path, repo: Path, environ, keys, id: str, state: str, says: str
) -> None:
    check = checks(machine, repo, environ, **keys)[id]
    assert (check.state, says in check.advice) == (state, True), check


def test_a_cluster_that_cannot_be_joined_blocks(machine: Path, repo: Path) -> None:
    """A token that it wants, as it does after any ray.init() of the same user, and a wrong port."""
    with listening(GRPC) as place:
        port = place.rpartition(":")[2]
        process = machine / "proc" / "77"
        process.mkdir(parents=True)
        (process / "cmdline").write_text(f"/x/gcs_server\0--gcs_server_port={port}\0")
        (process / "environ").write_text("RAY_AUTH_MODE=token\0")
        there = {"ray.address": place}
        check = checks(machine, repo, **there)["ray.address"]
        assert check.state == "error"
        assert "export RAY_AUTH_MODE=token" in check.found
        mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}
        assert checks(machine, repo, mine, **there)["ray.address"].state == "ok"
    check = checks(machine, repo, mine, **there)["ray.address"]
    assert check.state == "error"
    assert "nothing answers" in check.found


def test_a_full_disk_for_rays_files_blocks(machine: Path, repo: Path, monkeypatch) -> None:
    assert checks(machine, repo)["ray.files"].state == "ok"
    monkeypatch.setattr(address, "TEMP_BYTES", 1 << 62)
    check = checks(machine, repo)["ray.files"]
    assert check.state == "error"
    assert "MiB free" in check.found


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        ({"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}, "ok"),
        ({"torch": "2.12.1", "torch_npu": "2.13.0"}, "error"),
        ({"torch": "2.13.0"}, "error"),
    ],
)
def test_torch_and_torch_npu_must_pair(machine: Path, repo: Path, monkeypatch, versions, state):
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert checks(machine, repo)["package.torch_npu"].state == state


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-5], "its header says"),
        (lambda data: b"\xff" * 8 + data[8:], "no header"),
        (lambda data: data[:8] + b"x" + data[9:], "not JSON"),
        (lambda data: b"", "no header"),
    ],
)
def test_a_damaged_file_is_found_by_its_header(
    tmp_path: Path, machine: Path, repo: Path, change, says: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny = repo / "examples" / "tiny"
    (model / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (model / "model.safetensors").write_bytes(change((tiny / "model.safetensors").read_bytes()))
    check = checks(machine, repo, model=model)["checkpoint.files"]
    assert check.state == "error"
    assert says in check.found


def test_an_error_exits_with_1_and_json_says_which(capsys, repo: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "outrider.actors.cluster.doctor.examine", lambda spec: [Check("cann", "error", "none", "x")]
    )
    assert cli.main(["doctor", "--model", str(repo / "examples" / "tiny"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "runnable": False,
        "checks": [{"id": "cann", "state": "error", "found": "none", "advice": "x"}],
    }
    assert cli.main(["doctor", "--set", "device=gpu"]) == 2


def test_it_needs_neither_torch_nor_ray_and_writes_nothing(repo: Path) -> None:
    code = (
        "import sys; from actors import cli; code = cli.main(['doctor', '--json']);"
        "print(code, sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    before = sorted(repo.glob("*"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, timeout=60
    )
    result, last = done.stdout.splitlines()
    assert last == "0 []", done.stderr
    assert json.loads(result)["runnable"] is True
    assert sorted(repo.glob("*")) == before
