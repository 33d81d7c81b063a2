"""Where the actors live: the Ray cluster, the placement group, and each rank's device and env.

    connect_ray(spec) -> Cluster      place(spec) -> placement group: the driver, then rank 0..n-1
One bundle a rank and one for the driver, all on one machine (STRICT_PACK). What the cluster can
never offer is an error at once; what it does not offer in time is an error with a table of the
bundles. A private cluster is started where there is none to join: it has as many logical CPUs as
the bundles ask for, and ends with the engine.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.actors.cluster.address import AUTH_PAGE, obstacle, running_address, temp_problem
from outrider.actors.cluster.kinds import RANK_ENV, VISIBLE, visible_devices
from outrider.actors.cluster.loopback import ray_on_loopback
from outrider.actors.cluster.spec import Spec, config_error
from outrider.actors.errors import EngineDeadError
from outrider.model.config import ConfigError
from outrider.parallel.affinity import allowed_cpus, card_cpus, npu_topology

RESOURCES = {"cuda": "GPU", "npu": "NPU"}
DRIVER_CPUS = 1
RAY_ENV = {
    # Ray runs workers at nice 15: any other process would then stretch every step.
    "RAY_worker_niceness": "0",
    # Silences a notice; actors without devices see all of them, as Ray will do by default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


log = logging.getLogger(__name__)


class PlacementError(ConfigError):
    """The cluster does not have, or does not free, what cluster.yaml asks for."""


class Cluster:
    """The connection of one engine to Ray, as `connect_ray` made it."""

    def __init__(self, *, connected: bool, session: Path | None) -> None:
        """connected: whether we connected this process. session: a private cluster's folder."""
        self.private = session is not None
        self._connected = connected
        self._session = session

    def close(self) -> None:
        """Undo what `connect_ray` did: a cluster or a connection that was there before stays."""
        if self._connected and ray.is_initialized():
            ray.shutdown()
        if self._session is not None:  # Ray leaves its socket files; the logs may be wanted
            shutil.rmtree(self._session / "sockets", ignore_errors=True)
        self._connected, self._session = False, None


def is_private(spec: Spec) -> bool:
    """Whether `connect_ray` would start a cluster of this machine."""
    return not ray.is_initialized() and running_address(spec, os.environ) is None


def connect_ray(spec: Spec, *, engines: int = 1) -> Cluster:
    """The cluster that this process is in, the one to join (address.py), or a private one.

    engines: how many a private cluster is to have room for. ConfigError when the cluster cannot be
    joined, EngineDeadError when Ray does not start.
    """
    if ray.is_initialized():
        return Cluster(connected=False, session=None)
    address = running_address(spec, os.environ)
    if address is not None:
        return _join(spec, address)
    return start_private(
        num_cpus=engines * int(sum(bundle.get("CPU", 0) for bundle in bundles(spec))),
        namespace=spec.ray.namespace,
        object_store_bytes=spec.ray.object_store_bytes,
    )


def _join(spec: Spec, address: str) -> Cluster:
    """Connect to the running cluster at `address`."""
    log.info("joining the Ray cluster at %s", address)
    why = obstacle(address, os.environ)
    if why is None:
        try:
            ray.init(
                address=address,
                namespace=spec.ray.namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
            return Cluster(connected=True, session=None)
        except (ConnectionError, RuntimeError, ValueError, RayError) as problem:
            mode = os.environ.get("RAY_AUTH_MODE", "not set")
            why = (
                f"Ray could not join it: {problem}. RAY_AUTH_MODE is {mode} here, and must be what "
                f"it is there, with the same token ({AUTH_PAGE})"
            )
    if spec.ray.address is not None:
        raise spec.error("ray.address", why)
    raise config_error("RAY_ADDRESS", address, "environment", why)


def start_private(
    *,
    num_cpus: int,
    namespace: str,
    object_store_bytes: int,
    resources: dict[str, float] | None = None,
) -> Cluster:
    """A cluster of this machine only; `num_cpus` is Ray's counter and may exceed the cores.

    It speaks to holders of a random token only, which this process and its children know.
    ConfigError when there is no room for its files, EngineDeadError when Ray does not start.
    """
    log.info("starting Ray on this machine")
    if (why := temp_problem(os.environ)) is not None:
        raise ConfigError(why)
    for name, value in RAY_ENV.items():
        os.environ.setdefault(name, value)
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}:
        # With the mode unset Ray turns tokens on for a new local cluster, also in a process that
        # has imported it before. It reads the token once, so a process's clusters share it; without
        # one it would write a file that others may read.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        with ray_on_loopback():
            info: Any = ray.init(
                address="local",
                num_cpus=num_cpus,
                resources=resources,
                namespace=namespace,
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                log_to_driver=False,
                logging_level=logging.ERROR,  # it warns that tokens are on
            )
    except Exception as problem:  # a node that times out is a bare Exception
        raise EngineDeadError(f"Ray did not start: {problem}", traceback.format_exc()) from None
    session = Path(info.address_info["session_dir"])
    session.chmod(0o700)  # Ray lets all users write there
    return Cluster(connected=True, session=session)


def bundles(spec: Spec) -> list[dict[str, float]]:
    """Resources of the driver, into whose bundle Ray Serve puts a replica, then of each rank."""
    rank: dict[str, float] = {}
    if spec.device in RESOURCES:
        rank[RESOURCES[spec.device]] = 1
    if spec.ray.cpus_per_rank:
        rank["CPU"] = spec.ray.cpus_per_rank
    driver: dict[str, float] = {"CPU": DRIVER_CPUS}
    return [driver, *(dict(rank) for _ in range(spec.parallel.tensor_parallel))]


