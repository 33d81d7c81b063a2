"""Ranks that work on one tensor: sum it, or gather it. One class for each way to meet.

    alone() -- one rank, no communication        threads(n) -- n ranks in one process, for tests
    connect(store, ...) -- one process a rank: shared memory, peer memory, gloo, nccl or hccl

Every rank of a group makes the same calls in the same order, and gets the same bits back: sums
run in rank order. Letters: rank 0..size-1 | x any tensor of one shape on all ranks
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
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
"""Shared memory relies on stores of one core being seen in order by another."""
SHM_BUFFER_BYTES = 4 << 20
PEER_BUFFER_BYTES = 1 << 20
PEER_DTYPES = {torch.bfloat16, torch.float32}


MAIL_ROWS, MAIL_WORDS = 256, 2560


@dataclass(frozen=True, slots=True)
class Mail:
    """Where kernels of this rank find words that kernels of the others send (kernels/peer.py)."""

    inbox: Tensor
    """[2, size, rows, words] int64, zero at first, written by the peers"""
    peers: Tensor
    """[size] int64: addresses of all inboxes as this rank sees them"""
    turns: Tensor
    """[rows] int32: how often each row was exchanged"""
    rank: int
    size: int

    @property
    def rows(self) -> int:
        return self.inbox.shape[2]

    @property
    def words(self) -> int:
        return self.inbox.shape[3]


HALL_ELEMENTS, HALL_PROGRAMS = 1 << 24, 128
"""bfloat16 that a Hall takes: 8,192 rows of 2,048; it holds them twice, 64 MiB"""


@dataclass(frozen=True, slots=True)
class Hall:
    """Where kernels of the ranks bring each other whole rows (kernels/two_shot.py)."""

    parts: Tensor
    """[size, share] bfloat16: parts of this rank's rows, one sender after the other"""
    room: Tensor
    """[elements] bfloat16: finished rows of all ranks"""
    flags: Tensor
    """[2, size, programs] int32, zero at first: what each sender's programs have told"""
    peers: Tensor
    """[3, size] int64: addresses of every rank's parts, room and flags as this rank sees them"""
    turns: Tensor
    """[programs] int32: how often each program has met its like"""
    rank: int
    size: int

    @property
    def programs(self) -> int:
        return self.flags.shape[2]


class CollectiveError(RuntimeError):
    """A rank did not come to a collective in time."""


class Group:
    """A group of one: the base class, and what a whole copy of a module is built with."""

    rank: int = 0
    size: int = 1
    mail: Mail | None = None
    hall: Hall | None = None
    """Both set where kernels of the ranks can write to each other."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks; same shape and dtype. `x` may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of every rank in rank order: [size, *x.shape]."""
        return x.unsqueeze(0)

    def close(self) -> None:
        """Leave the group. No collective may follow."""


def alone() -> Group:
    """The group of one rank."""
    return Group()


