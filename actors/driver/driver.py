"""The driver: requests in, commands to the ranks, their progress back to whoever waits.

    submit -> Scheduler -> Commands -> ranks        ranks -> StepEvent -> Scheduler -> Handle
Plain asyncio: a DriverActor, a Serve replica or a test hosts it. It never waits for a rank within
an iteration. Ranks that are lost are replaced (driver/supervisor.py), and requests go on from what
they have; new ones wait meanwhile. When that fails, every unfinished one ends with EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from outrider.actors.cluster.spec import RecoverySpec
from outrider.actors.driver.grammars import GrammarChecker
from outrider.actors.driver.handle import Handle
from outrider.actors.driver.messages import Completion, GenerationRequest
from outrider.actors.driver.request import Detokenizer, Request
from outrider.actors.driver.scheduler import Limits, Scheduler
from outrider.actors.driver.supervisor import Supervisor
from outrider.actors.errors import (
    EngineClosedError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)
from outrider.actors.ranks.group import Ranks
from outrider.actors.ranks.messages import Commands
from outrider.model.step import Command, Grammar, Join, Sampling, StepEvent

log = logging.getLogger(__name__)
COMMAND_TOKENS = 1 << 20
"""Prompt tokens after which a list of commands is split, so that each message fits a connection."""


class Text(Protocol):
    """What the driver needs of model.text.Tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def stream(self, *, special: bool = False) -> Detokenizer: ...


