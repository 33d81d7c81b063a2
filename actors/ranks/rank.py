"""One rank's life, without Ray: pin the process, meet the others, load, run the loop, shut down.

    open (rank 0) -> connect -> load -> run -> shutdown
Rank 0 listens; the driver and the other ranks connect to it. torch is imported only after the
process is pinned, so that its threads inherit the CPU range.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.cluster.spec import Spec
from outrider.actors.errors import DivergenceError
from outrider.actors.ranks.connection import Address, Connection, Connector
from outrider.actors.ranks.depth import Depth
from outrider.actors.ranks.loop import RankLoop
from outrider.actors.ranks.messages import DRIVER, Hello, Loading
from outrider.actors.ranks.processes import ProcessId
from outrider.model.config import RunConfig, load_config
from outrider.parallel.affinity import pin_process

if TYPE_CHECKING:
    from outrider.parallel.group import Group

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """All that a rank is told when its process starts."""

    rank: int
    size: int
    spec: Spec
    run: RunConfig
    """Its num_pages is what is wanted; `settle_pages` finds what there is room for."""
    device: str
    collective: str
    """parallel.collective of cluster.yaml; "auto": the device's own."""
    cpus: frozenset[int] | None
    """CPUs to pin every thread to; None pins nothing."""
    timeout_s: float
    """The longest wait for another rank, in a collective or for its first message."""
    files: str
    """What the names of the group's files begin with, and those of no other group."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a rank runs: Ray node, address of its machine, process."""

    node: str
    host: str
    process: ProcessId
    leftovers: tuple[str, ...]
    """Files and folders that it leaves behind if it is killed at the wrong moment."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where rank 0 listens, for the driver and for the other ranks."""

    host: str
    store_port: int
    secret: str
    """Names the group's part of the store. It travels over Ray only."""
    inbox: Address
    """The driver's connection."""
    relays: tuple[Address, ...]
    """The followers' connections, rank 1 first."""


