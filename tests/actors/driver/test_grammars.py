"""Grammars are tried in a process: what is wrong, too large or too slow is refused in time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest

from outrider.actors.driver.grammars import LIMIT_S, GrammarChecker
from outrider.actors.errors import RequestError
from outrider.model.step import Grammar

GOOD = Grammar("regex", "[a-z]+")
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
"""Half a minute of compiling."""
HOSTILE = (
    SLOW,
    Grammar("regex", "((a{1000}){1000}){1000}"),
    Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    Grammar("regex", "|".join(f"w{i}" for i in range(30_000))),
    Grammar("json_schema", '{"allOf": [' * 3000 + "{}" + "]}" * 3000),
    Grammar(
        "json_schema", json.dumps({"type": "integer", "minimum": -(10**300), "maximum": 10**300})
    ),
    Grammar("grammar", "root ::= " + "(" * 50_000),
)
"""All are refused, but for one that a fast machine may compile in time."""


def run(work: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def closing() -> None:
        checker = GrammarChecker()
        try:
            await checker.check(GOOD)
            await work(checker)
        finally:
            await checker.close()

    asyncio.run(asyncio.wait_for(closing(), 60))


async def refused(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as caught:
        await checker.check(grammar)
    return str(caught.value)


def test_the_reason_names_what_is_wrong() -> None:
    async def work(checker: GrammarChecker) -> None:
        schema = Grammar("json_schema", '{"type": "array", "contains": {}, "uniqueItems": true}')
        for _ in range(2):  # the second time it is remembered
            why = await refused(checker, schema)
            assert why == (
                'sampling.grammar (json_schema): Unimplemented keys: ["contains", "uniqueItems"]'
            )
        assert "unclosed group" in await refused(checker, Grammar("regex", "(a"))
        await checker.check(GOOD)

    run(work)


def test_whatever_comes_is_answered_in_time_and_the_loop_goes_on() -> None:
    async def work(checker: GrammarChecker) -> None:
        gaps: list[float] = []

        async def tick() -> None:
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - started)

        ticking = asyncio.ensure_future(tick())
        refusals = []
        for grammar in HOSTILE:
            started = time.monotonic()
            refusals += await asyncio.gather(checker.check(grammar), return_exceptions=True)
            assert time.monotonic() - started < LIMIT_S + 5 * max(gaps, default=0.0) + 0.5
            await checker.check(GOOD)
        ticking.cancel()
        assert [type(why) for why in refusals].count(RequestError) >= len(HOSTILE) - 1
        assert f"more than {LIMIT_S:g} s" in str(refusals[0])
        assert max(gaps) < LIMIT_S / 2

    run(work)


def test_a_grammar_that_is_known_does_not_wait_behind_a_slow_one() -> None:
    async def work(checker: GrammarChecker) -> None:
        slow = asyncio.ensure_future(checker.check(SLOW))
        await asyncio.sleep(0.05)
        await checker.check(GOOD)
        assert not slow.done()
        with pytest.raises(RequestError, match="takes more than"):
            await slow

    run(work)


def test_a_caller_that_goes_does_not_leave_its_answer_to_the_next() -> None:
    async def work(checker: GrammarChecker) -> None:
        going = asyncio.ensure_future(checker.check(Grammar("regex", "(b")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await checker.check(Grammar("regex", "c"))
        for size in (3, 4):
            waiting = [checker.check(Grammar("regex", f"(d|e){{{i}}}")) for i in range(size)]
            await asyncio.gather(*waiting)

    run(work)


def test_its_process_ends_with_it() -> None:
    async def work() -> None:
        checker = GrammarChecker()
        await checker.close()  # nothing was started
        await checker.check(GOOD)
        process = checker._process
        assert process is not None
        await checker.close()
        assert process.returncode is not None

    asyncio.run(work())
