"""Groups of ranks that sum or gather a tensor, with one class for each way of communication.

    alone(): one rank               threads(n): n ranks in one process, for tests
    connect(store, ...): one process a rank, over shared memory, GPU peer memory, gloo, nccl or hccl

Every rank of a group makes the same calls in the same order and gets the same bits back, since sums
run in rank order. x is a tensor that has one shape on all ranks, of which there are `size`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import socket
import stat
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

SHM_DIR = Path("/dev/shm")
SHM_MACHINES = {"x86_64", "AMD64"}
"""SharedMemoryGroup needs a machine on which one core sees the stores of another in order."""
SHM_BUFFER_BYTES = 4 << 20
PEER_BUFFER_BYTES = 1 << 20
PEER_DTYPES = {torch.bfloat16, torch.float32}
ONE_SHOT_ROWS, ONE_SHOT_WORDS = 256, 2560
"""The most rows of an exchange in one shot, and the most words of 4 bytes of a row."""
TWO_SHOT_ELEMENTS, TWO_SHOT_PROGRAMS = 1 << 24, 128
"""The most bfloat16 of a sum in two shots, 8,192 rows of 2,048 (the buffers hold them twice, in 64
MiB), and the most programs of its kernel."""


@dataclass(frozen=True, slots=True)
class OneShotBuffers:
    """GPU memory for sums and choices in one shot (kernels/one_shot.py says how it is used)."""

    received: Tensor
    """[2, size, rows, words] int64, zero at first: packets from kernels of the other ranks."""
    addresses: Tensor
    """[size] int64: where `received` of each rank lies, in this rank's address space."""
    sequence: Tensor
    """[rows] int32: how many exchanges of each row there have been."""
    rank: int
    size: int

    @property
    def rows(self) -> int:
        """The most rows of an exchange."""
        return self.received.shape[2]

    @property
    def words(self) -> int:
        """The most words of 4 bytes of a row."""
        return self.received.shape[3]


@dataclass(frozen=True, slots=True)
class TwoShotBuffers:
    """GPU memory for sums in two shots (kernels/two_shot.py says how it is used)."""

    parts: Tensor
    """[size, share] bfloat16: every rank's parts of the rows that this rank sums."""
    results: Tensor
    """[elements] bfloat16: the normed sums of all rows, each written by the rank that summed it."""
    flags: Tensor
    """[2, size, programs] int32, zero at first: for each shot and each program of each rank, the
    sequence number of the last call for which it has written all that it sends to this rank."""
    addresses: Tensor
    """[3, size] int64: where parts, results and flags of each rank lie, in this rank's address
    space."""
    sequence: Tensor
    """[programs] int32: how many calls each program of this rank has completed."""
    rank: int
    size: int

    @property
    def programs(self) -> int:
        return self.flags.shape[2]


class CollectiveError(RuntimeError):
    """A rank did not take part in a collective in time."""


class Group:
    """A group of one rank, and the base class of the others."""

    rank: int = 0
    size: int = 1
    one_shot: OneShotBuffers | None = None
    two_shot: TwoShotBuffers | None = None
    """Both are set where kernels of the ranks can write to each other's memory."""
    keeps_store: bool = False
    """Whether it uses the store where its ranks have met after they have."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, in x's shape and dtype. x may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank, in rank order: [size, *x.shape]."""
        return x.unsqueeze(0)

    def close(self) -> None:
        """Leave the group. No collective may follow."""


def alone() -> Group:
    """The group of one rank."""
    return Group()


