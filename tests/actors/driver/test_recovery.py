"""Ranks that are lost are replaced and requests go on; who is to blame ends alone; nothing spins.

The ranks are threads that fail, hang or do not start as a test tells them. What a request gets over
several groups of ranks must be what an undisturbed one gives it, and no request may notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.actors.cluster.spec import RecoverySpec
from outrider.actors.driver.driver import Driver
from outrider.actors.driver.handle import Handle
from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    RequestAbortedError,
    RequestFailedError,
)
from outrider.actors.ranks.group import RanksLostError
from outrider.model.config import ConfigError
from outrider.model.step import Progress, Sampling
from tests.actors.conftest import VOCAB, Counting, ThreadRanks, limits

POISON = 666


class Poisoned(Counting):
    """Fails whenever a request is in a slot whose prompt begins with POISON and whose answer has
    got to the place that the prompt's next token says."""

    def step(self) -> list[Progress]:
        for join in self.slots.values():
            if join.tokens[0] == POISON and self.emitted[join.request] >= join.tokens[1]:
                raise RuntimeError("the kernel met its poison")
        return super().step()


class Groups:
    """Makes the groups of a driver, one after the other. `kinds`: of the ranks' runners."""

    def __init__(self, kind: type[Counting] = Counting, step_s: float = 0.001) -> None:
        self.kind, self.step_s = kind, step_s
        self.made: list[ThreadRanks] = []
        self.start_errors: list[Exception] = []
        """What the next starts fail with."""
        self.hold_starts = asyncio.Event()
        """Starts wait until it is set."""
        self.hold_starts.set()

    def __call__(self) -> ThreadRanks:
        groups = self

        class Group(ThreadRanks):
            async def start(self) -> None:
                await groups.hold_starts.wait()
                if groups.start_errors:
                    raise groups.start_errors.pop(0)
                await super().start()

        self.made.append(Group([self.kind(step_s=self.step_s), self.kind(step_s=self.step_s)]))
        return self.made[-1]

    def break_one(self, rank: int = 0) -> None:
        """A rank of the group that works fails in its next step."""
        self.made[-1].runners[rank].error = RuntimeError("the card is on fire")


@asynccontextmanager
async def driving(
    groups: Groups, recovery: RecoverySpec | None = None, **changes: Any
) -> AsyncIterator[Driver]:
    keys = {"max_model_len": 300, "num_pages": 400, **changes}
    driver = Driver(limits(**keys), groups, recovery=recovery or RecoverySpec(max_losses=100))
    await driver.start()
    try:
        yield driver
    finally:
        await driver.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


