"""Groups of ranks as threads and as processes: sums are whole, gathers are in rank order."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from outrider.parallel import group, shard
from outrider.parallel.device import DeviceError
from outrider.parallel.devices import collective_kind, open_device
from outrider.parallel.vocab import LMHead


def exercise(member: group.Group) -> list:
    """Collectives of many sizes and dtypes, some larger than a shared buffer.

    -> sums, which must be the same on all ranks.
    """
    out = []
    for rows, width in ((1, 1), (5, 7), (3, 1 << 20), (600, 2048)):
        x = torch.arange(rows * width, dtype=torch.float32).view(rows, width) * (member.rank + 1)
        out.append(member.all_reduce(x.clone()).double().sum().item())
        gathered = member.all_gather(x[:, :2].contiguous())
        assert gathered.shape == (member.size, *x[:, :2].shape)
        for other in range(member.size):
            assert torch.equal(gathered[other] * (member.rank + 1), x[:, :2] * (other + 1))
    for step in range(300):  # two buffers alternate: no rank may overtake another
        x = torch.full((4,), float(step * 10 + member.rank))
        total = sum(step * 10 + r for r in range(member.size))
        assert member.all_reduce(x.clone()).tolist() == [total] * 4
    ids = torch.tensor([[2**40 + member.rank]])
    assert member.all_gather(ids).flatten().tolist() == [2**40 + r for r in range(member.size)]
    assert member.all_reduce(torch.ones(3, dtype=torch.bfloat16)).tolist() == [member.size] * 3
    return out


def body(kind: str, rank: int, size: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    store = group.join_store("127.0.0.1", port, 30)
    member = group.connect(store, rank, size, kind, timeout_s=30)
    queue.put((rank, exercise(member)))
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)
    member.close()


@pytest.mark.procs
@pytest.mark.parametrize(("kind", "size"), [("gloo", 2), ("shm", 2), ("shm", 3)])
def test_processes_sum_and_gather(kind: str, size: int) -> None:
    if kind == "shm" and not group.shm_available():
        pytest.skip("needs Linux on x86-64")
    context = multiprocessing.get_context("spawn")
    store = group.host_store("127.0.0.1")
    queue = context.Queue()
    ranks = [
        context.Process(target=body, args=(kind, r, size, store.port, queue)) for r in range(size)
    ]
    for process in ranks:
        process.start()
    results = [queue.get(timeout=120)[1] for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert all(r == results[0] for r in results)
    assert not list(Path("/dev/shm").glob("outrider-*")), "a mapping was left behind"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_sum_and_gather(size: int) -> None:
    members = group.threads(size)
    results: list = [None] * size

    def run(i: int) -> None:
        results[i] = exercise(members[i])

    workers = [threading.Thread(target=run, args=(i,)) for i in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results[0] is not None
    assert all(r == results[0] for r in results)


@pytest.mark.skipif(not group.shm_available(), reason="needs Linux on x86-64")
def test_a_rank_that_stays_away_is_named() -> None:
    store = group.host_store("127.0.0.1")
    members: list = [None, None]

    def come(i: int) -> None:
        own = store if i == 0 else group.join_store("127.0.0.1", store.port)
        members[i] = group.connect(own, i, 2, "shm", timeout_s=0.3)

    workers = [threading.Thread(target=come, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with pytest.raises(group.CollectiveError, match="rank 1 did not reach"):
        members[0].all_reduce(torch.ones(2))
    members[1].close()
    with pytest.raises(group.CollectiveError, match="has left"):
        members[0].all_reduce(torch.ones(2))


@pytest.mark.skipif(not group.shm_available(), reason="needs Linux on x86-64")
def test_a_rank_that_never_connects_leaves_nothing_behind() -> None:
    store = group.host_store("127.0.0.1")
    with pytest.raises(group.CollectiveError, match="1 of 2 ranks connected"):
        group.connect(store, 0, 2, "shm", timeout_s=0.2)
    assert not list(Path("/dev/shm").glob("outrider-*"))


def test_a_store_listens_on_its_address_alone_and_keeps_its_keys() -> None:
    server = group.host_store("127.0.0.1")
    mine = [one for one in psutil.Process().net_connections() if one.laddr[1:] == (server.port,)]
    listening = [one.laddr.ip for one in mine if one.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]
    hidden = group.hidden_in(server, "secret")
    hidden.set("shm/path", "/dev/shm/outrider-x")
    stranger = group.join_store("127.0.0.1", server.port)
    assert not stranger.check(["shm/path"])
    stranger.set("shm/path", "/etc/passwd")
    assert hidden.get("shm/path") == b"/dev/shm/outrider-x"


@pytest.mark.skipif(not group.shm_available(), reason="needs Linux on x86-64")
@pytest.mark.parametrize("kind", ["mode", "size", "link", "folder", "name"])
def test_a_rank_opens_no_segment_that_rank_0_did_not_make(kind: str, tmp_path: Path) -> None:
    num_bytes = 64 * 2 + 2 * 2 * group.SHM_BUFFER_BYTES
    folder = tmp_path if kind == "folder" else Path("/dev/shm")
    path = folder / (f"{'other' if kind == 'name' else 'outrider'}-test-{os.getpid()}")
    target = tmp_path / "target" if kind == "link" else path
    try:
        with target.open("wb") as file:
            file.truncate(num_bytes // 2 if kind == "size" else num_bytes)
        target.chmod(0o644 if kind == "mode" else 0o600)
        if kind == "link":
            path.symlink_to(target)
        store = group.host_store("127.0.0.1")
        store.set("shm/path", str(path))
        with pytest.raises(Exception, match=r"\w") as caught:
            group.connect(store, 1, 2, "shm", timeout_s=0.2)
        assert path.name in str(caught.value)
    finally:
        path.unlink()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sharded_head_gives_argmax_and_logits_in_vocabulary_order(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 16, generator=generator)
    weight[60:] = weight[:20]  # ties across every border
    hidden = torch.randn(9, 16, generator=generator)
    want = hidden @ weight.t()
    results: list = [None] * size

    def run(member: group.Group) -> None:
        part = shard.rows(80).take(weight, member.rank, size)
        head = LMHead(part, open_device("cpu", 0, member))
        results[member.rank] = (head.greedy(hidden), head.logits(hidden))

    members = group.threads(size) if size > 1 else [group.alone()]
    workers = [threading.Thread(target=run, args=(m,)) for m in members]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for ids, logits in results:
        assert torch.equal(ids, want.argmax(-1))
        assert (logits - want).abs().max() < 1e-5


def test_cuts_repeat_what_cannot_be_split() -> None:
    fused = shard.Cut(0, (shard.Part(8, 4), shard.Part(8, 4), shard.Part(24, 4)))
    assert fused.spans(1, 2) == [(4, 8), (12, 16), (28, 40)]
    assert fused.local_shape((40, 3), 2) == (20, 3)
    kv = shard.rows(64, units=2)
    assert [kv.spans(r, 4) for r in range(4)] == [[(0, 32)], [(0, 32)], [(32, 64)], [(32, 64)]]
    assert shard.WHOLE.local_shape((3, 4), 8) == (3, 4)
    assert shard.columns(6).spans(1, 3) == [(2, 4)]


def test_a_device_that_is_not_here_is_an_error() -> None:
    for kind in ("cuda", "npu", "tpu"):
        if kind == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(DeviceError, match=r"cluster\.yaml"):
            open_device(kind, 0, group.alone())
    assert collective_kind("cuda") == "peer"
    assert collective_kind("cpu") in ("shm", "gloo")