class ThreadGroup(Group):
    """Ranks as threads of one process. Slow and exact; no set-up."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Tensor | None]) -> None:
        self.rank, self.size = rank, len(table)
        self._meeting, self._table = meeting, table

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self._table[self.rank] = x
        self._meeting.wait()
        gathered = torch.stack([t for t in self._table if t is not None])
        self._meeting.wait()
        return gathered

    def close(self) -> None:
        self._meeting.abort()


def threads(size: int, timeout_s: float = 60.0) -> list[Group]:
    """One group handle for each of `size` threads."""
    meeting = threading.Barrier(size, timeout=timeout_s)
    table: list[Tensor | None] = [None] * size
    return [ThreadGroup(rank, meeting, table) for rank in range(size)]


class ProcessGroup(Group):
    """Ranks as processes, through torch.distributed."""

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
    """GPUs that read each other's memory: small tensors in one shot, large ones through NCCL.

    One-shot: every rank reads all parts and sums them in rank order. Peer loads only, no multicast.
    A small gather is the same sum over parts that are zero elsewhere, which changes no bit pattern
    of a finite float32 or of a small int32.
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
        inbox, peers = self._shared((2, size, MAIL_ROWS, MAIL_WORDS), torch.int64)
        turns = torch.zeros(MAIL_ROWS, dtype=torch.int32, device=device)
        self.mail = Mail(inbox, peers, turns, rank, size)
        parts, of_parts = self._shared((size, HALL_ELEMENTS // size), torch.bfloat16)
        room, of_room = self._shared((HALL_ELEMENTS,), torch.bfloat16)
        flags, of_flags = self._shared((2, size, HALL_PROGRAMS), torch.int32)
        peers = torch.stack((of_parts, of_room, of_flags))
        self.hall = Hall(parts, room, flags, peers, turns.new_zeros(HALL_PROGRAMS), rank, size)
        torch.cuda.synchronize()
        dist.barrier()  # no word may come before its inbox is zero

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros that the peers can write to, and the addresses [size] of every rank's."""
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(shape, dtype=dtype, device=torch.device("cuda")).zero_()
        assert dist.group.WORLD is not None
        all_ = symmetric.rendezvous(mine, dist.group.WORLD)
        addresses = [all_.get_buffer(r, shape, dtype).data_ptr() for r in range(self.size)]
        return mine, torch.tensor(addresses, dtype=torch.int64, device=mine.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > PEER_BUFFER_BYTES or x.nbytes % 16 or x.dtype not in PEER_DTYPES:
            return super().all_reduce(x)
        return self._one_shot(x.contiguous())

    def all_gather(self, x: Tensor) -> Tensor:
        num_bytes = x.nbytes * self.size
        if num_bytes > PEER_BUFFER_BYTES or num_bytes % 16 or x.element_size() != 4:
            return super().all_gather(x)
        if x.shape not in self._parts:  # zero, except for this rank's part, for good
            self._parts[x.shape] = torch.zeros(self.size, *x.shape, device=x.device)
        parts = self._parts[x.shape]
        parts[self.rank].copy_(x.view(torch.float32))
        return self._one_shot(parts).view(x.dtype)

    def _one_shot(self, x: Tensor) -> Tensor:
        room = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(room, x, "sum", self._name)


class SharedMemoryGroup(Group):
    """CPU ranks of one host: each writes its part into a shared mapping, then reads the others'.

    Every rank owns a counter and two buffers, used in turn. Publishing collective n means: the
    data lies in buffer n % 2 and the counter says n. A rank that has seen everyone's n + 1 knows
    that everyone has read n, so buffer n % 2 is free again: two buffers suffice. The file is
    unlinked as soon as all have mapped it, so nothing is left behind however a rank ends.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s, self._seq = rank, size, timeout_s, 0
        head_bytes = 64 * size
        total = head_bytes + 2 * size * SHM_BUFFER_BYTES
        if rank == 0:
            path = SHM_DIR / f"outrider-{secrets.token_hex(8)}"
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
            fd = os.open(path, os.O_RDWR)
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
        """Yield [size, n] views of everyone's data, a buffer at a time."""
        step = SHM_BUFFER_BYTES // flat.element_size()
        for part in flat.split(step) if flat.numel() > step else (flat,):
            self._seq += 1
            num_bytes = part.numel() * part.element_size()
            board = self._data[self._seq & 1][:, :num_bytes].view(flat.dtype)
            board[self.rank].copy_(part)
            self._counters[self.rank] = self._seq
            self._await_all()
            yield board

    def _await_all(self) -> None:
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
                        f"rank {self.rank}: rank {other} did not come to collective {seq} "
                        f"within {self._timeout_s:g} s, or has left"
                    )
                if spins < 20_000:
                    os.sched_yield()  # a sleep, even of 0, would cost a timer tick
                else:
                    time.sleep(0.0005)


def shm_available() -> bool:
    """True where CPU ranks of one host may meet in shared memory."""
    return (
        platform.machine() in SHM_MACHINES and SHM_DIR.is_dir() and hasattr(os, "posix_fallocate")
    )


def host_store(host: str, timeout_s: float = 60.0) -> dist.TCPStore:
    """A rendezvous that listens on `host` at a port the system picks (`.port`)."""
    return dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join_store(host: str, port: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """The rendezvous that rank 0 hosts."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect(
    store: dist.Store, rank: int, size: int, kind: str = "shm", timeout_s: float = 120.0
) -> Group:
    """Meet the other ranks in `store`; returns when all have come.

    kind is "shm", "gloo", "peer", "nccl" or "hccl". Raises CollectiveError or torch's DistError
    when a rank stays away longer than `timeout_s`.
    """
    if size == 1:
        return alone()
    if kind == "shm":
        if not shm_available():
            raise CollectiveError(
                f"shared-memory collectives need Linux on x86-64, this is {platform.machine()}: "
                f"set parallel.collective: gloo in cluster.yaml"
            )
        return SharedMemoryGroup(store, rank, size, timeout_s)
    if kind == "peer":
        return PeerGroup(store, rank, size, timeout_s)
    return ProcessGroup(kind, store, rank, size, timeout_s)


def _wait_for_count(store: dist.Store, key: str, count: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (seen := store.add(key, 0)) < count:
        if time.monotonic() > deadline:
            with contextlib.suppress(FileNotFoundError):
                Path(store.get("shm/path").decode()).unlink()
            raise CollectiveError(f"{seen} of {count} ranks came within {timeout_s:g} s")
        time.sleep(0.002)