class Driver:
    """start() once, then submit at will; close() once. All calls from one event loop."""

    def __init__(
        self,
        limits: Limits,
        new_ranks: Callable[[], Ranks],
        *,
        recovery: RecoverySpec | None = None,
        load_text: Callable[[], Text | None] = lambda: None,
    ) -> None:
        """new_ranks: another group at each call. load_text runs in a thread while the ranks load;
        None: prompts are token ids only."""
        self.text: Text | None = None
        """The tokenizer, once start() has returned."""
        self._supervisor = Supervisor(new_ranks, recovery or RecoverySpec(), self)
        self._load_text = load_text
        self._scheduler = Scheduler(limits)
        self._handles: dict[int, Handle] = {}
        """Of unfinished requests, by number."""
        self._keys: dict[str, int] = {}
        self._grammars = GrammarChecker()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Future[None] | None = None
        self._dead: EngineDeadError | None = None
        self._commands_due = asyncio.Event()
        self._working = asyncio.Event()
        self._num_steps = 0
        self._depth = limits.draft_tokens
        self._step_s = self._busy_s = 0.0
        self._started_s = self._busy_since_s = time.monotonic()

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    @property
    def ranks(self) -> Ranks:
        """The ranks that work, or are on their way."""
        return self._supervisor.ranks

    @property
    def is_recovering(self) -> bool:
        """Whether the ranks were lost and others are on their way."""
        return bool(self._tasks) and not self._supervisor.is_ready

    @property
    def error(self) -> EngineDeadError | None:
        """Why no request is taken any more."""
        return self._dead

    async def start(self) -> None:
        """Returns once a first token has come through every rank. ConfigError, EngineDeadError."""
        starting = asyncio.ensure_future(self._supervisor.start())
        try:
            _, self.text = await asyncio.gather(starting, asyncio.to_thread(self._load_text))
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._supervisor.kill()
            raise
        for work in (self._supervisor.run(), self._send_commands_when_due()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)
        probe = GenerationRequest(prompt=[0], sampling=Sampling(max_tokens=1))
        await self.submit(probe).result()
        self._scheduler.reset_totals()
        self._num_steps, self._started_s = 0, time.monotonic()
        self._step_s = self._busy_s = 0.0

    async def check_grammar(self, grammar: Grammar | None) -> None:
        """RequestError for a grammar that no answer can be held to here, within a second.

        To be called before `submit`, which does not wait: a grammar that the ranks cannot compile
        then ends its request with RequestFailedError, and may hold up the others.
        """
        if grammar is None:
            return
        if self.text is None or not self.limits.eos_ids:
            raise RequestError(
                "sampling.grammar: it needs a checkpoint with a tokenizer and an EOS token"
            )
        await self._grammars.check(grammar)

    def submit(self, asked: GenerationRequest, changed: asyncio.Event | None = None) -> Handle:
        """Queue a request. RequestError or EngineDeadError at once.

        changed: an event that several handles share, for `merge`.
        """
        if self._dead is not None:
            raise self._dead
        if asked.key in self._keys:
            raise RequestError(f"key {asked.key!r} names an unfinished request already")
        if asked.stop and self.text is None:
            raise RequestError("this checkpoint has no tokenizer: use stop_ids, not stop strings")
        if not all(asked.stop):
            raise RequestError(f"stop = {list(asked.stop)}: an empty text stops nothing")
        detokenizer = None if self.text is None else self.text.stream(special=asked.show_special)
        request = self._scheduler.add(asked, self.encode(asked.prompt), detokenizer)
        handle = Handle(request, changed or asyncio.Event())
        self._handles[request.number] = handle
        if request.key:
            self._keys[request.key] = request.number
        self._note_work()
        self._commands_due.set()
        return handle

    def check_queue(self, num_requests: int) -> None:
        """QueueFullError unless so many more may come. For servers: a script may queue any number.

        limits.max_queue bounds those that wait; requests that find a free slot do not.
        """
        self._send_commands()
        most, waiting = self.limits.max_queue, self._scheduler.num_waiting
        free_slots = 0 if waiting else self._scheduler.blocks.free_slots
        if waiting + num_requests - free_slots > most:
            raise QueueFullError(
                f"{waiting} requests wait and {num_requests} more were sent: limits.max_queue = "
                f"{most} is the most; send them again later, or raise limits.max_queue in "
                "cluster.yaml"
            )

    async def generate(
        self,
        asked: Sequence[GenerationRequest],
        on_answer: Callable[[int, Completion], None] = lambda index, completion: None,
    ) -> list[Completion]:
        """All answers, in order. Nothing runs when one of the requests is refused.

        on_answer: told of each answer as soon as it is there, with the index of its request.
        """
        handles: list[Handle] = []

        async def answer(index: int, handle: Handle) -> Completion:
            completion = await handle.result()
            on_answer(index, completion)
            return completion

        checked = 0
        try:
            for one in asked:
                await self.check_grammar(one.sampling.grammar)
                checked += 1
            for one in asked:
                handles.append(self.submit(one))
            return list(await asyncio.gather(*map(answer, range(len(asked)), handles)))
        except RequestError as error:
            if len(asked) == 1:
                raise
            index = len(handles) if checked == len(asked) else checked
            where = f"prompt {index + 1} of {len(asked)}"
            raise type(error)(f"{where}: {error}") from None
        finally:
            for handle in handles:
                self.abort(handle.request.number)

    def encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least 1 token")
        if self.text is None:
            raise RequestError("this checkpoint has no tokenizer: give the prompt as token ids")
        return self.text.encode(prompt)

    def abort(self, which: int | str) -> None:
        """End a request by number or key: its handle raises RequestAbortedError. Unknown: no-op."""
        number = self._keys.get(which) if isinstance(which, str) else which
        request = None if number is None else self._scheduler.abort(number)
        if request is not None:
            self._notify(request)
            self._commands_due.set()

    def stats(self) -> dict[str, Any]:
        """Sums since start. busy_s: there was work; step_s of it: the leader was in a step."""
        now, scheduler = time.monotonic(), self._scheduler
        counters, blocks = scheduler.counters, scheduler.blocks
        busy_s = self._busy_s + (now - self._busy_since_s if self._working.is_set() else 0.0)
        return {
            "uptime_s": now - self._started_s,
            "busy_s": busy_s,
            **{f"requests_{name}": count for name, count in scheduler.num_requests.items()},
            "queued": scheduler.num_waiting,
            "active": scheduler.num_running,
            "free_pages": blocks.available_pages,
            "num_pages": blocks.num_pages,
            "preemptions": scheduler.num_preemptions,
            "prefix_hits": scheduler.num_hits,
            "cached_tokens": scheduler.cached_tokens,
            "prefix_evictions": scheduler.prefix.num_evicted,
            "draft_depth": self._depth,
            "steps": self._num_steps,
            "step_s": self._step_s,
            "iterations": counters.iterations,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "accepted_per_position": list(counters.per_position),
            "tokens": counters.tokens,
            "tokens_per_s": counters.tokens / busy_s if busy_s else 0.0,
            "recovering": self.is_recovering,
            "recoveries": self._supervisor.num_recoveries,
            "recovery_s": self._supervisor.recovery_s,
            "last_recovery_s": self._supervisor.last_recovery_s,
        }

    async def close(self) -> None:
        """Unfinished requests end with EngineClosedError; returns when the ranks are gone."""
        if self._ending is not None:
            await self._ending
        await self._end(EngineClosedError("the engine was closed"), self._supervisor.stop)

    # What the supervisor says and asks (supervisor.Work).

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def prefilling(self) -> bool:
        return self._scheduler.prefilling

    def apply(self, event: StepEvent) -> None:
        """One step of the ranks. What it freed may let waiting requests join at once."""
        self._num_steps += 1
        self._step_s += event.step_s
        self._depth = self.limits.draft_tokens if event.depth is None else event.depth
        for request in self._scheduler.apply(event):
            self._notify(request)
        self._send_commands()

    def lost(self, error: EngineDeadError) -> bool:
        """The ranks are gone. A request that is to blame for it ends alone, the others wait."""
        culprit = self._scheduler.suspend_all()
        if culprit is None:
            return False
        why = (
            f"request {culprit.number} is not tried again: the ranks were lost "
            f"{culprit.losses_alone} times in a row while it was the only one in a slot: {error}"
        )
        log.error("%s", why)
        self._scheduler.fail(culprit, RequestFailedError(why, error.detail))
        self._notify(culprit)
        return True

    def ready(self, num_pages: int | None) -> None:
        """Other ranks work now, or the first ones."""
        if num_pages is not None:
            for request in self._scheduler.use_ranks(num_pages):
                self._notify(request)
        self._commands_due.set()

    async def _send_commands_when_due(self) -> None:
        """Once for all that is submitted and aborted in one turn of the event loop."""
        while True:
            await self._commands_due.wait()
            self._commands_due.clear()
            self._send_commands()

    def _send_commands(self) -> None:
        """What is due, unless the ranks are on their way: then it is when they are ready."""
        if not self._supervisor.is_ready:
            return
        batch: list[Command] = []
        num_tokens = 0
        for command in self._scheduler.commands():
            batch.append(command)
            if isinstance(command, Join):
                handle = self._handles.get(command.request)
                if handle is not None:  # it has its first slot; nobody waits for a later one
                    handle.changed.set()
                num_tokens += len(command.tokens) + len(command.emitted)
            if num_tokens > COMMAND_TOKENS:
                self._supervisor.send(Commands(commands=batch))
                batch, num_tokens = [], 0
        if batch:
            self._supervisor.send(Commands(commands=batch))

    def _notify(self, request: Request) -> None:
        """Wake whoever waits for a request that has changed; forget it if it has ended."""
        handle = self._handles[request.number]
        if request.ended:
            del self._handles[request.number]
            self._keys.pop(request.key, None)
            self._note_work()
        handle.changed.set()

    def _note_work(self) -> None:
        """Start or stop the clock of busy time."""
        now, working = time.monotonic(), bool(self._handles)
        if working and not self._working.is_set():
            self._busy_since_s = now
            self._working.set()
        elif not working and self._working.is_set():
            self._busy_s += now - self._busy_since_s
            self._working.clear()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Whatever ends one of the background tasks ends the engine."""
        if task.cancelled() or self._dead is not None:
            return
        error = task.exception()
        if not isinstance(error, EngineDeadError):
            log.error("the driver failed", exc_info=error)
            error = EngineDeadError(f"the driver failed: {type(error).__name__}: {error}")
        self._ending = asyncio.ensure_future(self._end(error, self._supervisor.kill))

    async def _end(
        self, error: EngineDeadError, end_ranks: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        if self._dead is None:
            self._dead = error
            for request in self._scheduler.fail_all(error):
                self._notify(request)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._grammars.close()
        await end_ranks()
