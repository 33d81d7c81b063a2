"""The loop of a rank, which turns plans into steps.

    leader (rank 0): inbox -> StepPlan -> the same plan to every follower -> step -> StepEvent
    follower:        StepPlan -> digest check -> the same step
Each plan is one step. What reaches the inbox during a step is part of the next plan. While there is
no work, the leader waits for its inbox and the followers wait for the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import perf_counter
from typing import Protocol

from outrider.actors.errors import DivergenceError
from outrider.actors.ranks.connection import Connection
from outrider.actors.ranks.depth import Depth
from outrider.actors.ranks.messages import Commands
from outrider.model.step import Command, Join, Leave, Progress, StepEvent, StepPlan

PLAN_TOKENS = 1 << 20
"""The leader stops reading its inbox at this many prompt tokens: a StepPlan has a size limit."""


class Steps(Protocol):
    """The part of model.runner.Runner that the loop uses."""

    @property
    def has_work(self) -> bool: ...
    @property
    def draft_limit(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    def apply(self, commands: Sequence[Command]) -> None: ...
    def step(self) -> list[Progress]: ...
    def limit_drafts(self, depth: int) -> None: ...
    def digest(self) -> int: ...


class RankLoop:
    """Runs one rank's steps until a StepPlan says stop.

    connection: to the driver for the leader, to the leader for a follower. followers: connections
    to them; None makes this rank a follower. depth: chooses how many drafts each plan of the leader
    allows; None leaves them at K.
    """

    def __init__(
        self,
        runner: Steps,
        *,
        connection: Connection,
        followers: Sequence[Connection] | None,
        depth: Depth | None = None,
    ) -> None:
        self._runner = runner
        self._connection = connection
        self._followers = followers
        self._depth = depth

    def run(self) -> None:
        """Raises DivergenceError when this rank's slot table is not the leader's."""
        if self._followers is None:
            self._follow()
        else:
            self._lead(self._followers)

    def _lead(self, followers: Sequence[Connection]) -> None:
        iteration = 0
        in_prefill: set[int] = set()  # requests that have no token yet
        for seq in count():
            commands, stop = self._read_inbox()
            depth = self._depth and self._depth.choose(self._runner.draft_limit)
            digest = self._runner.digest()
            plan = StepPlan(seq=seq, commands=commands, digest=digest, stop=stop, depth=depth)
            for follower in followers:
                follower.send(plan)
            if stop:
                return
            in_prefill.update(c.request for c in commands if isinstance(c, Join))
            in_prefill.difference_update(c.request for c in commands if isinstance(c, Leave))
            self._apply(plan)
            if not self._runner.has_work:
                continue
            started = perf_counter()
            progress = self._runner.step()
            step_s = perf_counter() - started
            iteration += 1
            self._connection.send(StepEvent(iteration, step_s, progress, depth))
            if self._depth and not in_prefill:
                self._depth.note(step_s, progress, self._runner.num_drafts)
            in_prefill.difference_update(p.request for p in progress if not p.prompt_logprobs)

    def _read_inbox(self) -> tuple[list[Command], bool]:
        """-> the commands in the inbox and whether to stop. Waits while there is no work."""
        commands: list[Command] = []
        tokens = 0
        while (not commands and not self._runner.has_work) or self._connection.ready():
            received = self._connection.receive(Commands)
            commands += received.commands
            if received.stop:
                return commands, True
            joins = [c for c in received.commands if isinstance(c, Join)]
            tokens += sum(len(c.tokens) + len(c.emitted) for c in joins)
            if tokens > PLAN_TOKENS:
                break
        return commands, False

    def _follow(self) -> None:
        for seq in count():
            plan = self._connection.receive(StepPlan)
            digest = self._runner.digest()
            if plan.seq != seq or plan.digest != digest:
                raise DivergenceError(
                    f"plan {plan.seq} of the leader has slot-table digest {plan.digest:#018x}; "
                    f"this rank is at plan {seq} with {digest:#018x}"
                )
            if plan.stop:
                return
            self._apply(plan)
            if self._runner.has_work:
                self._runner.step()

    def _apply(self, plan: StepPlan) -> None:
        self._runner.apply(plan.commands)
        if plan.depth is not None:
            self._runner.limit_drafts(plan.depth)
