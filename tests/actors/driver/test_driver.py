"""The driver over threads: answers, streams, aborts, refusals, deaths, and its books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from outrider.actors.cluster.spec import RecoverySpec
from outrider.actors.driver.driver import Driver, Text
from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
)
from outrider.model.step import Grammar, Sampling
from tests.actors.conftest import EOS, VOCAB, Counting, ThreadRanks, kept_of, limits

ONE_GROUP = RecoverySpec(max_losses=0)


class Letters:
    """A tokenizer of letters. A character is whole only with its second token, as in UTF-8."""

    def __init__(self) -> None:
        self.open = ""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def stream(self, *, special: bool = False) -> Letters:
        return Letters()

    def push(self, ids: Sequence[int]) -> str:
        text = self.open + "".join(chr(i) for i in ids)
        keep = len(text) % 2
        self.open = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        return self.open


@asynccontextmanager
async def driving(
    ranks: ThreadRanks | None = None,
    text: Callable[[], Text | None] = Letters,
    recovery: RecoverySpec = ONE_GROUP,
    **changes: Any,
) -> AsyncIterator[tuple[Driver, ThreadRanks]]:
    """A driver over one group of ranks, which is not replaced."""
    ranks = ranks or ThreadRanks([Counting(), Counting()])
    driver = Driver(limits(**changes), lambda: ranks, load_text=text, recovery=recovery)
    await driver.start()
    try:
        yield driver, ranks
    finally:
        await driver.close()


async def idle(driver: Driver) -> None:
    """Returns when no request is left."""
    while (stats := driver.stats())["queued"] or stats["active"]:
        await asyncio.sleep(0.001)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


def ask(prompt: str | list[int], key: str = "", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, sampling=Sampling(**sampling), key=key)


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    return [(prompt[-1] + i) % VOCAB for i in range(1, max_tokens + 1)]


def test_prompts_are_answered_in_order_also_beyond_the_slots():
    async def work() -> None:
        async with driving() as (driver, _):
            prompts = [[10 * i, 10 * i + 5] for i in range(1, 9)]
            done = await driver.generate([ask(p, max_tokens=5 + p[0] % 7) for p in prompts])
            for prompt, completion in zip(prompts, done, strict=True):
                assert completion.prompt_ids == prompt
                assert completion.token_ids == answer(prompt, 5 + prompt[0] % 7)
                assert completion.finish_reason == "length"

    run(work)


def test_a_stream_is_the_answer_in_pieces_with_stats_on_the_last():
    async def work() -> None:
        async with driving(ThreadRanks([Counting(step_s=0.002)])) as (driver, _):
            whole = (await driver.generate([ask("abc", max_tokens=15)]))[0]
            chunks = [chunk async for chunk in driver.submit(ask("abc", max_tokens=15))]
            assert len(chunks) > 2
            assert [t for c in chunks for t in c.token_ids] == whole.token_ids
            assert "".join(c.text for c in chunks) == whole.text == "defghijklmnopqr"
            assert all(len(c.text) % 2 == 0 for c in chunks[:-1])
            assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == "length"
            assert all(c.stats is None for c in chunks[:-1])
            assert chunks[-1].stats is not None

    run(work)


def test_a_slow_reader_gets_what_gathered_as_one_chunk():
    async def work() -> None:
        async with driving() as (driver, _):
            handle = driver.submit(ask([1], max_tokens=20))
            await idle(driver)
            chunks = [chunk async for chunk in handle]
            assert [c.token_ids for c in chunks] == [answer([1], 20)]

    run(work)


def test_counters_of_a_request_are_those_of_its_iterations():
    async def work() -> None:
        async with driving(draft_tokens=3) as (driver, ranks):
            handle = driver.submit(ask([1], max_tokens=20))
            completion = await handle.result()
            emitted, kept = 1, []
            while emitted < 20:
                last = emitted
                kept.append(kept_of(handle.request.number, emitted, 3))
                emitted += min(kept[-1] + 1, 20 - emitted)
            stats = completion.stats
            assert stats.iterations == len(kept)
            assert stats.drafted == 3 * len(kept)
            kept[-1] = min(kept[-1], 20 - last)  # of the drafts behind the end, none counts
            assert stats.accepted == sum(kept)
            assert stats.accepted_per_position == [sum(k > i for k in kept) for i in range(3)]
            assert stats.ttft_s > 0
            assert stats.tpot_s > 0
            assert any(e.progress for e in ranks.events)

    run(work)


def test_engine_stats_are_the_sums_and_leave_out_the_start_up_probe():
    async def work() -> None:
        async with driving() as (driver, _):
            assert driver.stats()["tokens"] == driver.stats()["requests_submitted"] == 0
            done = await driver.generate([ask([i], max_tokens=9) for i in range(5)])
            stats = driver.stats()
            for name in ("iterations", "drafted", "accepted"):
                assert stats[name] == sum(getattr(c.stats, name) for c in done), name
            assert stats["tokens"] == 45
            assert stats["requests_finished"] == 5
            assert (stats["queued"], stats["active"]) == (0, 0)
            assert stats["free_pages"] == stats["num_pages"] - 1
            assert 0 < stats["busy_s"] <= stats["uptime_s"]
            assert stats["tokens_per_s"] > 0

    run(work)


def test_the_stop_token_is_among_the_ids_and_not_in_the_text():
    async def work() -> None:
        async with driving() as (driver, _):
            stop = (await driver.generate([ask("ab", max_tokens=9, stop_ids=(ord("f"),))]))[0]
            assert stop.token_ids == [ord(c) for c in "cdef"]
            assert (stop.text, stop.finish_reason) == ("cde", "stop")
            end = (await driver.generate([ask([EOS - 2], max_tokens=9)]))[0]
            assert end.token_ids == [EOS - 1, EOS]
            on = (await driver.generate([ask([EOS - 2], max_tokens=4, ignore_eos=True)]))[0]
            assert on.token_ids == [EOS - 1, EOS, 0, 1]

    run(work)


def test_a_grammar_is_tried_before_anything_is_queued():
    async def work() -> None:
        wrong, right = (Grammar("regex", text) for text in ("(a", "a"))
        async with driving() as (driver, _):
            before = driver.stats()["requests_submitted"]
            with pytest.raises(RequestError, match=r"prompt 2 of 2: sampling.grammar \(regex\)"):
                await driver.generate([ask([1], grammar=right), ask([2], grammar=wrong)])
            assert driver.stats()["requests_submitted"] == before
            (done,) = await driver.generate([ask([1], grammar=right, max_tokens=3)])
            assert len(done.token_ids) == 3
        async with driving(text=lambda: None) as (driver, _):
            with pytest.raises(RequestError, match="a checkpoint with a tokenizer and an EOS"):
                await driver.generate([ask([1], grammar=right)])

    run(work)


def test_seeds_are_reported():
    async def work() -> None:
        async with driving() as (driver, _):
            given, drawn = await driver.generate([ask([1], seed=7), ask([1])])
            assert given.seed == 7
            assert drawn.seed >= 0

    run(work)


def test_nothing_runs_when_one_of_many_is_refused():
    async def work() -> None:
        async with driving() as (driver, ranks):
            steps = len(ranks.events)
            with pytest.raises(RequestError, match=r"prompt 2 of 3: .*empty"):
                await driver.generate([ask([1]), ask(""), ask([2])])
            await idle(driver)
            await asyncio.sleep(0.05)
            assert len(ranks.events) == steps
            assert driver.stats()["requests_aborted"] == 1

    run(work)


def test_without_a_tokenizer_only_ids_are_taken():
    async def work() -> None:
        async with driving(text=lambda: None) as (driver, _):
            with pytest.raises(RequestError, match="has no tokenizer"):
                driver.submit(ask("text"))
            assert (await driver.generate([ask([1], max_tokens=3)]))[0].text == ""

    run(work)


def test_a_full_queue_refuses_and_the_others_go_on():
    async def work() -> None:
        async with driving(max_queue=4, max_slots=1) as (driver, _):
            driver.check_queue(5)  # one of them would have the slot
            with pytest.raises(QueueFullError):
                driver.check_queue(6)
            handles = [driver.submit(ask([i], max_tokens=9)) for i in range(5)]
            with pytest.raises(QueueFullError, match=r"4 requests wait .* limits\.max_queue = 4"):
                driver.check_queue(1)
            done = [await handle.result() for handle in handles]
            assert [len(c.token_ids) for c in done] == [9] * 5
            driver.check_queue(5)

    run(work)


def test_a_script_may_ask_for_more_than_a_servers_queue_holds():
    async def work() -> None:
        async with driving(max_queue=4) as (driver, _):
            done = await driver.generate([ask([i], max_tokens=3) for i in range(200)])
            assert [c.token_ids for c in done] == [answer([i], 3) for i in range(200)]

    run(work)


def test_an_abort_by_key_frees_the_slot_for_the_next():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.002)])
        async with driving(ranks, max_slots=1, max_model_len=200) as (driver, _):
            long = driver.submit(ask([1], key="mine", max_tokens=190))
            waiting = driver.submit(ask([2], key="queued", max_tokens=9))
            behind = driver.submit(ask([3], max_tokens=9))
            assert (await anext(long)).token_ids
            driver.abort("queued")
            driver.abort("mine")
            driver.abort("nobody")
            with pytest.raises(RequestAbortedError):
                await long.result()
            with pytest.raises(RequestAbortedError):
                await waiting.result()
            assert (await behind.result()).token_ids == answer([3], 9)
            assert driver.stats()["requests_aborted"] == 2
            assert driver.stats()["free_pages"] == 32

    run(work)


def test_two_open_requests_may_not_share_a_key():
    async def work() -> None:
        async with driving() as (driver, _):
            first = driver.submit(ask([1], key="k"))
            with pytest.raises(RequestError, match="key 'k'"):
                driver.submit(ask([2], key="k"))
            await first.result()
            await driver.submit(ask([2], key="k")).result()

    run(work)


def test_a_failing_rank_ends_every_request_with_its_reason():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.002), Counting(step_s=0.002)])
        async with driving(ranks, max_model_len=200, num_pages=200) as (driver, _):
            handles = [driver.submit(ask([i], max_tokens=190)) for i in range(5)]
            await anext(handles[0])
            ranks.runners[1].error = RuntimeError("the card is on fire")
            for handle in handles:
                with pytest.raises(EngineDeadError, match=r"rank 1 failed: the card is on fire"):
                    await handle.result()
            with pytest.raises(EngineDeadError, match="the card is on fire"):
                driver.submit(ask([1]))
            await asyncio.sleep(0.05)
            assert ranks.killed
            assert driver.stats()["requests_failed"] == 5

    run(work)


def test_the_watchdog_kills_ranks_that_stand_still():
    async def work() -> None:
        ranks = ThreadRanks([Counting()])
        limits_s = replace(ONE_GROUP, decode_s=9, prefill_s=0.3)
        async with driving(ranks, recovery=limits_s) as (driver, _):
            await asyncio.sleep(0.5)  # idle is not standing still
            await driver.generate([ask([1])])
            ranks.runners[0].hang.clear()
            started = time.monotonic()
            with pytest.raises(
                EngineDeadError,
                match=r"no step for 0\.3 s with 1 requests running \(recovery.prefill_s",
            ):
                await driver.generate([ask([1])])
            assert 0.25 < time.monotonic() - started < 2
            await asyncio.sleep(0.05)
            assert ranks.killed

    run(work)


def test_steps_without_tokens_count_as_progress():
    async def work() -> None:
        ranks = ThreadRanks([Counting(chunk=1, step_s=0.02)])
        async with driving(ranks, recovery=replace(ONE_GROUP, prefill_s=0.25)) as (driver, _):
            started = time.monotonic()
            await driver.generate([ask([1] * 40, max_tokens=1)])
            assert time.monotonic() - started > 0.5

    run(work)


def test_close_ends_open_requests_and_a_second_close_does_nothing():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.002), Counting(step_s=0.002)])
        async with driving(ranks, max_model_len=200) as (driver, _):
            handle = driver.submit(ask([1], max_tokens=150))
            await anext(handle)
            await driver.close()
            with pytest.raises(EngineClosedError):
                await handle.result()
            with pytest.raises(EngineClosedError):
                driver.submit(ask([1]))

    run(work)


def test_ranks_that_cannot_start_are_killed_and_the_reason_is_raised():
    class Broken(ThreadRanks):
        async def start(self) -> None:
            raise EngineDeadError("rank 1 failed: no memory")

    async def work() -> None:
        ranks = Broken([Counting()])
        driver = Driver(limits(), lambda: ranks)
        with pytest.raises(EngineDeadError, match="no memory"):
            await driver.start()
        assert ranks.killed

    run(work)


def test_a_tokenizer_that_cannot_load_ends_the_start():
    def broken() -> Text:
        raise ValueError("tokenizer.json is damaged")

    async def work() -> None:
        ranks = ThreadRanks([Counting()])
        driver = Driver(limits(), lambda: ranks, load_text=broken)
        with pytest.raises(ValueError, match="damaged"):
            await driver.start()
        assert ranks.killed

    run(work)


class RoomForTwelve(ThreadRanks):
    """Ranks whose devices hold fewer pages than were wanted."""

    async def start(self) -> int:
        await super().start()
        return 12


def test_requests_are_held_to_the_pages_that_the_ranks_have_room_for():
    async def work() -> None:
        async with driving(RoomForTwelve([Counting()]), max_model_len=200) as (driver, _):
            assert driver.stats()["num_pages"] == 12
            assert len((await driver.submit(ask([1], max_tokens=60)).result()).token_ids) == 60
            with pytest.raises(RequestError, match="the cache has 11"):
                driver.submit(ask([1], max_tokens=120))

    run(work)
