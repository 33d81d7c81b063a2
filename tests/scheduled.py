"""A scheduler over real ranks in this process, step by step, as driver and ranks are over Ray.

    Scheduled(team).submit(prompt, ...) -> Request;   step() or run() until all have ended

Every rank applies the same commands. What a step brings reaches the scheduler `lag` steps later, as
events do that are on their way while the ranks step on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from outrider.actors.driver.messages import GenerationRequest
from outrider.actors.driver.request import Request
from outrider.actors.driver.scheduler import Limits, Scheduler
from outrider.model.plan import overshoot_rows
from outrider.model.runner import Runner
from outrider.model.step import Command, Progress, Sampling, StepEvent
from tests.ranks import Team

SNAPSHOT_TOKENS = 24


class Scheduled:
    """team: its ranks must be idle. lag: steps between a result and the scheduler's reading it."""

    def __init__(self, team: Team, *, lag: int = 0, **changes: Any) -> None:
        run = team.run_config
        keys: dict[str, Any] = {
            "max_slots": run.max_slots,
            "max_model_len": run.max_model_len,
            "max_queue": 1024,
            "num_pages": run.num_pages,
            "page_tokens": run.page_tokens,
            "draft_tokens": run.draft_tokens,
            "drafter": run.drafter,
            "overshoot_rows": overshoot_rows(run.draft_tokens),
            "num_snapshots": run.num_snapshots,
            "snapshot_tokens": SNAPSHOT_TOKENS,
            "vocab_size": team.model.vocab_size,
            "eos_ids": (),
            **changes,
        }
        self.team, self.lag = team, lag
        self.scheduler = Scheduler(Limits(**keys))
        self.most_together = 0
        """The most requests that had a slot at a time."""
        self._events: deque[StepEvent] = deque()
        self._steps = 0

    def submit(
        self, prompt: Sequence[int], *, priority: int = 0, cache_salt: str = "", **sampling: Any
    ) -> Request:
        asked = GenerationRequest(
            prompt=list(prompt),
            sampling=Sampling(**sampling),
            priority=priority,
            cache_salt=cache_salt,
        )
        return self.scheduler.add(asked, list(prompt))

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.unfinished or self._events or self.team.runners[0].has_work)

    def step(self) -> None:
        """Commands to the ranks, a step of theirs, and what they said `lag` steps ago."""
        commands = self.scheduler.commands()
        self.scheduler.blocks.check()
        self.scheduler.prefix.check()
        self.most_together = max(self.most_together, self.scheduler.num_running)

        def advance(runner: Runner) -> tuple[list[Progress], int]:
            return _advance(runner, commands), runner.digest()

        results = self.team.each(advance)
        assert all(other == results[0] for other in results[1:]), "ranks disagree"
        self._steps += 1
        self._events.append(StepEvent(self._steps, 0.0, results[0][0]))
        idle = not self.team.runners[0].has_work
        while self._events and (idle or len(self._events) > self.lag):
            self.scheduler.apply(self._events.popleft())

    def run(self, most_steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.has_work:
                self.scheduler.blocks.check_idle()
                return
            self.step()
        waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
        raise AssertionError(f"{waiting} requests wait and {running} run after {most_steps} steps")


def _advance(runner: Runner, commands: list[Command]) -> list[Progress]:
    runner.apply(commands)
    return runner.step() if runner.has_work else []
