"""`outrider doctor`: checks that this machine can run an engine, before anything is started.

    Spec --> [Check(id, state, found, advice)] --> lines or JSON --> exit code 1 if one is an error

It changes nothing and is quick: it imports neither torch nor Ray and loads no weights. Versions
come from package metadata, devices from /dev, tensors from file headers. It looks at this machine,
so run it where the ranks will run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from outrider.actors.cluster.address import obstacle, running_address, temp_problem
from outrider.actors.cluster.kinds import RANK_ENV, VISIBLE, free_host_bytes, visible_devices
from outrider.actors.cluster.spec import Spec
from outrider.model.config import ConfigError, load_config
from outrider.model.folder import local_folder
from outrider.parallel import affinity

State = Literal["ok", "warning", "error"]
PACKAGES = (
    "torch",
    "ray",
    "pyzmq",
    "msgspec",
    "safetensors",
    "tokenizers",
    "transformers",
    "llguidance",
)
NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
DRIVERS = {
    "cuda": ("proc/driver/nvidia/version", "install NVIDIA's driver"),
    "npu": ("usr/local/Ascend/driver/version.info", "install the Ascend driver and firmware"),
}
NPU_CPUS = 5
"""CPUs that a card needs: with fewer, its runtime's threads and interrupts have none."""
COLLECTIVE_SHM_BYTES = 8 << 20
"""What each CPU rank takes of /dev/shm: twice parallel.group.SHM_BUFFER_BYTES."""


@dataclass(frozen=True)
class Check:
    """One finding. The ids do not change between versions: scripts may rely on them."""

    id: str
    state: State
    found: str
    advice: str = ""


