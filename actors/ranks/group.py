"""The group of ranks as the driver sees it: start, commands in, events out, end.

    start(): prepare all -> rank 0 listens -> all connect -> all load -> all run()
    send(Commands) --> leader      event() <-- leader      ended(): why the first rank stopped
A RankGroup starts once and ends once. The unit of failure is the whole group: when one rank ends,
all are killed, and another RankGroup takes their place. Ray starts, watches and kills the
processes; each iteration goes over a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import msgspec
import ray
import zmq.asyncio
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from outrider.actors.cluster.placement import bundle_options, bundles, rank_env
from outrider.actors.cluster.spec import Spec
from outrider.actors.errors import EngineDeadError
from outrider.actors.ranks.actor import RankActor
from outrider.actors.ranks.connection import Connection, Connector
from outrider.actors.ranks.messages import DRIVER, Commands, Hello, Loading
from outrider.actors.ranks.processes import ProcessId
from outrider.actors.ranks.rank import Location, RankSetup, Rendezvous
from outrider.model.config import ConfigError, RunConfig
from outrider.model.step import StepEvent

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 0.3
"""After the first failure, how long other ranks may still report one nearer to the cause."""
KILL_TIMEOUT_S = 10.0
RAY_KILL_S = 1.0
"""How long Ray may take to kill ranks. Of those that end otherwise it tells all its drivers, on
their stdout, as of a failure; but it takes 5 s to kill a process that was stopped."""
USER_ERRORS = {"ConfigError", "DeviceError", "AffinityError", "PlacementError"}


class RanksLostError(EngineDeadError):
    """A rank died or hangs. Nothing says that the next one will."""


class Ranks(Protocol):
    """What the driver needs of a group of ranks. Tests have one whose ranks are threads."""

    async def start(self) -> int | None:
        """Returns when every rank is ready: the KV pages that each holds, None: as planned.

        RanksLostError when one dies or hangs meanwhile; ConfigError or EngineDeadError when one
        cannot start.
        """
        ...

    def send(self, commands: Commands) -> None: ...

    @property
    def loaded_bytes(self) -> tuple[int, int]:
        """Bytes loaded and to load, over all ranks; zeros before they are known."""
        ...

    async def event(self) -> StepEvent:
        """The next step's. EngineDeadError for what cannot be read."""
        ...

    async def ended(self) -> EngineDeadError:
        """Waits until a rank stops or dies, and says why."""
        ...

    def stats(self) -> list[dict[str, Any]]: ...

    def warnings(self) -> list[str]: ...

    async def stop(self) -> None:
        """Let every rank leave its loop; kill those that do not."""
        ...

    async def kill(self) -> None:
        """Returns when no rank process is left."""
        ...


