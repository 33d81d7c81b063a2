"""The rank loop in threads over real connections, the connections, and how failures are told."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlparse

import msgspec
import pytest
import zmq
from ray.exceptions import ActorDiedError, RayTaskError

from outrider.actors.cluster.reader import load_spec
from outrider.actors.errors import DivergenceError, EngineDeadError
from outrider.actors.ranks.connection import Address, Connection, Connector
from outrider.actors.ranks.group import both, explain
from outrider.actors.ranks.loop import RankLoop
from outrider.actors.ranks.messages import DRIVER, Commands, Hello
from outrider.actors.ranks.processes import ProcessId
from outrider.actors.ranks.rank import Location, RankSetup, exchange_hello, settle_pages
from outrider.model.config import ConfigError, load_config
from outrider.model.plan import memory_plan
from outrider.model.step import Join, Leave, StepEvent, StepPlan
from outrider.parallel import devices
from outrider.parallel.device import DeviceError
from tests.actors.conftest import Counting, join


@dataclass
class Group:
    """A leader and its followers in threads, and the driver's end of the inbox."""

    runners: list[Counting]
    driver: Connection
    threads: list[threading.Thread] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)

    def order(self, *commands: Join | Leave) -> None:
        self.driver.send(Commands(commands=list(commands)))

    def events(self, until: Callable[[StepEvent], bool]) -> list[StepEvent]:
        seen = []
        while not seen or not until(seen[-1]):
            seen.append(self.driver.receive(StepEvent, 5))
        return seen

    def stop(self) -> None:
        self.driver.send(Commands(stop=True))
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()


MakeGroup = Callable[..., Group]


@pytest.fixture
def group() -> Iterator[MakeGroup]:
    posts = [Connector() for _ in range(4)]

    def make(size: int = 2, **runner: object) -> Group:
        inbox, address = posts[0].listen(None)
        pairs = [posts[0].listen(None) for _ in range(size - 1)]
        driver = posts[3].connect(address)
        made = Group(runners=[Counting(**runner) for _ in range(size)], driver=driver)
        hello = Hello(rank=0)
        driver.send(Hello(rank=DRIVER))
        exchange_hello(inbox, hello, expect=DRIVER, timeout_s=5)
        assert driver.receive(Hello, 5) == hello
        relays = [connection for connection, _ in pairs]
        loops = [RankLoop(made.runners[0], connection=inbox, followers=relays)]
        for rank, (relay, where) in enumerate(pairs, start=1):
            mine = posts[rank].connect(where)
            mine.send(Hello(rank=rank))
            exchange_hello(relay, hello, expect=rank, timeout_s=5)
            mine.receive(Hello, 5)
            loops.append(RankLoop(made.runners[rank], connection=mine, followers=None))

        def body(rank: int, loop: RankLoop) -> None:
            try:
                loop.run()
            except (DivergenceError, ConnectionError, zmq.ContextTerminated) as error:
                made.errors[rank] = error
            finally:  # by the thread that used them
                posts[rank].close_sockets()

        for rank, loop in enumerate(loops):
            made.threads.append(threading.Thread(target=body, args=(rank, loop)))
            made.threads[-1].start()
        return made

    yield make
    for post in posts:
        post.close()


def ended(number: int) -> Callable[[StepEvent], bool]:
    left = [number]

    def last(event: StepEvent) -> bool:
        left[0] -= sum(p.finish is not None for p in event.progress)
        return left[0] == 0

    return last


def test_every_rank_applies_the_same_plans(group: MakeGroup):
    g = group(size=3)
    g.order(join(0, 0, max_tokens=9), join(1, 1, max_tokens=20))
    g.driver.receive(StepEvent, 5)
    g.order(join(2, 2, max_tokens=5), Leave(slot=1, request=1))
    g.events(ended(2))
    g.stop()
    assert g.runners[0].applied == g.runners[1].applied == g.runners[2].applied
    assert g.runners[0].emitted == g.runners[1].emitted == g.runners[2].emitted
    assert g.runners[0].emitted[1] < 20
    assert not g.errors


def test_an_event_after_each_step_carries_the_tokens(group: MakeGroup):
    g = group(size=1)
    g.order(join(0, 0, prompt=[10, 20], max_tokens=6))
    events = g.events(ended(1))
    g.stop()
    assert [e.iteration for e in events] == list(range(1, len(events) + 1))
    tokens = [t for e in events for p in e.progress for t in p.tokens]
    assert tokens == [21, 22, 23, 24, 25, 26]
    assert events[0].progress[0].verified is False


