"""CPU ranges as text, the even split, and pinning of every thread of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.parallel import affinity
from outrider.parallel.affinity import AffinityError

ROOT = Path(__file__).resolve().parents[2]
linux_only = pytest.mark.skipif(not affinity.can_pin(), reason="no CPU pinning on this system")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8", {0, 1, 8}), (" 4 , 2 - 3,2", {2, 3, 4})],
)
def test_a_range_is_read(text: str, cpus: set[int]) -> None:
    assert affinity.parse_cpu_range(text) == cpus
    assert affinity.parse_cpu_range(affinity.format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "0,", "0 1", "3-1", "0-99999999999", "٣"])
def test_a_bad_range_is_named_in_the_error(text: str) -> None:
    with pytest.raises(AffinityError, match="CPU range") as caught:
        affinity.parse_cpu_range(text)
    assert f'"{text}"' in str(caught.value)


def test_neighbours_are_written_as_one_range() -> None:
    assert affinity.format_cpus([8, 2, 0, 1, 3]) == "0-3,8"


def test_the_split_covers_all_cpus_once_and_is_even() -> None:
    parts = affinity.split_evenly(range(10, 17), 3)
    assert [sorted(part) for part in parts] == [[10, 11, 12], [13, 14], [15, 16]]


def test_more_parts_than_cpus_cannot_be_split() -> None:
    with pytest.raises(AffinityError, match="2 CPUs cannot be split into 3"):
        affinity.split_evenly({0, 1}, 3)


def test_an_empty_intersection_names_the_allowed_cpus() -> None:
    with pytest.raises(AffinityError, match=r'"4096".*may use "0-1,3"'):
        affinity.usable_cpus({4096}, {0, 1, 3})
    assert affinity.usable_cpus({1, 4096}, {0, 1}) == {1}


PIN_WITH_THREADS = """
import os, threading
from outrider.parallel import affinity
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(3)]
for thread in threads: thread.start()
cpu = max(affinity.allowed_cpus())
count = affinity.pin_process({cpu, 60000})
masks = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
stop.set()
assert count == 4 == len(masks), (count, masks)
assert all(mask == {cpu} for mask in masks), masks
"""


@linux_only
def test_every_thread_of_the_process_is_pinned() -> None:
    subprocess.run([sys.executable, "-c", PIN_WITH_THREADS], cwd=ROOT, check=True)


@linux_only
def test_pinning_outside_the_machine_is_refused_and_changes_nothing() -> None:
    before = affinity.allowed_cpus()
    with pytest.raises(AffinityError, match="none is available here"):
        affinity.pin_process({60000})
    assert affinity.allowed_cpus() == before


@linux_only
def test_a_thread_that_ended_meanwhile_is_no_error(tmp_path: Path, monkeypatch) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    for thread in (os.getpid(), ended.native_id):
        (tmp_path / str(thread)).mkdir()
    monkeypatch.setattr(affinity, "_TASKS", tmp_path)
    assert affinity.pin_process(affinity.allowed_cpus()) == 2


def test_a_system_without_pinning_says_so(monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert affinity.allowed_cpus()
    with pytest.raises(AffinityError, match="Linux only"):
        affinity.pin_process({0})


TOPOLOGY = """\
\t   NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0\t   X          HCCS       HCCS       HCCS       0-3
NPU1\t   HCCS       X          HCCS       HCCS       0-3
NPU2\t   HCCS       HCCS       X          HCCS       4-5,8-9
NPU3\t   HCCS       HCCS       HCCS       X          NA

Legend:
  X    = Self
  HCCS = Connection traversing HCCS.
"""


def test_cards_of_one_node_share_its_cpus() -> None:
    assert affinity.card_cpus(TOPOLOGY, range(9)) == {0: {0, 1}, 1: {2, 3}, 2: {4, 5, 8}}
    assert affinity.card_cpus(TOPOLOGY, [0, 1, 2]) == {0: {0, 1}, 1: {2}}
    assert affinity.card_cpus(TOPOLOGY, [0]) == {}
    assert affinity.card_cpus("", range(9)) == {}


def test_the_topology_is_what_npu_smi_prints(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!/bin/sh\n[ \"$*\" = 'info -t topo' ] && cat <<'END'\n{TOPOLOGY}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert affinity.npu_topology() == TOPOLOGY
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert affinity.npu_topology() == ""


def test_without_npu_smi_there_is_no_topology(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert affinity.npu_topology() == ""
