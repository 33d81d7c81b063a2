"""The group of ranks as the driver sees it: start, orders in, events out, end. Hides the transport.

    start(): wake all -> rank 0 opens wires -> all connect -> all load -> all run()
    post(orders) --> leader        event() <-- leader        ended(): why the first rank stopped
A RankGroup starts once and ends once. The unit of failure is the whole group: when one rank ends,
all are killed. Ray carries birth and death; each iteration goes over a wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

import ray
import zmq.asyncio
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from outrider.actors.cluster.placement import bundle_options, bundles, rank_env
from outrider.actors.cluster.spec import Spec
from outrider.actors.errors import EngineDeadError
from outrider.actors.ranks.actor import RankActor
from outrider.actors.ranks.messages import DRIVER, Commands, Hello, Loading
from outrider.actors.ranks.rank import Location, RankSetup, Rendezvous
from outrider.actors.ranks.wire import Postbox, Wire
from outrider.model.config import ConfigError, RunConfig
from outrider.model.step import StepEvent

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 0.3
"""After a failure that may be an echo, how long the other ranks may still report its cause."""
KILL_TIMEOUT_S = 10.0
USER_ERRORS = {"ConfigError", "DeviceError", "AffinityError", "PlacementError"}


class Ranks(Protocol):
    """What the driver needs of a group; tests put threads behind it."""

    async def start(self) -> int | None:
        """Returns when every rank is ready: the KV pages each holds, None: as was planned.

        ConfigError or EngineDeadError otherwise.
        """
        ...

    def post(self, orders: Commands) -> None: ...

    async def event(self) -> StepEvent: ...

    async def ended(self) -> EngineDeadError:
        """Waits until a rank stops or dies, and says why."""
        ...

    def stats(self) -> list[dict[str, Any]]: ...

    async def stop(self) -> None:
        """Orderly end; kills what does not follow."""
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
            )
            for rank in range(run.tensor_parallel)
        ]
        self._post = Postbox(zmq.asyncio.Context(io_threads=1))
        self._wire: Wire | None = None
        self._actors: list[Any] = []
        self._places: list[Location] = []
        self._runs: list[asyncio.Task[None]] = []
        self._facts: list[dict[str, Any]] = []
        self._loaded = (0, 0)
        self._stage = ""

    async def start(self) -> int:
        limit_s = self._spec.ray.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._start()
        except TimeoutError:
            raise EngineDeadError(
                f"the ranks were not ready within ray.start_timeout_s = {limit_s:g} s; "
                f"they had got to {self._stage!r}"
            ) from None

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
        self._places = await self._all("wake", [(setup,) for setup in self._setups])
        meeting = await self._open()
        greeting = asyncio.ensure_future(self._greet(meeting))
        try:
            pages = min(await self._all("connect", [(meeting,)] * len(self._actors)))
            await greeting
        finally:
            greeting.cancel()
        listening = asyncio.ensure_future(self._listen())
        try:
            self._facts = await self._all("load", [(pages,)] * len(self._actors))
            await listening
        finally:
            listening.cancel()
        self._runs = [asyncio.ensure_future(_value(actor.run.remote())) for actor in self._actors]
        return pages

    async def _open(self) -> Rendezvous:
        leader, here = self._places[0], ray.get_runtime_context().get_node_id()
        peers = [place.node == leader.node for place in self._places[1:]]
        opened = _value(self._actors[0].open.remote(leader.host, peers, leader.node == here))
        return (await _first_error([opened], self._places))[0]

    async def _greet(self, meeting: Rendezvous) -> None:
        hello = Hello(rank=DRIVER)
        self._wire = self._post.connect(meeting.inbox)
        self._wire.send(hello)
        answer = await self._wire.receive_async(Hello)
        assert answer == Hello(rank=0), f"{answer} is not the leader's"

    async def _listen(self) -> None:
        """The leader's loading notes, up to the last."""
        assert self._wire is not None
        while not (note := await self._wire.receive_async(Loading)).ended:
            self._loaded = (note.done_bytes, note.total_bytes)

    @property
    def loaded_bytes(self) -> tuple[int, int]:
        """Bytes loaded and to load, over all ranks; zeros before they know."""
        done, total = self._loaded
        return done * len(self._setups), total * len(self._setups)

    def notes(self) -> list[str]:
        """What the user should know of ranks that do run."""
        niced = [part["rank"] for part in self._facts if part["nice"] > 0]
        if not niced:
            return []
        return [
            f"ranks {niced} run at a lower priority (nice), so other programs stretch every step: "
            "start this Ray cluster with RAY_worker_niceness=0 in its environment"
        ]

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._stage = method
        calls = [
            _value(getattr(actor, method).remote(*args))
            for actor, args in zip(self._actors, arguments, strict=True)
        ]
        return await _first_error(calls, self._places)

    def post(self, orders: Commands) -> None:
        assert self._wire is not None
        with contextlib.suppress(ConnectionError):  # then ended() says why
            self._wire.send(orders)

    async def event(self) -> StepEvent:
        assert self._wire is not None
        return await self._wire.receive_async(StepEvent)

    async def ended(self) -> EngineDeadError:
        try:
            await _first_error([asyncio.shield(run) for run in self._runs], self._places)
        except (EngineDeadError, ConfigError) as error:
            return EngineDeadError(str(error), getattr(error, "detail", ""))
        return EngineDeadError("every rank left its loop without being told to")

    def stats(self) -> list[dict[str, Any]]:
        """Of each rank: pid, CPUs, allocated bytes; empty before all have loaded."""
        return self._facts

    async def stop(self) -> None:
        if self._runs and not any(run.done() for run in self._runs):
            with contextlib.suppress(TimeoutError, EngineDeadError, ConfigError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    self.post(Commands(stop=True))
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
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for rank, place in enumerate(self._places):
            while place.node == here and _alive(place.pid):
                if time.monotonic() > deadline:
                    log.error("rank %d (pid %d) outlives its kill", rank, place.pid)
                    break
                await asyncio.sleep(0.01)
        if not self._post.context.closed:
            self._post.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _value(ref: Any) -> Any:
    return await ref


async def _first_error(
    calls: Sequence[Coroutine[Any, Any, T] | asyncio.Future[T]], places: Sequence[Location]
) -> list[T]:
    """All results in rank order, or the failure that best names the cause, as our own error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        if pending and all(_remoteness(error) > 1 for error in errors):
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
        raise explain(*min(failures, key=lambda failure: _remoteness(failure[1])), places)
    return [task.result() for task in tasks]


def _remoteness(error: BaseException) -> int:
    """Of a failure from its cause: a lost peer or a timeout is what the other ranks see of it."""
    cause = _cause(error)
    if isinstance(cause, ConfigError) or type(cause).__name__ in USER_ERRORS:
        return 0
    if isinstance(cause, RayActorError):
        return 1
    if isinstance(cause, (TimeoutError, ConnectionError)) or "Collective" in type(cause).__name__:
        return 3
    return 2


def _cause(error: BaseException) -> BaseException:
    """The exception as the rank raised it."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return error.cause
    return error


def explain(rank: int, error: BaseException, places: Sequence[Location] = ()) -> Exception:
    """One rank's failure in a line: ConfigError if a user can change it, else EngineDeadError."""
    cause = _cause(error)
    who = f"rank {rank}" + (f" (pid {places[rank].pid})" if rank < len(places) else "")
    if isinstance(cause, RayActorError):
        word = "died" if isinstance(cause, ActorDiedError) else "is unreachable"
        return EngineDeadError(f"{who} {word}: {_exit_detail(str(cause))}", str(cause))
    if isinstance(cause, ConfigError) or type(cause).__name__ in USER_ERRORS:
        return ConfigError(f"rank {rank}: {cause}")
    return EngineDeadError(f"{who} failed: {type(cause).__name__}: {cause}", str(error))


def _exit_detail(text: str) -> str:
    """Ray's own reason without its advice; the whole text stays in the error's detail."""
    for mark in ("Worker exit detail: ", "exit_detail: ", "The actor is dead because "):
        _, found, rest = text.partition(mark)
        if found:
            return " ".join(rest.split("There are some potential")[0].split())[:300]
    return " ".join(text.split())[:300]