class RankGroup:
    """Ranks as Ray actors in the bundles 1..n of a placement group; the driver has bundle 0."""

    def __init__(
        self,
        spec: Spec,
        run: RunConfig,
        placement: PlacementGroup,
        *,
        cpus: Sequence[frozenset[int] | None],
        name: str,
    ) -> None:
        self._spec = spec
        self._name = name
        self._placement = placement
        files = f"outrider-{secrets.token_hex(8)}"
        self._setups = [
            RankSetup(
                rank=rank,
                size=run.tensor_parallel,
                spec=spec,
                run=run,
                device=spec.device,
                collective=spec.parallel.collective,
                cpus=cpus[rank],
                timeout_s=spec.ray.collective_timeout_s,
                files=files,
            )
            for rank in range(run.tensor_parallel)
        ]
        self._connector = Connector(zmq.asyncio.Context(io_threads=1))
        self._connection: Connection | None = None
        self._actors: list[Any] = []
        self._places: dict[int, Location] = {}
        """By rank, of those that have said where they are."""
        self._runs: list[asyncio.Task[None]] = []
        self._rank_stats: list[dict[str, Any]] = []
        self._loaded = (0, 0)
        self._stage, self._limit = "", "loading_s"
        """Of the start: what the ranks are at, and the key of the limit that holds for it."""
        self._last_sign_s = time.monotonic()

    async def start(self) -> int:
        starting = asyncio.ensure_future(self._start())
        watching = asyncio.ensure_future(self._watch_start())
        try:
            await asyncio.wait({starting, watching}, return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else watching.result()
        finally:
            for task in (starting, watching):
                task.cancel()
            await asyncio.gather(starting, watching, return_exceptions=True)

    async def _watch_start(self) -> int:
        """Raises when the start takes too long as a whole, or since its last sign of progress."""
        whole_s, began_s = self._spec.ray.start_timeout_s, time.monotonic()
        while True:
            limit_s = getattr(self._spec.recovery, self._limit)
            now = time.monotonic()
            whole_left_s, left_s = began_s + whole_s - now, self._last_sign_s + limit_s - now
            if whole_left_s <= 0:
                raise EngineDeadError(
                    f"the ranks were not ready within ray.start_timeout_s = {whole_s:g} s; "
                    f"they had got to {self._stage!r}"
                )
            if left_s <= 0:
                raise RanksLostError(
                    f"the ranks showed no progress for {limit_s:g} s (recovery.{self._limit}); "
                    f"they had got to {self._stage!r}"
                )
            await asyncio.sleep(min(whole_left_s, left_s))

    def _enter(self, stage: str, limit: str = "loading_s") -> None:
        """The start has got to this stage."""
        self._stage, self._limit, self._last_sign_s = stage, limit, time.monotonic()

    async def _start(self) -> int:
        wanted, actor = bundles(self._spec), cast(Any, RankActor)
        for setup in self._setups:
            options = bundle_options(
                self._placement,
                1 + setup.rank,
                wanted[1 + setup.rank],
                name=f"{self._name}:rank{setup.rank}",
                env=rank_env(setup.device),
            )
            self._actors.append(actor.options(**options).remote())
        self._enter("prepare")
        preparing = [self._prepare(setup) for setup in self._setups]
        await _first_error(preparing, self._places)
        rendezvous = await self._open()
        connecting = self._all("connect", [(rendezvous,)] * len(self._actors))
        pages = min(await both(connecting, self._say_hello(rendezvous)))
        loading = self._all("load", [(pages,)] * len(self._actors))
        self._rank_stats = await both(loading, self._follow_loading())
        self._runs = [asyncio.ensure_future(_value(actor.run.remote())) for actor in self._actors]
        return pages

    async def _prepare(self, setup: RankSetup) -> None:
        place = await _value(self._actors[setup.rank].prepare.remote(setup))
        self._places[setup.rank] = place

    async def _open(self) -> Rendezvous:
        leader, here = self._places[0], ray.get_runtime_context().get_node_id()
        peers = [self._places[setup.rank].node == leader.node for setup in self._setups[1:]]
        opened = _value(self._actors[0].open.remote(leader.host, peers, leader.node == here))
        return (await _first_error([opened], self._places))[0]

    async def _say_hello(self, rendezvous: Rendezvous) -> None:
        hello = Hello(rank=DRIVER)
        self._connection = self._connector.connect(rendezvous.inbox)
        self._connection.send(hello)
        answer = await self._connection.receive_async(Hello)
        assert answer == Hello(rank=0), f"{answer} is not the leader's"

    async def _follow_loading(self) -> None:
        """Take the leader's reports of its loading, up to the last."""
        assert self._connection is not None
        while not (report := await self._connection.receive_async(Loading)).ended:
            self._loaded = (report.done_bytes, report.total_bytes)
            is_last = report.done_bytes == report.total_bytes
            self._enter(*(("warm up", "warmup_s") if is_last else ("load",)))

    @property
    def loaded_bytes(self) -> tuple[int, int]:
        """Bytes loaded and to load, over all ranks; zeros before they are known."""
        done, total = self._loaded
        return done * len(self._setups), total * len(self._setups)

    def warnings(self) -> list[str]:
        """What the user should know although the ranks run."""
        niced = [stats["rank"] for stats in self._rank_stats if stats["nice"] > 0]
        if not niced:
            return []
        return [
            f"ranks {niced} run at a lower priority (nice), so other programs stretch every step: "
            "start this Ray cluster with RAY_worker_niceness=0 in its environment"
        ]

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._enter(method)
        calls = [
            _value(getattr(actor, method).remote(*args))
            for actor, args in zip(self._actors, arguments, strict=True)
        ]
        return await _first_error(calls, self._places)

    def send(self, commands: Commands) -> None:
        assert self._connection is not None
        with contextlib.suppress(ConnectionError):  # then ended() says why
            self._connection.send(commands)

    async def event(self) -> StepEvent:
        assert self._connection is not None
        try:
            return await self._connection.receive_async(StepEvent)
        except msgspec.DecodeError as error:
            raise EngineDeadError(f"rank 0 sent what is no step: {error}") from None

    async def ended(self) -> EngineDeadError:
        try:
            await _first_error([asyncio.shield(run) for run in self._runs], self._places)
        except EngineDeadError as error:
            return error
        except ConfigError as error:
            return EngineDeadError(str(error))
        return EngineDeadError("every rank left its loop without being told to")

    def stats(self) -> list[dict[str, Any]]:
        """Of each rank: pid, CPUs, allocated bytes; empty before all have loaded."""
        return self._rank_stats

    async def stop(self) -> None:
        if self._runs and not any(run.done() for run in self._runs):
            with contextlib.suppress(TimeoutError, EngineDeadError, ConfigError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    self.send(Commands(stop=True))
                    await _first_error([asyncio.shield(run) for run in self._runs], self._places)
                    await self._all("shutdown", [()] * len(self._actors))
        await self.kill()

    async def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        self._runs = []
        here = ray.get_runtime_context().get_node_id()
        places = [place for place in self._places.values() if place.node == here]
        processes = [place.process for place in places]
        if await _living(processes, RAY_KILL_S):
            for process in processes:
                process.kill()
            if living := await _living(processes, KILL_TIMEOUT_S):
                log.error("ranks with pids %s outlive their kill", living)
        for path in (path for place in places for path in place.leftovers):
            with contextlib.suppress(FileNotFoundError):
                (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
        if not self._connector.context.closed:
            self._connector.close()


async def _living(processes: Sequence[ProcessId], limit_s: float) -> list[int]:
    """The pids of those that have not ended after so many seconds; returns early without any."""
    deadline = time.monotonic() + limit_s
    while living := [process.pid for process in processes if not process.has_ended()]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    return living


async def _value(ref: Any) -> Any:
    return await ref


async def _first_error(
    calls: Sequence[Coroutine[Any, Any, T] | asyncio.Future[T]], places: Mapping[int, Location]
) -> list[T]:
    """The results in rank order; or raises the failure nearest to the cause, as an error of ours.

    A rank that fails makes the others fail too, so those get GRACE_S to report as well.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        if pending and all(_distance_from_cause(error) > 1 for error in errors):
            await asyncio.wait(pending, timeout=GRACE_S)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
    failures = [
        (rank, error)
        for rank, task in enumerate(tasks)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None
    ]
    if failures:
        raise explain(*min(failures, key=lambda failure: _distance_from_cause(failure[1])), places)
    return [task.result() for task in tasks]


async def both(calls: Coroutine[Any, Any, T], beside: Coroutine[Any, Any, None]) -> T:
    """The result of calls to ranks, once `beside` has ended too; the first error of either at once.

    An error beside may come of a rank's, so the calls get GRACE_S to report theirs.
    """
    tasks = asyncio.ensure_future(calls), asyncio.ensure_future(beside)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if tasks[0] not in done:
            await asyncio.wait(tasks[:1], timeout=GRACE_S)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            raise errors[0]
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _distance_from_cause(error: BaseException) -> int:
    """How far an error is from what went wrong; 0: it is the cause.

    A lost peer or a timeout is what the other ranks see of it.
    """
    cause = _cause(error)
    if isinstance(cause, ConfigError) or type(cause).__name__ in USER_ERRORS:
        return 0
    if isinstance(cause, RayActorError):
        return 1
    if isinstance(cause, (TimeoutError, ConnectionError)) or "Collective" in type(cause).__name__:
        return 3
    return 2


def _cause(error: BaseException) -> BaseException:
    """The exception as the rank raised it, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return error.cause
    return error


def explain(
    rank: int, error: BaseException, places: Mapping[int, Location] = MappingProxyType({})
) -> Exception:
    """One rank's failure in a line: ConfigError if the user can mend it, RanksLostError if the rank
    died, else EngineDeadError."""
    cause = _cause(error)
    who = f"rank {rank}" + (f" (pid {places[rank].process.pid})" if rank in places else "")
    if isinstance(cause, RayActorError):
        word = "died" if isinstance(cause, ActorDiedError) else "is unreachable"
        return RanksLostError(f"{who} {word}: {_exit_detail(str(cause))}", str(cause))
    if isinstance(cause, ConfigError) or type(cause).__name__ in USER_ERRORS:
        return ConfigError(f"rank {rank}: {cause}")
    return EngineDeadError(f"{who} failed: {type(cause).__name__}: {cause}", str(error))


def _exit_detail(text: str) -> str:
    """The reason in Ray's text, without its advice; the whole text is in the error's detail."""
    for mark in ("Worker exit detail: ", "exit_detail: ", "The actor is dead because "):
        _, found, rest = text.partition(mark)
        if found:
            return " ".join(rest.split("There are some potential")[0].split())[:300]
    return " ".join(text.split())[:300]