def ask(*prompt: int, key: str = "", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(prompt=list(prompt), sampling=Sampling(**sampling), key=key)


def right(last: int, max_tokens: int) -> list[int]:
    return [(last + i) % VOCAB for i in range(1, max_tokens + 1)]


async def until_tokens(handle: Handle, number: int) -> None:
    """Returns when a request has got so many since it joined."""
    while True:
        assert not handle.request.ended, handle.request.error
        if handle.request.num_since_join >= number:
            return
        await asyncio.sleep(0.001)


async def until_recovered(driver: Driver, number: int) -> None:
    while driver.stats()["recoveries"] < number or driver.is_recovering:
        assert driver.error is None, driver.error
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_go_on_over_many_losses_without_a_token_lost_or_twice(rank: int):
    async def work() -> None:
        groups = Groups()
        async with driving(groups) as driver:
            handles = [driver.submit(ask(i, max_tokens=200)) for i in range(5)]  # two wait
            for loss in range(1, 5):
                for handle in handles[:3]:
                    await until_tokens(handle, 15)
                groups.break_one(rank)
                await until_recovered(driver, loss)
            for number, handle in enumerate(handles):
                done = await handle.result()
                assert done.token_ids == right(number, 200)
                assert done.stats.iterations == handle.request.counters.iterations > 40
            assert len(groups.made) == 5
            assert all(group.killed for group in groups.made[:-1])
            stats = driver.stats()
            assert (stats["recoveries"], stats["requests_finished"]) == (4, 5)
            assert 0 < stats["last_recovery_s"] < stats["recovery_s"] < 10
            assert (stats["free_pages"], stats["requests_failed"]) == (399, 0)

    run(work)


def test_ranks_that_hang_are_lost_and_idle_ones_do_not_hang():
    async def work() -> None:
        groups = Groups()
        recovery = RecoverySpec(prefill_s=0.3, decode_s=0.2)
        async with driving(groups, recovery) as driver:
            await asyncio.sleep(0.6)
            handle = driver.submit(ask(1, max_tokens=90))
            await until_tokens(handle, 30)
            groups.made[-1].runners[0].hang.clear()
            assert (await handle.result()).token_ids == right(1, 90)
            assert driver.stats()["recoveries"] == 1

    run(work)


@pytest.mark.parametrize(("prefill_s", "decode_s"), [(9.0, 0.3), (0.3, 9.0)])
def test_prompts_and_answers_have_limits_of_their_own(prefill_s: float, decode_s: float):
    """What must not count is longer than a test may take."""

    async def work() -> None:
        groups = Groups()
        recovery = RecoverySpec(prefill_s=prefill_s, decode_s=decode_s, max_losses=0)
        async with driving(groups, recovery) as driver:
            handle = driver.submit(ask(1, max_tokens=250))
            if decode_s < prefill_s:
                await until_tokens(handle, 5)
            groups.made[-1].runners[0].hang.clear()
            started_s = time.monotonic()
            key = "decode_s" if decode_s < prefill_s else "prefill_s"
            with pytest.raises(EngineDeadError, match=rf"no step for 0.3 s.*recovery.{key}"):
                await handle.result()
            assert time.monotonic() - started_s < 3

    run(work)


def test_while_ranks_are_on_their_way_requests_wait_or_leave():
    async def work() -> None:
        groups = Groups()
        async with driving(groups, max_queue=4) as driver:
            running = driver.submit(ask(1, max_tokens=200))
            leaving = driver.submit(ask(2, max_tokens=200, key="leaves"))
            await until_tokens(leaving, 9)
            groups.hold_starts.clear()
            groups.break_one()
            while not driver.is_recovering:
                await asyncio.sleep(0.001)
            new = driver.submit(ask(3, max_tokens=9))
            driver.check_queue(1)
            driver.abort("leaves")
            with pytest.raises(RequestAbortedError):
                await leaving.result()
            assert driver.stats()["recovering"]
            assert driver.error is None
            groups.hold_starts.set()
            assert (await new.result()).token_ids == right(3, 9)
            assert (await running.result()).token_ids == right(1, 200)

    run(work)


def test_an_engine_can_be_closed_while_its_ranks_are_on_their_way():
    async def work() -> None:
        groups = Groups()
        async with driving(groups) as driver:
            handle = driver.submit(ask(1, max_tokens=200))
            await until_tokens(handle, 9)
            groups.hold_starts.clear()
            groups.break_one()
            while not driver.is_recovering:
                await asyncio.sleep(0.001)
            await driver.close()
            with pytest.raises(EngineClosedError):
                await handle.result()
        assert all(group.killed for group in groups.made)

    run(work)


def test_losses_while_others_start_are_survived_too():
    async def work() -> None:
        groups = Groups()
        async with driving(groups) as driver:
            handle = driver.submit(ask(1, max_tokens=100))
            await until_tokens(handle, 9)
            groups.start_errors = [RanksLostError("died"), EngineDeadError("failed: no memory")]
            groups.break_one()
            assert (await handle.result()).token_ids == right(1, 100)
            assert len(groups.made) == 4
            assert driver.stats()["recoveries"] == 1

    run(work)


def test_too_many_losses_end_the_engine_with_the_last_error():
    async def work() -> None:
        groups = Groups()
        recovery = RecoverySpec(max_losses=2, window_s=60)
        async with driving(groups, recovery) as driver:
            handle = driver.submit(ask(1, max_tokens=250))
            for loss in range(1, 4):
                await until_tokens(handle, 20)
                groups.break_one()
                if loss < 3:
                    await until_recovered(driver, loss)
            says = r"rank 0 failed: the card is on fire \(loss 3 .*recovery.max_losses = 2\)"
            with pytest.raises(EngineDeadError, match=says):
                await handle.result()
            assert "the card is on fire" in str(driver.error)
            with pytest.raises(EngineDeadError, match="card is on fire"):
                driver.submit(ask(1))
            assert len(groups.made) == 3

    run(work)


def test_losses_that_are_long_past_do_not_count():
    async def work() -> None:
        groups = Groups(step_s=0.01)
        async with driving(groups, RecoverySpec(max_losses=1, window_s=0.2)) as driver:
            handle = driver.submit(ask(1, max_tokens=250))
            for loss in range(1, 4):
                await until_tokens(handle, 20)
                groups.break_one()
                await until_recovered(driver, loss)
                await asyncio.sleep(0.25)
            assert (await handle.result()).token_ids == right(1, 250)

    run(work)


def test_ranks_that_the_user_must_mend_are_not_tried_for_ever():
    async def work() -> None:
        groups = Groups()
        async with driving(groups) as driver:
            handle = driver.submit(ask(1, max_tokens=250))
            await until_tokens(handle, 9)
            groups.start_errors = [ConfigError("rank 0: the checkpoint is gone")]
            groups.break_one()
            with pytest.raises(EngineDeadError, match=r"cannot be started again: .*is gone"):
                await handle.result()
            assert len(groups.made) == 2

    run(work)


def test_a_first_start_is_tried_again_when_a_rank_dies_and_not_when_it_fails():
    async def work() -> None:
        groups = Groups()
        groups.start_errors = [RanksLostError("rank 1 died")]
        async with driving(groups) as driver:
            assert (await driver.submit(ask(1, max_tokens=3)).result()).token_ids == right(1, 3)
        groups = Groups()
        groups.start_errors = [EngineDeadError("rank 1 failed: no memory")]
        with pytest.raises(EngineDeadError, match="no memory"):
            async with driving(groups):
                pass
        assert len(groups.made) == 1
        groups = Groups()
        groups.start_errors = [RanksLostError(f"died {number}") for number in range(9)]
        with pytest.raises(EngineDeadError, match="died 2"):
            async with driving(groups, RecoverySpec(max_losses=2)):
                pass

    run(work)


@pytest.mark.parametrize("place", [0, 7, 40], ids=["prompt", "early", "late"])
def test_a_request_that_ends_the_ranks_is_found_and_ends_alone(place: int):
    async def work() -> None:
        groups = Groups(Poisoned)
        async with driving(groups, RecoverySpec(max_losses=4), max_slots=8) as driver:
            others = [driver.submit(ask(i, max_tokens=150)) for i in range(6)]
            await until_tokens(others[0], 5)
            bad = driver.submit(ask(POISON, place, max_tokens=100))
            later = [driver.submit(ask(i, max_tokens=20)) for i in range(10, 14)]
            with pytest.raises(RequestFailedError, match=r"2 times .* only one.*poison"):
                await bad.result()
            for number, handle in [*enumerate(others), *enumerate(later, 10)]:
                done = await handle.result()
                assert done.token_ids == right(number, len(done.token_ids))
            assert bad.request.emitted == right(place, len(bad.request.emitted))
            stats = driver.stats()
            assert (stats["requests_failed"], stats["requests_finished"]) == (1, 10)
            assert stats["recoveries"] in (4, 5)  # it may get on before the second

    run(work)


def test_several_requests_that_end_the_ranks_are_found_one_after_the_other():
    async def work() -> None:
        groups = Groups(Poisoned)
        async with driving(groups, RecoverySpec(max_losses=4), max_slots=8) as driver:
            good = [driver.submit(ask(i, max_tokens=150)) for i in range(3)]
            bad = [driver.submit(ask(POISON, 0, max_tokens=9)) for _ in range(5)]
            for handle in bad:
                with pytest.raises(RequestFailedError, match="poison"):
                    await handle.result()
            for number, handle in enumerate(good):
                assert (await handle.result()).token_ids == right(number, 150)
            assert driver.stats()["recoveries"] == 2 + 2 * len(bad)

    run(work)


def test_a_request_that_was_there_at_many_losses_and_got_on_is_not_to_blame():
    async def work() -> None:
        groups = Groups()
        async with driving(groups) as driver:
            handle = driver.submit(ask(1, max_tokens=250))
            for loss in range(1, 7):
                await until_tokens(handle, 20)
                groups.break_one()
                await until_recovered(driver, loss)
            assert (await handle.result()).token_ids == right(1, 250)

    run(work)


def test_a_suspect_can_be_aborted_and_the_others_get_their_turn():
    async def work() -> None:
        groups = Groups(Poisoned)
        async with driving(groups, max_slots=4) as driver:
            bad = driver.submit(ask(POISON, 0, key="bad", max_tokens=9))
            good = [driver.submit(ask(i, max_tokens=50)) for i in range(3)]
            await until_recovered(driver, 1)
            groups.hold_starts.clear()
            while not driver.is_recovering:
                await asyncio.sleep(0.001)
            driver.abort("bad")
            groups.hold_starts.set()
            for number, handle in enumerate(good):
                assert (await handle.result()).token_ids == right(number, 50)
            with pytest.raises(RequestAbortedError):
                await bad.result()
            assert driver.stats()["recoveries"] == 2

    run(work)