def missing(
    wanted: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]
) -> str | None:
    """Why `wanted` can never be placed on one of `nodes` (total resources of each), or None."""
    need = _sum(wanted)
    have = {name: sum(node.get(name, 0) for node in nodes) for name in need}
    short = [name for name in need if need[name] > have[name]]
    if short:
        return ", ".join(
            f"needs {name}: {need[name]:g}, the cluster has {name}: {have[name]:g}"
            for name in short
        )
    if not any(all(node.get(name, 0) >= need[name] for name in need) for node in nodes):
        return f"needs {_amounts(need)} on one machine; the machines have " + "; ".join(
            _amounts({name: node.get(name, 0) for name in need}) for node in nodes
        )
    return None


def engines_that_fit(spec: Spec, most: int, node: Mapping[str, float]) -> int:
    """How many of `most` engines a node of these total resources can hold at a time; at least 1."""
    room = [int(node.get(name, 0) // amount) for name, amount in _sum(bundles(spec)).items()]
    return max(1, min(most, *room))


def place(spec: Spec, name: str) -> PlacementGroup:
    """Reserve the bundles. PlacementError says what is missing, or who holds it."""
    wanted = bundles(spec)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    why = missing(wanted, nodes)
    if why is not None:
        raise PlacementError(
            f"the ranks cannot be placed: {why}. Change device, parallel.tensor_parallel or "
            "ray.cpus_per_rank in cluster.yaml, or start Ray with these resources"
        )
    group = placement_group(wanted, strategy="STRICT_PACK", name=name)
    if not group.wait(spec.ray.placement_timeout_s):
        table = placement_table(group)
        remove_placement_group(group)
        raise PlacementError(
            f"the ranks were not placed within ray.placement_timeout_s = "
            f"{spec.ray.placement_timeout_s:g} s: others hold what they need.\n{table}\n"
            f"free now: {_amounts(ray.available_resources())}"
        )
    log.info("starting the driver and %d ranks", spec.parallel.tensor_parallel)
    return group


def placement_table(group: PlacementGroup) -> str:
    """The bundles of a group and its state, a line each."""
    table: dict[str, Any] = placement_group_table(group)
    nodes = table.get("bundles_to_node_id", {})
    lines = [f"placement group {table.get('name')}: {table.get('state')}"]
    for index, bundle in table.get("bundles", {}).items():
        lines.append(f"  bundle {index}: {_amounts(bundle)} on node {nodes.get(index) or '-'}")
    return "\n".join(lines)


def bundle_options(
    group: PlacementGroup,
    index: int,
    bundle: Mapping[str, float],
    *,
    name: str,
    env: dict[str, str],
) -> dict[str, Any]:
    """Options of an actor that takes all of one bundle."""
    devices = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU")}
    return {
        "name": name,
        "max_restarts": 0,
        "max_task_retries": 0,
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": devices,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
        **({"runtime_env": {"env_vars": env}} if env else {}),
    }


def rank_env(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that a rank's process needs before Ray prepares it for its device; `environ` wins.

    A worker with variables of its own cannot be one that Ray has started in advance, so the CPU has
    none.
    """
    return {name: environ.get(name, value) for name, value in RANK_ENV.get(device, {}).items()}


def near_cpus(device: str, ids: Mapping[str, Sequence[str]]) -> frozenset[int] | None:
    """CPUs near the NPU that Ray assigned, None where npu-smi does not say.

    ids: as in `device_index`. Cards of one NUMA node divide its CPUs evenly.
    """
    mine = ids.get(RESOURCES.get(device, ""), ())
    if device != "npu" or len(mine) != 1:
        return None
    return card_cpus(npu_topology(), allowed_cpus()).get(int(mine[0]))


def device_index(device: str, ids: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
    """Index of the device that Ray assigned, among those that this process sees; 0 for the CPU.

    ids: what Ray assigned, by resource: physical numbers or UUIDs, while a visible-devices variable
    renumbers what a process sees. Raises PlacementError when it sees no such device.
    """
    if device not in RESOURCES:
        return 0
    mine = ids.get(RESOURCES[device], ())
    if len(mine) != 1:
        raise PlacementError(f"Ray assigned {RESOURCES[device]} ids {list(mine)}, a rank takes one")
    name = VISIBLE[device]
    if name not in environ:
        if not mine[0].isdecimal():
            raise PlacementError(f"Ray assigned {mine[0]}: no index, and {name} is not set here")
        return int(mine[0])
    listed = visible_devices(device, environ[name])
    whole = all(map(str.isdecimal, listed))
    if device == "npu" and not (whole and listed == sorted(listed, key=int)):
        raise PlacementError(f"{name}={environ[name]}: CANN needs the ids in ascending order")
    if mine[0] not in listed:
        raise PlacementError(f'Ray assigned {mine[0]}, which {name}="{environ[name]}" hides')
    return listed.index(mine[0])


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return total


def _amounts(resources: Mapping[str, float]) -> str:
    names = sorted(
        name for name in resources if not name.startswith(("node:", "object_store", "memory"))
    )
    return ", ".join(f"{name}: {resources[name]:g}" for name in names) or "nothing"
