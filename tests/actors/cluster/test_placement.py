"""Bundles, what is missing, device indices; and, through Ray, emulated NPUs and refusals."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from outrider.actors.cluster import placement
from outrider.actors.cluster.placement import (
    PlacementError,
    bundle_options,
    bundles,
    device_index,
    missing,
    near_cpus,
    place,
    rank_env,
)
from outrider.actors.cluster.reader import load_spec
from outrider.actors.cluster.spec import Spec
from tests.conftest import RunningCluster


def spec(**overrides: object) -> Spec:
    return load_spec(None, {"model": "unused", **overrides})


@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        ({"device": "cpu"}, {"CPU": 1}),
        ({"device": "cpu", "cpus_per_rank": 4}, {"CPU": 4}),
        ({"device": "cuda"}, {"GPU": 1, "CPU": 1}),
        ({"device": "npu", "cpus_per_rank": 6}, {"NPU": 1, "CPU": 6}),
        ({"device": "npu", "cpus_per_rank": 0}, {"NPU": 1}),
    ],
)
def test_each_rank_has_a_bundle_and_the_driver_the_first(
    overrides: dict[str, Any], rank: dict[str, float]
):
    assert bundles(spec(tensor_parallel=2, **overrides)) == [{"CPU": 1}, rank, rank]


def test_what_the_cluster_lacks_is_named_with_both_amounts():
    wanted = [{"NPU": 1, "CPU": 1}, {"NPU": 1, "CPU": 1}, {"CPU": 1}]
    assert missing(wanted, [{"NPU": 2, "CPU": 3}]) is None
    assert missing(wanted, [{"CPU": 8}]) == "needs NPU: 2, the cluster has NPU: 0"
    says = "needs NPU: 2, the cluster has NPU: 1, needs CPU: 3, the cluster has CPU: 2"
    assert missing(wanted, [{"NPU": 1, "CPU": 2}]) == says


def test_enough_in_all_but_on_no_one_machine_is_missing_too():
    wanted = [{"NPU": 1}, {"NPU": 1}]
    says = "needs NPU: 2 on one machine; the machines have NPU: 1; NPU: 1"
    assert missing(wanted, [{"NPU": 1}, {"NPU": 1}]) == says


@pytest.mark.parametrize(
    ("device", "ids", "environ", "index"),
    [
        ("cpu", {}, {}, 0),
        ("cuda", {"GPU": ["3"]}, {}, 3),
        ("cuda", {"GPU": ["5"]}, {"CUDA_VISIBLE_DEVICES": "4,5"}, 1),
        ("cuda", {"GPU": ["GPU-b"]}, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1),
        ("cuda", {"GPU": ["0"]}, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 0),
        ("npu", {"NPU": ["5"]}, {"ASCEND_RT_VISIBLE_DEVICES": "5"}, 0),
        ("npu", {"NPU": ["11"]}, {"ASCEND_RT_VISIBLE_DEVICES": "2, 11"}, 1),
    ],
)
def test_the_device_index_counts_among_visible_devices(
    device: str, ids: Mapping[str, list[str]], environ: Mapping[str, str], index: int
):
    assert device_index(device, ids, environ) == index


@pytest.mark.parametrize(
    ("device", "ids", "environ", "says"),
    [
        ("npu", {"NPU": ["1"]}, {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "ascending"),
        ("npu", {"NPU": ["1"]}, {"ASCEND_RT_VISIBLE_DEVICES": "1,npu2"}, "ascending"),
        ("cuda", {"GPU": ["1"]}, {"CUDA_VISIBLE_DEVICES": "0"}, "hides"),
        ("cuda", {"GPU": ["1"]}, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "hides"),
        ("cuda", {"GPU": ["GPU-a"]}, {"CUDA_VISIBLE_DEVICES": ""}, 'CUDA_VISIBLE_DEVICES="" hides'),
        ("cuda", {"GPU": ["GPU-a"]}, {}, "no index, and CUDA_VISIBLE_DEVICES is not set"),
        ("npu", {"NPU": ["0"]}, {"ASCEND_RT_VISIBLE_DEVICES": ""}, "hides"),
        ("cuda", {"GPU": ["0", "1"]}, {}, "a rank takes one"),
        ("npu", {}, {}, "a rank takes one"),
    ],
)
def test_a_device_that_cannot_be_used_is_an_error(
    device: str, ids: Mapping[str, list[str]], environ: Mapping[str, str], says: str
):
    with pytest.raises(PlacementError, match=says):
        device_index(device, ids, environ)


def test_ranks_of_devices_have_their_environment_prepared_by_ray():
    assert rank_env("cpu", {}) == {}
    assert rank_env("cuda", {}) == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    mine = {"TASK_QUEUE_ENABLE": "2", "HOME": "/"}
    assert rank_env("npu", mine) == {
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "TASK_QUEUE_ENABLE": "2",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1",
    }


def test_an_npu_rank_takes_the_cpus_near_its_card(monkeypatch):
    monkeypatch.setattr(placement, "npu_topology", lambda: "NPU6  X  HCCS  0-1\nNPU7  HCCS  X  2-3")
    monkeypatch.setattr(placement, "allowed_cpus", lambda: frozenset(range(4)))
    assert near_cpus("npu", {"NPU": ["7"]}) == {2, 3}
    assert near_cpus("npu", {"NPU": ["5"]}) is None
    assert near_cpus("cpu", {}) is None


class Probe:
    """What a rank finds in its process."""

    def look(self) -> dict[str, Any]:
        ids = ray.get_runtime_context().get_accelerator_ids()
        return {
            "ids": ids["NPU"],
            "visible": os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
            "index": device_index("npu", ids, os.environ),
            "nice": os.nice(0),
        }


@pytest.mark.ray
def test_emulated_npus_go_one_to_a_rank(cluster: RunningCluster):
    npus = spec(device="npu", tensor_parallel=2)
    group = place(npus, "test-npus")
    wanted = bundles(npus)
    probes: list[Any] = [
        ray.remote(Probe)
        .options(**bundle_options(group, i, wanted[i], name=f"probe{i}", env={}))
        .remote()
        for i in (1, 2)
    ]
    found = ray.get([probe.look.remote() for probe in probes])
    for probe in probes:
        ray.kill(probe)
    remove_placement_group(group)
    assert sorted(f["ids"][0] for f in found) == ["0", "1"]
    assert all(f["visible"] == f["ids"][0] for f in found)
    assert all(f["index"] == 0 for f in found)
    assert all(f["nice"] == 0 for f in found)


@pytest.mark.ray
def test_what_the_cluster_can_never_offer_is_refused_at_once(cluster: RunningCluster):
    started = time.monotonic()
    with pytest.raises(PlacementError, match="needs GPU: 2, the cluster has GPU: 1"):
        place(spec(device="cuda", tensor_parallel=2), "test-gpus")
    assert time.monotonic() - started < 2


@pytest.mark.ray
def test_what_others_hold_is_waited_for_and_then_shown(cluster: RunningCluster):
    npus = spec(device="npu", tensor_parallel=2, placement_timeout_s=0.5)
    held = place(spec(device="npu", tensor_parallel=2), "test-holder")
    with pytest.raises(PlacementError, match=r"placement_timeout_s = 0\.5 s(.|\n)*bundle 0: CPU"):
        place(npus, "test-late")
    remove_placement_group(held)
