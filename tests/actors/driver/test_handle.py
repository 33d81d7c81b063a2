"""Handles: what the callers of requests see while drafts, stop strings and other requests go on."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from outrider.actors.driver.driver import Driver
from outrider.actors.driver.handle import Handle, merge
from outrider.actors.driver.request import Request
from outrider.actors.errors import RequestError, RequestFailedError
from outrider.model.step import Progress, Sampling
from tests.actors.conftest import Counting, ThreadRanks
from tests.actors.driver.test_driver import answer, ask, driving, idle, run


class Plain:
    """A tokenizer of letters, one a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def stream(self, *, special: bool = False) -> Plain:
        return self

    def push(self, ids) -> str:
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


async def stopped(driver: Driver, stop: tuple[str, ...], prompt: str = "a", **sampling):
    request = ask(prompt, **{"max_tokens": 20, **sampling})
    return await driver.submit(dataclasses.replace(request, stop=stop)).result()


def test_a_stop_string_ends_a_request_within_its_drafts_and_gives_its_slot_back():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.001), Counting(step_s=0.001)])
        async with driving(ranks, text=Plain, max_slots=1) as (driver, _):
            for stop, text, count in (
                (("fg",), "bcde", 6),
                (("zz", "jk", "j"), "bcdefghi", 9),
                (("nothing",), "bcdefghijklmnopqrstu", 20),
                (("b",), "", 1),
            ):
                done = await stopped(driver, stop)
                assert done.text == text
                assert done.token_ids == answer([ord("a")], count)
                assert done.finish_reason == ("stop" if count < 20 else "length")
            late = await stopped(driver, ("cd", "ij"), min_tokens=5)
            assert late.text == "bcdefgh"
            both = await stopped(driver, ("uv", "u"), max_tokens=20)
            assert (both.text, both.finish_reason) == ("bcdefghijklmnopqrst", "stop")
            await asyncio.sleep(0.02)
            stats = driver.stats()
            assert stats["requests_finished"] == 6
            assert stats["requests_aborted"] == 0
            assert stats["free_pages"] == stats["num_pages"] - 1
            assert not any(runner.slots for runner in ranks.runners)

    run(work)


def test_a_stop_string_ends_a_request_that_nobody_reads():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.001)])
        async with driving(ranks, text=Plain, max_model_len=200) as (driver, _):
            request = dataclasses.replace(ask("a", max_tokens=150), stop=("h",))
            handle = driver.submit(request)
            await idle(driver)
            assert [c.text for c in [c async for c in handle]] == ["bcdefg"]

    run(work)


def test_merged_streams_are_the_streams():
    async def work() -> None:
        ranks = ThreadRanks([Counting(step_s=0.001)])
        async with driving(ranks) as (driver, _):
            changed = asyncio.Event()
            handles = [driver.submit(ask([i], max_tokens=9 + i), changed) for i in range(5)]
            tokens: dict[int, list[int]] = {i: [] for i in range(5)}
            ends = []
            async for index, chunk in merge(handles):
                tokens[index] += chunk.token_ids
                if chunk.finish_reason:
                    ends.append(index)
            assert tokens == {i: answer([i], 9 + i) for i in range(5)}
            assert sorted(ends) == list(range(5))

    run(work)


def test_stop_strings_need_a_tokenizer_and_a_text():
    async def work() -> None:
        async with driving(text=lambda: None) as (driver, _):
            with pytest.raises(RequestError, match="has no tokenizer"):
                await stopped(driver, ("a",), prompt=[1])  # pyright: ignore[reportArgumentType]
        async with driving(text=Plain) as (driver, _):
            with pytest.raises(RequestError, match="empty text"):
                await stopped(driver, ("a", ""))

    run(work)


def test_an_error_that_comes_with_the_last_tokens_ends_several_handles_too():
    """One signal tells of both, so whoever waits for another one after the tokens never ends."""

    taken: list[list[int]] = []

    async def work() -> None:
        request = Request(0, [1], Sampling(max_tokens=9), draft_tokens=0)
        request.accept(Progress(request=0, slot=0, tokens=[5], verified=False))
        request.fail(RequestFailedError("the card is on fire"))
        async with asyncio.timeout(5):
            async for _, chunk in merge([Handle(request, asyncio.Event())]):
                taken.append(chunk.token_ids)

    with pytest.raises(RequestFailedError, match="on fire"):
        asyncio.run(work())
    assert taken == [[5]]