class Rank:
    """One rank's life: open, connect, load, run, shutdown. Plain: a test needs no Ray for it."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if setup.cpus is not None:
            if setup.device != "npu":
                os.environ["OMP_NUM_THREADS"] = str(len(setup.cpus))
            pin_process(setup.cpus)
        if setup.device != "npu":
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        self._set_threads()
        self._sockets, self._shared = _files_of(setup)
        self._connector = Connector(folder=self._sockets)
        self._store: Any = None
        self._group: Group | None = None
        self._runner: Any = None
        self._inbox: Connection | None = None
        self._relays: list[Connection] = []
        self._loop: RankLoop | None = None
        self._index = 0
        self._reported_bytes = 0

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Location.leftovers. Rank 0 makes the files, the others open them."""
        return (self._sockets, self._shared) if self.setup.rank == 0 else ()

    def open(self, host: str, peers: Sequence[bool], driver_here: bool) -> Rendezvous:
        """Rank 0: open the store and listen, before anything slow.

        host: this machine's address. peers: of each follower, whether it is on this machine.
        """
        from outrider.parallel.group import hidden_in, host_store

        bind = LOOPBACK if all(peers) else host
        server, secret = host_store(bind), secrets.token_hex(16)
        self._store = hidden_in(server, secret)
        self._inbox, inbox = self._connector.listen(None if driver_here else host)
        relays = []
        for here in peers:
            connection, address = self._connector.listen(None if here else host)
            self._relays.append(connection)
            relays.append(address)
        return Rendezvous(
            host=bind, store_port=server.port, secret=secret, inbox=inbox, relays=tuple(relays)
        )

    def connect(self, rendezvous: Rendezvous, index: int) -> int:
        """Greet all peers, claim device `index`, join the collective group.

        -> the KV pages that this rank has room for. ConfigError when they are too few.
        """
        from outrider.parallel.devices import claim_device, collective_kind
        from outrider.parallel.group import alone, connect, hidden_in, join_store

        setup = self.setup
        hello = Hello(rank=setup.rank)
        if setup.rank == 0:
            assert self._inbox is not None
            for rank, connection in ((DRIVER, self._inbox), *enumerate(self._relays, start=1)):
                exchange_hello(connection, hello, expect=rank, timeout_s=setup.timeout_s)
            self._connector.remove_folder()
        else:
            self._inbox = self._connector.connect(rendezvous.relays[setup.rank - 1])
            self._inbox.send(hello)
            self._inbox.receive(Hello, setup.timeout_s)
        self._index = index
        claim_device(setup.device, index)
        pages = settle_pages(setup, index)
        if setup.size == 1:
            self._group = alone()
            return pages
        if setup.rank != 0:
            server = join_store(rendezvous.host, rendezvous.store_port, setup.timeout_s)
            self._store = hidden_in(server, rendezvous.secret)
        kind = collective_kind(setup.device) if setup.collective == "auto" else setup.collective
        if rendezvous.host == LOOPBACK:  # gloo would listen at the address of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._group = connect(
            self._store, setup.rank, setup.size, kind, setup.timeout_s, file=self._shared
        )
        return pages

    def load(self, num_pages: int) -> dict[str, Any]:
        """Load the weights and warm up; -> this rank's statistics (pid, CPUs, allocated bytes).

        num_pages: what every rank has room for.
        """
        from outrider.model.runner import Runner
        from outrider.model.warmup import warm_up
        from outrider.parallel.devices import open_device

        assert self._group is not None
        if not self._group.keeps_store:  # every rank has connected: nobody asks for it any more
            self._store = None
        self._set_threads()
        device = open_device(self.setup.device, self._index, self._group)
        run = replace(self.setup.run, num_pages=num_pages)
        self._runner = Runner(run, device, on_load=self._on_load)
        warm_up(self._runner)
        if self.setup.cpus is not None:
            pin_process(self.setup.cpus)
        if self.setup.rank == 0 and self._inbox is not None:
            self._inbox.send(Loading(done_bytes=0, total_bytes=0, ended=True))
        return {
            "rank": self.setup.rank,
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "allocated_bytes": self._runner.allocated_bytes(),
            "run_ahead": self._runner.run_ahead,
        }

    def run(self) -> None:
        """Step until the driver says stop: one long call."""
        assert self._inbox is not None
        self._set_threads()
        run, leads = self.setup.run, self.setup.rank == 0
        self._loop = RankLoop(
            self._runner,
            connection=self._inbox,
            followers=self._relays if leads else None,
            depth=Depth(run.draft_tokens) if leads and run.auto_depth else None,
        )
        self._loop.run()

    def shutdown(self) -> None:
        self._runner = None
        if self._group is not None:
            self._group.close()
        self._store = None
        self._connector.close()

    def _on_load(self, done: int, total: int) -> None:
        """The leader tells the driver, a hundred times at most."""
        if self.setup.rank == 0 and self._inbox and done - self._reported_bytes >= total / 100:
            self._reported_bytes = done
            self._inbox.send(Loading(done_bytes=done, total_bytes=total))

    def _set_threads(self) -> None:
        # The OpenMP pool belongs to the calling thread, and Ray may change threads between calls.
        import torch

        torch.set_num_threads(1 if self.setup.device == "npu" else len(self.setup.cpus or (0,)))


def _files_of(setup: RankSetup) -> tuple[str, str]:
    """The folder of a group's sockets, and the file of its shared memory."""
    folder = os.path.join(tempfile.gettempdir(), setup.files)
    return folder, os.path.join("/dev/shm", setup.files)


def settle_pages(setup: RankSetup, index: int) -> int:
    """The KV pages that fit in what is free on device `index`, at most those that are wanted.

    For CPU ranks the engine has checked the host's memory before. Raises ConfigError that says by
    how much memory is too little.
    """
    from outrider.model.weights import settle
    from outrider.parallel.devices import free_device_bytes

    free_bytes = free_device_bytes(setup.device, index)
    if free_bytes is None:
        return setup.run.num_pages
    folder = Path(setup.run.model_dir)
    model = settle(load_config(folder), folder)
    return setup.spec.resolve_pages(model, folder, free_bytes)


def exchange_hello(connection: Connection, hello: Hello, *, expect: int, timeout_s: float) -> None:
    """The listening side's part: receive the peer's Hello, which must be of rank `expect`, and
    answer with ours. DivergenceError when another rank called."""
    other = connection.receive(Hello, timeout_s)
    if other != Hello(rank=expect):
        raise DivergenceError(f"expected rank {expect} to call, {other} called")
    connection.send(hello)