def examine(
    spec: Spec, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[Check]:
    """All checks, in the order in which a run would meet them.

    root: the folder under which dev, proc and usr lie; tests give a made-up one.
    """
    parts: Sequence[Callable[[], Iterator[Check]]] = (
        lambda: _packages(spec),
        lambda: _devices(spec, environ, root),
        lambda: _cann(spec, environ),
        lambda: _cpus(spec),
        lambda: _memory(spec, root),
        lambda: _ray(spec, environ, root),
        lambda: _rank_environment(spec, environ),
        lambda: _checkpoint(spec),
    )
    return [check for part in parts for check in part()]


def report(checks: Sequence[Check], *, as_json: bool) -> tuple[str, int]:
    """The text for stdout, and the exit code: 1 where a check blocks a run, else 0."""
    code = int(any(check.state == "error" for check in checks))
    if as_json:
        return json.dumps({"runnable": not code, "checks": [asdict(c) for c in checks]}), code
    width = max(len(check.id) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:8}{check.id:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':{width + 10}}-> {check.advice}")
    errors = sum(check.state == "error" for check in checks)
    return "\n".join([*lines, f"{errors} of {len(checks)} checks block a run"]), code


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages(spec: Spec) -> Iterator[Check]:
    yield Check("python", "ok", sys.version.split()[0])
    for name in PACKAGES:
        found = _version(name)
        state: State = "ok" if found else "error"
        yield Check(
            f"package.{name}", state, found or "missing", "" if found else "pip install -e ."
        )
    if spec.device == "npu":
        own, torch = _version("torch_npu"), _version("torch") or "none"
        pair = own is not None and own.split(".")[:2] == torch.split(".")[:2]
        advice = "" if pair else "pip install 'torch==2.13.0' 'torch_npu==2.13.0' (docs/npu.md)"
        found = f"{own or 'missing'}, torch {torch}"
        yield Check("package.torch_npu", "ok" if pair else "error", found, advice)
    if spec.device == "cuda":
        found = _version("triton")
        advice = "" if found else "pip install -e '.[cuda]'"
        yield Check("package.triton", "ok" if found else "error", found or "missing", advice)


def _devices(spec: Spec, environ: Mapping[str, str], root: Path) -> Iterator[Check]:
    if spec.device not in NODES:
        return
    kind, size = spec.device, spec.parallel.tensor_parallel
    nodes = sorted(p.name for p in root.glob(f"dev/{NODES[kind]}"))
    enough = len(nodes) >= size
    advice = "" if enough else (
        f"{size} are needed (parallel.tensor_parallel); pass them into the container, lower "
        "tensor_parallel, or set device: cpu"
    )  # fmt: skip
    yield Check("device.count", "ok" if enough else "error", f"{len(nodes)} in /dev", advice)
    path, advice = DRIVERS[kind]
    text = (root / path).read_text() if (root / path).is_file() else ""
    found = " ".join(text.split())[:80]
    driver = Check("device.driver", "error", f"no /{path}", advice)
    yield Check("device.driver", "ok", found) if text else driver
    name, shown = VISIBLE[kind], environ.get(VISIBLE[kind])
    if shown is None:
        yield Check("device.visible", "ok", f"{name} is not set: all")
        return
    listed = visible_devices(kind, shown)
    whole = all(map(str.isdecimal, listed))
    rising = kind != "npu" or (whole and listed == sorted(set(listed), key=int))
    fits = rising and len(listed) >= size
    order = ", rising" if kind == "npu" else ""
    advice = "" if fits else f"it shows {len(listed)}: list at least {size} devices{order}"
    yield Check("device.visible", "ok" if fits else "error", f"{name}={shown}", advice)


def _cann(spec: Spec, environ: Mapping[str, str]) -> Iterator[Check]:
    if spec.device != "npu":
        return
    home = environ.get("ASCEND_HOME_PATH", "")
    here = bool(home) and any(Path(home).glob("lib64/libascendcl.so"))
    advice = "" if here else "install CANN, then source its set_env.sh before Ray starts"
    found = home or "ASCEND_HOME_PATH is not set"
    yield Check("cann", "ok" if here else "error", found, advice)
    if environ.get("ASCEND_LAUNCH_BLOCKING", "0") != "0":
        found, advice = "ASCEND_LAUNCH_BLOCKING is set", "unset it: nothing can be captured with it"
        yield Check("cann.launch_blocking", "error", found, advice)


def _cpus(spec: Spec) -> Iterator[Check]:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranges, driver = spec.rank_cpu_sets(), spec.driver_cpu_set()
    except ConfigError as error:
        yield Check("cpus.ranks", "error", str(error), "give CPUs of this machine")
        return
    texts = ["not pinned" if r is None else affinity.format_cpus(r) for r in (*ranges, driver)]
    found = f"ranks {' | '.join(texts[:-1])}; driver {texts[-1]}"
    state: State = "warning" if caught else "ok"
    yield Check("cpus.ranks", state, found, "; ".join(str(w.message) for w in caught))
    if spec.device == "npu":
        cards = affinity.card_cpus(affinity.npu_topology(), affinity.allowed_cpus())
        near = ", ".join(f"NPU{n}: {affinity.format_cpus(c)}" for n, c in sorted(cards.items()))
        yield Check("cpus.near", "ok", near or "npu-smi names none; auto splits evenly")
        short = min((len(r) for r in ranges if r is not None), default=NPU_CPUS) < NPU_CPUS
        if short:
            advice = f"give each rank {NPU_CPUS} or more (parallel.rank_cpus)"
            yield Check("cpus.count", "warning", "few CPUs for a card's own threads", advice)


def _memory(spec: Spec, root: Path) -> Iterator[Check]:
    yield Check("memory.host", "ok", f"{free_host_bytes() / 2**30:.1f} GiB free")
    shm = root / "dev/shm"
    if not shm.is_dir():
        yield Check("memory.shm", "warning", "no /dev/shm", "Ray's object store goes to a disk")
        return
    free = shutil.disk_usage(shm).free
    shares = spec.device == "cpu" and spec.parallel.collective in ("auto", "shm")
    need = COLLECTIVE_SHM_BYTES * spec.parallel.tensor_parallel if shares else 0
    want = need + spec.ray.object_store_bytes
    state: State = "error" if free < need else "warning" if free < want else "ok"
    advice = "" if state == "ok" else f"make it {want >> 20} MiB or more (docker: --shm-size)"
    yield Check("memory.shm", state, f"/dev/shm has {free >> 20} MiB free", advice)


def _ray(spec: Spec, environ: Mapping[str, str], root: Path) -> Iterator[Check]:
    address = running_address(spec, environ)
    if address is None:
        yield Check("ray.address", "ok", "none: a cluster of this machine is started and ended")
        why = temp_problem(environ, root)
        yield Check("ray.files", "error" if why else "ok", why or "there is room for Ray's files")
    else:
        why = obstacle(address, environ, root)
        yield Check("ray.address", "error" if why else "ok", f"{address}: {why or 'it answers'}")
    ours = "0 (ours)" if address is None else "not known here"
    niceness = environ.get("RAY_worker_niceness", ours)
    bad = not niceness.startswith(("0", "not"))
    advice = "set RAY_worker_niceness=0 where Ray starts" if bad else ""
    yield Check("ray.niceness", "warning" if bad else "ok", niceness, advice)
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    shown = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    default = "a random token" if address is None else "no token is sent"
    yield Check("ray.auth", "ok", shown or default)


def _rank_environment(spec: Spec, environ: Mapping[str, str]) -> Iterator[Check]:
    for name, value in RANK_ENV.get(spec.device, {}).items():
        origin = "set here" if name in environ else "ours"
        yield Check(f"env.{name}", "ok", f"{environ.get(name, value)} ({origin})")


def _checkpoint(spec: Spec) -> Iterator[Check]:
    try:
        folder = local_folder(spec.model)
    except ConfigError as error:
        yield Check("checkpoint", "error", str(error), "set model to a folder")
        return
    if folder is None:
        advice = "it is looked up and downloaded at start"
        yield Check("checkpoint", "warning", f"no folder {spec.model}", advice)
        return
    try:
        model = load_config(folder)
        model.check_divides(
            spec.parallel.tensor_parallel, expert_parallel=spec.parallel.expert_parallel
        )
        run = spec.run_config(model, folder, 0)
    except ConfigError as error:
        yield Check("checkpoint.config", "error", str(error), "see the named file or key")
        return
    found = f"{model.num_layers} layers, K = {run.draft_tokens}, {run.max_model_len} tokens"
    yield Check("checkpoint.config", "ok", found)
    files, broken = sorted(folder.glob("*.safetensors")), []
    for file in files:
        if problem := _broken(file):
            broken.append(f"{file.name}: {problem}")
    found = "; ".join(broken) or f"{len(files)} files, headers and lengths agree"
    bad = bool(broken) or not files
    advice = "copy or download the checkpoint again" if bad else ""
    yield Check("checkpoint.files", "error" if bad else "ok", found, advice)


def _broken(file: Path) -> str | None:
    """What is wrong with a safetensors file, None if its length is what its header says."""
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 2 <= length <= size - 8:
            return "no header"
        try:
            header = json.loads(data.read(length))
        except ValueError:
            return "the header is not JSON"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else f"{size} bytes, its header says {wanted}"
