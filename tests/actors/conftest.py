"""Stand-ins for ranks, and the server that tests share.

`Counting` replaces model.runner.Runner: a request answers its last prompt token + 1, + 2, ... and
keeps a known number of drafts. `ThreadRanks` runs real RankLoops over real connections, in threads.
`served` is a server on the tests' Ray cluster; `no_cluster` asserts that this process has no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import ray
import zmq.asyncio

from outrider.actors.driver.scheduler import Limits
from outrider.actors.errors import EngineDeadError
from outrider.actors.ranks.connection import Connection, Connector
from outrider.actors.ranks.depth import Depth
from outrider.actors.ranks.loop import RankLoop
from outrider.actors.ranks.messages import DRIVER, Commands, Hello
from outrider.actors.ranks.rank import exchange_hello
from outrider.model.step import Command, Join, Leave, Progress, Sampling, StepEvent

if TYPE_CHECKING:
    from outrider.actors.engine import Engine
    from tests.actors.http.chromium import Chromium
    from tests.actors.served import Served
    from tests.conftest import RunningCluster

VOCAB = 1000
EOS = 999


def limits(**changes: Any) -> Limits:
    keys: dict[str, Any] = {
        "max_slots": 3,
        "max_model_len": 64,
        "max_queue": 32,
        "num_pages": 33,
        "page_tokens": 8,
        "draft_tokens": 3,
        "drafter": "mtp",
        "overshoot_rows": 4,
        "vocab_size": VOCAB,
        "eos_ids": (EOS,),
    }
    return Limits(**{**keys, **changes})


def kept_of(request: int, emitted: int, draft_tokens: int) -> int:
    """Drafts that a verify pass of `Counting` accepts: varied, and known."""
    return (request + emitted) % (draft_tokens + 1)


class Counting:
    """Runner's interface: prefill one request a step, then an iteration over the others.

    One that comes back with a part of its answer gets its next token from an iteration.
    """

    def __init__(self, draft_tokens: int = 3, chunk: int = 8, step_s: float = 0.0) -> None:
        self.draft_tokens, self.chunk, self.step_s = draft_tokens, chunk, step_s
        self.most_drafts = draft_tokens
        self.slots: dict[int, Join] = {}
        self.prefilled: dict[int, int] = {}
        self.emitted: dict[int, int] = {}
        self.applied: list[list[Command]] = []
        self.drift = 0
        self.error: Exception | None = None
        self.hang = threading.Event()
        self.hang.set()

    @property
    def has_work(self) -> bool:
        return bool(self.slots)

    @property
    def draft_limit(self) -> int:
        own = [join.sampling.draft_tokens for join in self.slots.values()]
        return max((self.most_drafts if k is None else k for k in own), default=self.most_drafts)

    @property
    def num_drafts(self) -> int:
        return self.draft_tokens

    def apply(self, commands: Sequence[Command]) -> None:
        self.applied.append(list(commands))
        for command in commands:
            tenant = self.slots.get(command.slot)
            if isinstance(command, Join):
                assert tenant is None, f"slot {command.slot} is taken"
                self.slots[command.slot] = command
                self.prefilled[command.request] = 0
                self.emitted[command.request] = len(command.emitted)
            elif isinstance(command, Leave) and tenant and tenant.request == command.request:
                del self.slots[command.slot]

    def step(self) -> list[Progress]:
        self.hang.wait()
        if self.error is not None:
            raise self.error
        time.sleep(self.step_s)
        progress = []
        decoding = [j for _, j in sorted(self.slots.items()) if self._prefilled(j)]
        waiting = [j for j in self.slots.values() if not self._prefilled(j)]
        if waiting:
            join = min(waiting, key=lambda j: j.request)
            self.prefilled[join.request] += self.chunk
            if self._prefilled(join) and not join.emitted:
                progress.append(self._advance(join, 0, verified=False))
        for join in decoding:
            accepted = kept_of(join.request, self.emitted[join.request], self.draft_tokens)
            progress.append(self._advance(join, accepted, verified=True))
        return progress

    def token(self, join: Join, position: int) -> int:
        """The token at this position of the answer."""
        return (join.tokens[-1] + position + 1) % VOCAB

    def limit_drafts(self, depth: int) -> None:
        self.draft_tokens = depth

    def digest(self) -> int:
        return hash((*sorted(self.slots), *self.emitted.values(), self.drift)) & (2**63 - 1)

    def _prefilled(self, join: Join) -> bool:
        return self.prefilled[join.request] >= len(join.tokens) + max(0, len(join.emitted) - 1)

    def _advance(self, join: Join, accepted: int, *, verified: bool) -> Progress:
        how, tokens, finish = join.sampling, [], None
        for _ in range(accepted + 1):
            tokens.append(self.token(join, self.emitted[join.request]))
            self.emitted[join.request] += 1
            if tokens[-1] in join.end_ids:
                finish = "stop"
            elif self.emitted[join.request] == how.max_tokens:
                finish = "length"
            if finish:
                del self.slots[join.slot]
                break
        return Progress(
            request=join.request,
            slot=join.slot,
            tokens=tokens,
            drafted=self.draft_tokens if verified else 0,
            accepted=accepted,
            verified=verified,
            finish=finish,
        )


class ThreadRanks:
    """actors.ranks.Ranks with a thread a rank."""

    def __init__(self, runners: Sequence[Counting], depth: Depth | None = None) -> None:
        self.runners = runners
        self.depth = depth
        self.events: list[StepEvent] = []
        self.killed = False
        self._connectors = [Connector() for _ in runners]
        self._mine = Connector(zmq.asyncio.Context())
        self._connection: Connection | None = None
        self._failed: asyncio.Future[EngineDeadError] | None = None
        self._threads: list[threading.Thread] = []

    async def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        inbox, address = self._connectors[0].listen(None)
        opened = [self._connectors[0].listen(None) for _ in self.runners[1:]]
        relays = [connection for connection, _ in opened]
        self._connection = self._mine.connect(address)
        self._connection.send(Hello(rank=DRIVER))
        exchange_hello(inbox, Hello(rank=0), expect=DRIVER, timeout_s=5)
        await self._connection.receive_async(Hello)
        loops = [RankLoop(self.runners[0], connection=inbox, followers=relays, depth=self.depth)]
        for rank, (mine, address) in enumerate(opened, start=1):
            connection = self._connectors[rank].connect(address)
            connection.send(Hello(rank=rank))
            exchange_hello(mine, Hello(rank=0), expect=rank, timeout_s=5)
            connection.receive(Hello, 5)
            loops.append(RankLoop(self.runners[rank], connection=connection, followers=None))
        for rank, loop in enumerate(loops):
            body = threading.Thread(target=self._body, args=(rank, loop, asyncio.get_event_loop()))
            body.start()
            self._threads.append(body)

    def _body(self, rank: int, loop: RankLoop, home: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run()
        except (RuntimeError, ConnectionError, zmq.ZMQError) as problem:
            if not self.killed:
                error = EngineDeadError(f"rank {rank} failed: {problem}")
                home.call_soon_threadsafe(self._fail, error)
        finally:  # by the thread that used them
            self._connectors[rank].close_sockets()

    def _fail(self, error: EngineDeadError) -> None:
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_result(error)

    def send(self, commands: Commands) -> None:
        assert self._connection is not None
        with contextlib.suppress(ConnectionError):
            self._connection.send(commands)

    @property
    def loaded_bytes(self) -> tuple[int, int]:
        return (0, 0)

    def warnings(self) -> list[str]:
        return []

    async def event(self) -> StepEvent:
        assert self._connection is not None
        event = await self._connection.receive_async(StepEvent)
        self.events.append(event)
        return event

    async def ended(self) -> EngineDeadError:
        assert self._failed is not None
        return await asyncio.shield(self._failed)

    def stats(self) -> list[dict[str, Any]]:
        return []

    async def stop(self) -> None:
        if not self.killed and self._threads:
            self.send(Commands(stop=True))
            for thread in self._threads:
                await asyncio.to_thread(thread.join, 5)
        await self.kill()

    async def kill(self) -> None:
        if self.killed:
            return
        self.killed = True
        for runner in self.runners:
            runner.error = RuntimeError("killed")
            runner.hang.set()
        for post in self._connectors:
            # Threads cannot be killed: ending the context ends their wait.
            await asyncio.to_thread(post.context.term if self._threads else post.close)
            post.remove_folder()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 5)
            assert not thread.is_alive()
        self._mine.close()


def join(request: int, slot: int, prompt: Sequence[int] = (1, 2), **sampling: Any) -> Join:
    return Join(
        slot=slot,
        request=request,
        tokens=list(prompt),
        pages=[1],
        sampling=Sampling(**{"max_tokens": 8, "seed": 0, **sampling}),
    )


@pytest.fixture
def no_cluster() -> None:
    """No Ray in this process."""
    assert not ray.is_initialized(), "a test has left Ray running"


@pytest.fixture(scope="module")
def served(
    cluster: RunningCluster, tiny: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The bundled checkpoint behind HTTP."""
    from tests.actors.served import Served

    with closing(Served(cluster, tiny, tmp_path_factory.mktemp("served"))) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """A headless Chromium, where one is installed."""
    from tests.actors.http.chromium import Chromium, find_chromium

    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or Google Chrome")
    with closing(Chromium(path)) as running:
        yield running