def test_each_step_has_a_plan_of_its_own(group: MakeGroup):
    g = group(size=2, chunk=1)
    g.order(join(0, 0, prompt=[1] * 12, max_tokens=9))
    events = g.events(ended(1))
    g.stop()
    for runner in g.runners:
        assert len(runner.applied) == events[-1].iteration > 12


def test_what_comes_during_a_step_is_in_the_next_plan(group: MakeGroup):
    g = group(size=2, draft_tokens=0, step_s=0.1)
    first = [join(0, 0, max_tokens=1), join(1, 1, max_tokens=100)]
    second = [join(2, 0, max_tokens=1), Leave(slot=1, request=1)]  # 0 is free after its one step
    g.runners[0].hang.clear()
    g.order(*first)
    while not g.runners[0].applied:
        time.sleep(0.001)
    g.order(*second)
    g.runners[0].hang.set()
    events = g.events(ended(2))
    g.stop()
    assert [e.iteration for e in events] == [1, 2]
    assert g.runners[0].applied == g.runners[1].applied == [first, second]
    assert not g.errors


def test_idle_ranks_use_no_cpu(group: MakeGroup):
    g = group(size=3)
    g.order(join(0, 0))
    g.events(ended(1))
    time.sleep(0.05)
    used = []
    for _ in range(4):  # other threads of the tests wake now and then
        before = time.process_time()
        time.sleep(0.25)
        used.append(time.process_time() - before)
    g.stop()
    assert min(used) < 0.005


def test_a_follower_with_another_slot_table_says_so_and_names_both(group: MakeGroup):
    g = group(size=2)
    g.order(join(0, 0))
    g.events(ended(1))
    while g.runners[1].digest() != g.runners[0].digest():
        time.sleep(0.001)
    g.runners[1].drift = 1
    digests = [f"{runner.digest():#018x}" for runner in g.runners]
    g.order(join(1, 0))
    g.threads[1].join(5)
    g.stop()
    assert isinstance(g.errors[1], DivergenceError)
    assert all(digest in str(g.errors[1]) for digest in digests)


def test_a_leader_that_lost_a_follower_stops(group: MakeGroup):
    g = group(size=2, step_s=0.001)
    g.runners[1].error = DivergenceError("killed")
    g.order(join(0, 0, max_tokens=100_000))
    for thread in g.threads:
        thread.join(5)
    assert isinstance(g.errors[0], ConnectionError)


def test_stop_ends_a_busy_group(group: MakeGroup):
    g = group(size=2, step_s=0.002)
    g.order(join(0, 0, max_tokens=100_000))
    g.driver.receive(StepEvent, 5)
    g.stop()
    assert not g.errors


