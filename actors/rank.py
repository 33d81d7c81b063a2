"""One rank: the loop that turns plans into steps, and the actor around it.

    leader (rank 0): inbox -> Plan -> the same Plan to every follower -> step -> StepEvent
    follower:        Plan -> digest check -> the same step
One Plan, one step: what reaches the inbox during a step is in the next Plan. Nothing active: the
leader sleeps on its inbox, followers on their wire. torch is imported only after pinning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import ray

from actors.depth import Depth
from actors.messages import Address, DivergenceError, Hello, Loading, Orders, Postbox, Wire
from actors.placement import device_index, near_cpus
from actors.spec import Spec
from model.config import RunConfig, load_config
from model.step import Join, Leave, Plan, Progress, StepEvent
from parallel.affinity import pin_process

if TYPE_CHECKING:
    from parallel.group import Group

DRIVER = -1
PLAN_TOKENS = 1 << 20
"""The leader stops draining its inbox at this many prompt tokens, so that a Plan fits a wire."""


class Steps(Protocol):
    """What the loop needs of model.runner.Runner."""

    @property
    def has_work(self) -> bool: ...
    def apply(self, commands: Sequence[Join | Leave]) -> None: ...
    def step(self) -> list[Progress]: ...
    def limit_drafts(self, depth: int) -> None: ...
    def digest(self) -> int: ...


class RankLoop:
    """run() until a Plan says stop. Only the leader has an inbox (and followers to tell)."""

    def __init__(
        self,
        runner: Steps,
        *,
        wire: Wire,
        followers: Sequence[Wire] | None,
        depth: Depth | None = None,
    ) -> None:
        """wire: the driver's (leader) or the leader's (follower). followers None: a follower.

        depth: what chooses the drafts of each plan; the leader's.
        """
        self._runner = runner
        self._wire = wire
        self._followers = followers
        self._depth = depth

    def run(self) -> None:
        if self._followers is None:
            self._follow()
        else:
            self._lead(self._followers)

    def _lead(self, followers: Sequence[Wire]) -> None:
        iteration = 0
        unstarted: set[int] = set()  # joined, but without a token: their prefill goes on
        for seq in count():
            commands, stop = self._orders()
            depth = self._depth and self._depth.choose()
            digest = self._runner.digest()
            plan = Plan(seq=seq, commands=commands, digest=digest, stop=stop, depth=depth)
            for follower in followers:
                follower.send(plan)
            if stop:
                return
            unstarted.update(c.request for c in commands if isinstance(c, Join))
            unstarted.difference_update(c.request for c in commands if isinstance(c, Leave))
            self._apply(plan)
            if not self._runner.has_work:
                continue
            started = perf_counter()
            progress = self._runner.step()
            step_s = perf_counter() - started
            iteration += 1
            self._wire.send(StepEvent(iteration, step_s, progress, depth))
            if self._depth and not unstarted:
                self._depth.note(step_s, progress)
            unstarted.difference_update(p.request for p in progress)

    def _orders(self) -> tuple[list[Join | Leave], bool]:
        """All that waits in the inbox, in order; sleeps on it when there is nothing else to do."""
        commands: list[Join | Leave] = []
        tokens = 0
        while (not commands and not self._runner.has_work) or self._wire.ready():
            orders = self._wire.receive(Orders)
            commands += orders.commands
            if orders.stop:
                return commands, True
            tokens += sum(len(c.tokens) for c in orders.commands if isinstance(c, Join))
            if tokens > PLAN_TOKENS:
                break
        return commands, False

    def _follow(self) -> None:
        for seq in count():
            plan = self._wire.receive(Plan)
            mine = self._runner.digest()
            if plan.seq != seq or plan.digest != mine:
                raise DivergenceError(
                    f"plan {plan.seq} of the leader has slot-table digest {plan.digest:#018x}; "
                    f"this rank is at plan {seq} with {mine:#018x}"
                )
            if plan.stop:
                return
            self._apply(plan)
            if self._runner.has_work:
                self._runner.step()

    def _apply(self, plan: Plan) -> None:
        self._runner.apply(plan.commands)
        if plan.depth is not None:
            self._runner.limit_drafts(plan.depth)


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """All that a rank is told at birth."""

    rank: int
    size: int
    epoch: int
    """Life number of the group: the ranks of one epoch talk to each other only."""
    spec: Spec
    run: RunConfig
    """Its num_pages are those that are wanted; `settle_pages` says what there is room for."""
    device: str
    collective: str
    """Kind of the group, "auto" for the device's own."""
    cpus: frozenset[int] | None
    """CPUs to pin every thread to; None pins nothing."""
    timeout_s: float
    """Of a collective, and of the ranks' first contact."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a rank lives."""

    node: str
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks and the driver meet rank 0."""

    host: str
    store_port: int
    inbox: Address
    relays: tuple[Address, ...]
    """One per follower, rank 1 first."""


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
        self._post = Postbox()
        self._store: Any = None
        self._group: Group | None = None
        self._runner: Any = None
        self._inbox: Wire | None = None
        self._relays: list[Wire] = []
        self._loop: RankLoop | None = None
        self._index = 0
        self._told_bytes = 0

    def open(self, host: str, peers: Sequence[bool], driver_here: bool) -> Rendezvous:
        """Rank 0: open store and wires, before anything slow. peers: which followers are here."""
        from parallel.group import host_store

        bind = "127.0.0.1" if all(peers) else host
        self._store = host_store(bind)
        self._inbox, inbox = self._post.listen(None if driver_here else host)
        relays = []
        for here in peers:
            wire, address = self._post.listen(None if here else host)
            self._relays.append(wire)
            relays.append(address)
        return Rendezvous(host=bind, store_port=self._store.port, inbox=inbox, relays=tuple(relays))

    def connect(self, meeting: Rendezvous, index: int) -> int:
        """First contact of all wires, then device `index`, then the collective group.

        -> KV pages this rank has room for. ConfigError when they are too few.
        """
        from parallel.device import claim_device, collective_kind
        from parallel.group import alone, connect, join_store

        setup = self.setup
        hello = Hello(epoch=setup.epoch, rank=setup.rank)
        if setup.rank == 0:
            assert self._inbox is not None
            for rank, wire in ((DRIVER, self._inbox), *enumerate(self._relays, start=1)):
                greet(wire, hello, expect=rank, timeout_s=setup.timeout_s)
            self._post.hide()
        else:
            self._inbox = self._post.connect(meeting.relays[setup.rank - 1])
            self._inbox.send(hello)
            self._inbox.receive(Hello, setup.timeout_s)
        self._index = index
        claim_device(setup.device, index)
        pages = settle_pages(setup, index)
        if setup.size == 1:
            self._group = alone()
            return pages
        if setup.rank != 0:
            self._store = join_store(meeting.host, meeting.store_port, setup.timeout_s)
        kind = collective_kind(setup.device) if setup.collective == "auto" else setup.collective
        self._group = connect(self._store, setup.rank, setup.size, kind, setup.timeout_s)
        return pages

    def load(self, num_pages: int) -> dict[str, Any]:
        """Weights onto the device, and warm-up. Returns what there is to know of this rank.

        num_pages: what every rank has room for.
        """
        from model.runner import Runner
        from parallel.device import open_device

        assert self._group is not None
        self._set_threads()
        device = open_device(self.setup.device, self._index, self._group)
        run = replace(self.setup.run, num_pages=num_pages)
        self._runner = Runner(run, device, on_load=self._on_load)
        self._runner.warm_up()
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
        """The one long call: until the driver says stop."""
        assert self._inbox is not None
        self._set_threads()
        run, leads = self.setup.run, self.setup.rank == 0
        self._loop = RankLoop(
            self._runner,
            wire=self._inbox,
            followers=self._relays if leads else None,
            depth=Depth(run.draft_tokens) if leads and run.auto_depth else None,
        )
        self._loop.run()

    def shutdown(self) -> None:
        self._runner = None
        if self._group is not None:
            self._group.close()
        self._store = None
        self._post.close()

    def _on_load(self, done: int, total: int) -> None:
        """The leader tells the driver, a hundred times at most."""
        if self.setup.rank == 0 and self._inbox and done - self._told_bytes >= total / 100:
            self._told_bytes = done
            self._inbox.send(Loading(done_bytes=done, total_bytes=total))

    def _set_threads(self) -> None:
        # The OpenMP pool belongs to the calling thread, and Ray may change threads between calls.
        import torch

        torch.set_num_threads(1 if self.setup.device == "npu" else len(self.setup.cpus or (0,)))


def settle_pages(setup: RankSetup, index: int) -> int:
    """KV pages that fit in what is free on device `index`, at most those that are wanted.

    The engine has seen to it for CPU ranks. Raises ConfigError, by how much memory is too little.
    """
    from parallel.device import free_device_bytes

    free_bytes = free_device_bytes(setup.device, index)
    if free_bytes is None:
        return setup.run.num_pages
    folder = Path(setup.run.model_dir)
    return setup.spec.resolve_pages(load_config(folder), folder, free_bytes)


def greet(wire: Wire, hello: Hello, *, expect: int, timeout_s: float) -> None:
    """The listening side of first contact."""
    other = wire.receive(Hello, timeout_s)
    if other != Hello(epoch=hello.epoch, rank=expect):
        raise DivergenceError(f"expected rank {expect} of epoch {hello.epoch}, {other} called")
    wire.send(hello)


@ray.remote
class RankActor:
    """Rank in a Ray worker process.

    No concurrency group: run() then holds the worker's main thread, which else wakes a hundred
    times a second (1 % of a core). wake() rather than __init__: an error of a method reaches the
    driver as it was raised.
    """

    _rank: Rank

    def wake(self, setup: RankSetup) -> Location:
        if setup.device == "npu" and setup.spec.parallel.rank_cpus == "auto":
            ids = ray.get_runtime_context().get_accelerator_ids()
            setup = replace(setup, cpus=near_cpus(setup.device, ids) or setup.cpus)
        self._rank = Rank(setup)
        node = ray.get_runtime_context().get_node_id()
        return Location(node=node, host=ray.util.get_node_ip_address(), pid=os.getpid())

    def open(self, host: str, peers: Sequence[bool], driver_here: bool) -> Rendezvous:
        return self._rank.open(host, peers, driver_here)

    def connect(self, meeting: Rendezvous) -> int:
        ids = ray.get_runtime_context().get_accelerator_ids()
        device = self._rank.setup.device
        return self._rank.connect(meeting, device_index(device, ids, os.environ))

    def load(self, num_pages: int) -> dict[str, Any]:
        return self._rank.load(num_pages)

    def run(self) -> None:
        self._rank.run()

    def shutdown(self) -> None:
        self._rank.shutdown()
