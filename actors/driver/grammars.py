"""Tries the grammar of a request before any rank sees it, in a process that may be killed.

    Grammar -> GrammarChecker.check -> the process (model/grammar.py: check_grammars) -> nothing, or
                                       RequestError with the reason

llguidance bounds most of what a grammar may cost, not all of it: compiling `multipleOf: 999983`
takes half a minute, and no thread can be ended. The process also bounds memory. It starts with the
first grammar, and ends when its standard input is closed, with its driver at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict

import msgspec

from outrider.actors.errors import RequestError
from outrider.model.step import Grammar

LIMIT_S = 0.8
"""How long a grammar may take to compile."""
START_S = 20.0
"""How long the process may take to start, on a machine that is busy."""
KEPT_VERDICTS = 256
CODE = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from outrider.model.grammar import check_grammars; check_grammars()"
)


class GrammarChecker:
    """check() as often as needed, from one event loop; close() once."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._one_check = asyncio.Lock()
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        """Grammars that were tried -> why they were refused, or ""."""

    async def check(self, grammar: Grammar) -> None:
        """RequestError for a grammar that cannot be compiled, or not within LIMIT_S."""
        if grammar not in self._verdicts:
            async with self._one_check:
                if grammar not in self._verdicts:  # another caller may have asked meanwhile
                    self._verdicts[grammar] = await self._try(grammar)
                    if len(self._verdicts) > KEPT_VERDICTS:
                        self._verdicts.popitem(last=False)
        if verdict := self._verdicts[grammar]:
            raise _refusal(grammar, verdict)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                process.kill()
            await process.wait()

    async def _try(self, grammar: Grammar) -> str:
        """Why the grammar is refused, or "". RequestError where the process gives no answer, which
        another time it may give."""
        answered = False
        try:
            if self._process is None:
                await self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            verdict = await _line(self._process, LIMIT_S)
            answered = True
            return verdict
        except TimeoutError:
            why = f"it takes more than {LIMIT_S:g} s to compile: make it simpler"
            raise _refusal(grammar, why) from None
        except (EOFError, ConnectionError):
            why = "its compiler ended, by a lack of memory or of stack: make it simpler"
            raise _refusal(grammar, why) from None
        finally:
            if not answered:  # also when the caller goes: a later line is no answer to the next
                await self.close()

    async def _start(self) -> None:
        command = (sys.executable, "-c", CODE, *sys.path)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        await _line(self._process, START_S)


def _refusal(grammar: Grammar, why: str) -> RequestError:
    return RequestError(f"sampling.grammar ({grammar.kind}): {why}")


async def _line(process: Process, limit_s: float) -> str:
    """The next line that the process writes. TimeoutError; EOFError when it has ended."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), limit_s)
    if not line:
        raise EOFError
    return msgspec.json.decode(line, type=str)