def test_sockets_lie_in_a_private_folder_that_goes_away_once_connected():
    ours, theirs = Connector(), Connector()
    connection, address = ours.listen(None)
    folder = Path(urlparse(address.endpoint).path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other = theirs.connect(address)
    other.send(Hello(rank=1))
    connection.receive(Hello, 5)
    ours.remove_folder()
    assert not folder.exists()
    connection.send(Hello(rank=0))
    assert other.receive(Hello, 5).rank == 0
    theirs.close()
    ours.close()


def test_a_connection_between_machines_is_sealed_with_a_key_told_beforehand():
    ours, theirs, stranger = Connector(), Connector(), Connector()
    connection, address = ours.listen("127.0.0.1")
    assert address.public_key
    wrong, _ = zmq.curve_keypair()
    for secret in (b"", wrong):
        outside = stranger.connect(Address(endpoint=address.endpoint, public_key=secret))
        outside.send(Hello(rank=9))
    with pytest.raises(TimeoutError, match="no Hello within"):
        connection.receive(Hello, 0.2)
    stranger.context.destroy(0)
    other = theirs.connect(address)
    other.send(Hello(rank=1))
    assert connection.receive(Hello, 5).rank == 1
    theirs.close()
    ours.close()


def test_a_connection_takes_no_message_above_its_limit():
    ours, theirs = Connector(limit_bytes=1000), Connector(limit_bytes=1000)
    connection, address = ours.listen(None)
    other = theirs.connect(address)
    with pytest.raises(ValueError, match="this connection takes 1000"):
        other.send(Commands(commands=[join(0, 0, prompt=[1] * 2000)]))
    other.socket.send(b"x" * 2000)
    with pytest.raises(TimeoutError):
        connection.receive(Hello, 0.2)
    theirs.context.destroy(0)
    ours.close()


def test_a_connection_takes_only_the_message_it_expects():
    ours, theirs = Connector(), Connector()
    connection, address = ours.listen(None)
    theirs.connect(address).send(Hello(rank=1))
    with pytest.raises(msgspec.ValidationError):
        connection.receive(StepPlan, 5)
    theirs.close()
    ours.close()


def test_a_caller_that_is_another_rank_is_refused():
    ours, theirs = Connector(), Connector()
    connection, address = ours.listen(None)
    theirs.connect(address).send(Hello(rank=2))
    with pytest.raises(DivergenceError, match="expected rank 1 to call"):
        exchange_hello(connection, Hello(rank=0), expect=1, timeout_s=5)
    theirs.close()
    ours.close()


def remote(error: Exception) -> Exception:
    """As Ray hands it over."""
    return RayTaskError("load", "long remote traceback", error).as_instanceof_cause()


@pytest.mark.parametrize("error", [ConfigError("bad file"), DeviceError("no such device")])
def test_what_a_user_can_change_stays_a_config_error(error: Exception):
    told = explain(1, remote(error))
    assert type(told) is ConfigError
    assert str(told) == f"rank 1: {error}"


def test_any_other_failure_names_rank_pid_and_message_and_keeps_the_traceback():
    place = Location(node="n", host="h", process=ProcessId(42, 1), leftovers=())
    told = explain(0, remote(ZeroDivisionError("by zero")), {0: place})
    assert isinstance(told, EngineDeadError)
    assert str(told) == "rank 0 (pid 42) failed: ZeroDivisionError: by zero"
    assert "long remote traceback" in told.detail


def test_a_dead_process_is_told_in_one_line():
    told = explain(1, ActorDiedError())
    assert isinstance(told, EngineDeadError)
    assert str(told).startswith("rank 1 died: ")
    assert "\n" not in str(told)


@pytest.mark.parametrize(
    ("calls_s", "calls_fail", "beside_fails", "says"),
    [
        (60.0, False, True, "beside"),  # the calls would go on until their own time limit
        (0.1, True, True, "of a rank"),  # the cause, although it comes later
        (0.0, True, False, "of a rank"),
        (0.1, False, False, None),
    ],
)
def test_what_fails_beside_calls_to_ranks_is_known_at_once(
    calls_s: float, calls_fail: bool, beside_fails: bool, says: str | None
) -> None:
    """As the driver's greeting does while the ranks connect, and its reading while they load."""

    async def calls() -> str:
        await asyncio.sleep(calls_s)
        if calls_fail:
            raise EngineDeadError("of a rank")
        return "done"

    async def beside() -> None:
        await asyncio.sleep(60 if calls_fail and not beside_fails else 0)
        if beside_fails:
            raise ValueError("beside")

    async def run() -> str:
        async with asyncio.timeout(5):
            return await both(calls(), beside())

    if says is None:
        assert asyncio.run(run()) == "done"
    else:
        with pytest.raises((EngineDeadError, ValueError), match=says):
            asyncio.run(run())


def test_no_socket_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    post = Connector()
    post.listen(None)
    assert os.listdir(tmp_path)
    post.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("room", [40, 10**6, 3])
def test_a_rank_takes_the_pages_its_device_has_room_for(
    room: int, planted_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(None, {"model": str(planted_tiny), "device": "cuda", "max_model_len": 200})
    model = load_config(planted_tiny)
    run = spec.run_config(model, planted_tiny, spec.resolve_pages(model, planted_tiny))
    setup = RankSetup(
        rank=0,
        size=2,
        spec=spec,
        run=run,
        device="cuda",
        collective="auto",
        cpus=None,
        timeout_s=1.0,
        files="outrider-test",
    )
    free_bytes = int(memory_plan(model, run).total_bytes(room) / 0.84) + 1
    monkeypatch.setattr(devices, "free_device_bytes", lambda kind, index: free_bytes)
    if room == 3:
        with pytest.raises(ConfigError, match=r"max_model_len = 200 takes .* too few: lower"):
            settle_pages(setup, 0)
    else:
        assert settle_pages(setup, 0) == min(room, run.num_pages)
    monkeypatch.setattr(devices, "free_device_bytes", lambda kind, index: None)
    assert settle_pages(setup, 0) == run.num_pages