class ThreadGroup(Group):
    """Ranks that are threads of one process, for tests: slow, and with nothing to set up."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Tensor | None]) -> None:
        self.rank, self.size = rank, len(table)
        self._barrier, self._table = barrier, table

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self._table[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack([t for t in self._table if t is not None])
        self._barrier.wait()
        return gathered

    def close(self) -> None:
        self._barrier.abort()


def threads(size: int, timeout_s: float = 60.0) -> list[Group]:
    """The group of `size` ranks, once for each of the threads that run them."""
    barrier = threading.Barrier(size, timeout=timeout_s)
    table: list[Tensor | None] = [None] * size
    return [ThreadGroup(rank, barrier, table) for rank in range(size)]


class ProcessGroup(Group):
    """Ranks that are processes and communicate through torch.distributed."""

    keeps_store = True

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout_s: float):
        self.rank, self.size = rank, size
        options = None
        if backend == "hccl":
            from outrider.parallel.backends.hccl import hccl_options

            options = hccl_options(timeout_s)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x.contiguous())
        return out

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class PeerGroup(ProcessGroup):
    """GPUs that access each other's memory: small tensors in one shot, large ones through NCCL.

    In one shot every rank reads the parts of all ranks and sums them in rank order; NVLink
    multicast is not used. A small gather is the same sum: each rank's tensor holds its own part and
    zeros in the places of the other ranks. Adding zeros changes no bit of a finite float32, nor of
    a small int32 that is taken for one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__("nccl", store, rank, size, timeout_s)
        device = torch.device("cuda", torch.cuda.current_device())
        assert dist.group.WORLD is not None
        self._name = dist.group.WORLD.group_name
        self._parts: dict[torch.Size, Tensor] = {}
        self._buffer = symmetric.empty(PEER_BUFFER_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, dist.group.WORLD)
        received, addresses = self._shared((2, size, ONE_SHOT_ROWS, ONE_SHOT_WORDS), torch.int64)
        sequence = torch.zeros(ONE_SHOT_ROWS, dtype=torch.int32, device=device)
        self.one_shot = OneShotBuffers(received, addresses, sequence, rank, size)
        parts, of_parts = self._shared((size, TWO_SHOT_ELEMENTS // size), torch.bfloat16)
        results, of_results = self._shared((TWO_SHOT_ELEMENTS,), torch.bfloat16)
        flags, of_flags = self._shared((2, size, TWO_SHOT_PROGRAMS), torch.int32)
        addresses = torch.stack((of_parts, of_results, of_flags))
        sequence = torch.zeros(TWO_SHOT_PROGRAMS, dtype=torch.int32, device=device)
        self.two_shot = TwoShotBuffers(parts, results, flags, addresses, sequence, rank, size)
        torch.cuda.synchronize()
        dist.barrier()  # no rank may write to the buffers of another before those are zero

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros that the other ranks can write to, and the addresses [size] of every rank's."""
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(shape, dtype=dtype, device=torch.device("cuda")).zero_()
        assert dist.group.WORLD is not None
        all_ = symmetric.rendezvous(mine, dist.group.WORLD)
        addresses = [all_.get_buffer(r, shape, dtype).data_ptr() for r in range(self.size)]
        return mine, torch.tensor(addresses, dtype=torch.int64, device=mine.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > PEER_BUFFER_BYTES or x.nbytes % 16 or x.dtype not in PEER_DTYPES:
            return super().all_reduce(x)
        return self._sum_in_one_shot(x.contiguous())

    def all_gather(self, x: Tensor) -> Tensor:
        num_bytes = x.nbytes * self.size
        if num_bytes > PEER_BUFFER_BYTES or num_bytes % 16 or x.element_size() != 4:
            return super().all_gather(x)
        if x.shape not in self._parts:  # only this rank's part is ever written, the rest stays zero
            self._parts[x.shape] = torch.zeros(self.size, *x.shape, device=x.device)
        parts = self._parts[x.shape]
        parts[self.rank].copy_(x.view(torch.float32))
        return self._sum_in_one_shot(parts).view(x.dtype)

    def _sum_in_one_shot(self, x: Tensor) -> Tensor:
        buffer = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._name)


class SharedMemoryGroup(Group):
    """CPU ranks of one host: each writes its part to a shared mapping and reads all parts there.

    Every rank has a counter and two buffers there. In collective n it writes its data to its buffer
    n % 2 and then sets its counter to n; once the counters of all ranks are at least n it reads all
    buffers n % 2. When every counter has reached n + 1, every rank has read the data of collective
    n, so that buffer n % 2 may be written again: two buffers suffice. The file is unlinked as soon
    as all ranks have mapped it, so that none is left behind however a rank ends.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout_s: float, file: str | None = None
    ) -> None:
        """file: its path, which must not exist yet; None: a random name."""
        self.rank, self.size, self._timeout_s, self._seq = rank, size, timeout_s, 0
        head_bytes = 64 * size
        total = head_bytes + 2 * size * SHM_BUFFER_BYTES
        if rank == 0:
            path = Path(file or SHM_DIR / f"outrider-{secrets.token_hex(8)}")
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(fd, 0, total)
            except OSError as error:
                os.close(fd)
                path.unlink()
                raise CollectiveError(
                    f"{SHM_DIR} has no room for {total >> 20} MiB ({error.strerror}): enlarge it "
                    f"or set parallel.collective: gloo in cluster.yaml"
                ) from None
            store.set("shm/path", str(path))
        else:
            path = Path(store.get("shm/path").decode())
            fd = _open_segment(path, total)
        self._map = mmap.mmap(fd, total)
        os.close(fd)
        store.add("shm/mapped", 1)
        if rank == 0:
            _wait_for_count(store, "shm/mapped", size, timeout_s)
            path.unlink()
            store.set("shm/ready", "1")
        store.wait(["shm/ready"], timedelta(seconds=timeout_s))
        self._counters = np.frombuffer(self._map, np.int64, head_bytes // 8)[::8]
        data = torch.frombuffer(self._map, dtype=torch.uint8, offset=head_bytes)
        self._data = data.view(2, size, SHM_BUFFER_BYTES)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        pieces = [torch.sum(part, 0) for part in self._exchange(flat)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        pieces = [part.clone() for part in self._exchange(flat)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return whole.view(self.size, *x.shape)

    def close(self) -> None:
        self._counters[self.rank] = np.iinfo(np.int64).min

    def _exchange(self, flat: Tensor):
        """Yield views [size, n] of the data of all ranks, as much at a time as a buffer holds."""
        step = SHM_BUFFER_BYTES // flat.element_size()
        for part in flat.split(step) if flat.numel() > step else (flat,):
            self._seq += 1
            num_bytes = part.numel() * part.element_size()
            buffers = self._data[self._seq & 1][:, :num_bytes].view(flat.dtype)
            buffers[self.rank].copy_(part)
            self._counters[self.rank] = self._seq
            self._await_all()
            yield buffers

    def _await_all(self) -> None:
        """Wait until the counters of all ranks have reached this one's. Raises CollectiveError."""
        counters, seq = self._counters, self._seq
        spins, deadline = 0, 0.0
        for other in range(self.size):
            while counters[other] < seq:
                spins += 1
                if spins < 200:
                    continue
                now = time.monotonic()
                deadline = deadline or now + self._timeout_s
                if now > deadline or counters[other] < 0:
                    raise CollectiveError(
                        f"rank {self.rank}: rank {other} did not reach collective {seq} "
                        f"within {self._timeout_s:g} s, or has left"
                    )
                if spins < 20_000:
                    os.sched_yield()  # a sleep, even of 0, would cost a timer tick
                else:
                    time.sleep(0.0005)


def shm_available() -> bool:
    """Whether CPU ranks of this host can use SharedMemoryGroup."""
    return (
        platform.machine() in SHM_MACHINES and SHM_DIR.is_dir() and hasattr(os, "posix_fallocate")
    )


def host_store(host: str, timeout_s: float = 60.0) -> dist.TCPStore:
    """A rendezvous that rank 0 hosts: it listens on `host` alone, at a port that the system picks
    (`.port`)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)  # by itself it takes all addresses
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """The rendezvous that rank 0 hosts, as the other ranks use it."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def hidden_in(store: dist.Store, secret: str) -> dist.Store:
    """The part of a store whose keys only holders of `secret` can name: whoever else reaches the
    port can neither read nor change them."""
    return dist.PrefixStore(secret, store)


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    kind: str = "shm",
    timeout_s: float = 120.0,
    file: str | None = None,
) -> Group:
    """Find the other ranks through `store`; returns when all ranks have called this.

    kind is "shm", "gloo", "peer", "nccl" or "hccl"; file: as SharedMemoryGroup takes it. Raises
    CollectiveError or torch's DistError when a rank has not called it within `timeout_s`.
    """
    if size == 1:
        return alone()
    if kind == "shm":
        if not shm_available():
            raise CollectiveError(
                f"shared-memory collectives need Linux on x86-64, this is {platform.machine()}: "
                f"set parallel.collective: gloo in cluster.yaml"
            )
        return SharedMemoryGroup(store, rank, size, timeout_s, file)
    if kind == "peer":
        return PeerGroup(store, rank, size, timeout_s)
    return ProcessGroup(kind, store, rank, size, timeout_s)


def _open_segment(path: Path, num_bytes: int) -> int:
    """Open the shared memory that rank 0 made. CollectiveError unless it is a file of this user, of
    this size, that nobody else may open."""
    if path.parent != SHM_DIR or not path.name.startswith("outrider-"):
        raise CollectiveError(f"{path}: not a segment of shared memory of a rank")
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    about = os.fstat(fd)
    ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
    if not ours or stat.S_IMODE(about.st_mode) != 0o600 or about.st_size != num_bytes:
        os.close(fd)
        raise CollectiveError(
            f"{path}: rank 0 makes a file of this user, mode 0600, {num_bytes} bytes; this one has "
            f"user {about.st_uid}, mode {stat.filemode(about.st_mode)}, {about.st_size} bytes"
        )
    return fd


def _wait_for_count(store: dist.Store, key: str, count: int, timeout_s: float) -> None:
    """Wait until `count` ranks have added themselves to `key`. Raises CollectiveError."""
    deadline = time.monotonic() + timeout_s
    while (seen := store.add(key, 0)) < count:
        if time.monotonic() > deadline:
            with contextlib.suppress(FileNotFoundError):
                Path(store.get("shm/path").decode()).unlink()
            raise CollectiveError(f"{seen} of {count} ranks connected within {timeout_s:g} s")
        time.sleep(0.002)
