"""The loop of a rank: it turns plans into steps.

    leader (rank 0): inbox -> StepPlan -> the same plan to every follower -> step -> StepEvent
    follower:        StepPlan -> digest check -> the same step
One plan, one step: what reaches the inbox during a step is part of the next plan. While no request
is active, the leader sleeps on its inbox and the followers on their connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from outrider.actors.errors import DivergenceError
from outrider.actors.ranks.connection import Connection
from outrider.actors.ranks.depth import Depth
from outrider.actors.ranks.messages import Commands
from outrider.model.step import Join, Leave, Progress, StepEvent, StepPlan

if TYPE_CHECKING:
    pass


PLAN_TOKENS = 1 << 20
"""The leader stops reading its inbox at this many prompt tokens: a StepPlan has a size limit."""


class Steps(Protocol):
    """What the loop needs of model.runner.Runner."""

    @property
    def has_work(self) -> bool: ...
    @property
    def draft_limit(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    def apply(self, commands: Sequence[Join | Leave]) -> None: ...
    def step(self) -> list[Progress]: ...
    def limit_drafts(self, depth: int) -> None: ...
    def digest(self) -> int: ...


class RankLoop:
    """run() until a StepPlan says stop. Only the leader has an inbox (and followers to tell)."""

    def __init__(
        self,
        runner: Steps,
        *,
        connection: Connection,
        followers: Sequence[Connection] | None,
        depth: Depth | None = None,
    ) -> None:
        """connection: the driver's (leader) or the leader's (follower). followers None: a follower.

        depth: what chooses the drafts of each plan; the leader's.
        """
        self._runner = runner
        self._connection = connection
        self._followers = followers
        self._depth = depth

    def run(self) -> None:
        if self._followers is None:
            self._follow()
        else:
            self._lead(self._followers)

    def _lead(self, followers: Sequence[Connection]) -> None:
        iteration = 0
        unstarted: set[int] = set()  # joined, but without a token: their prefill goes on
        for seq in count():
            commands, stop = self._read_inbox()
            depth = self._depth and self._depth.choose(self._runner.draft_limit)
            digest = self._runner.digest()
            plan = StepPlan(seq=seq, commands=commands, digest=digest, stop=stop, depth=depth)
            for follower in followers:
                follower.send(plan)
            if stop:
                return
            unstarted.update(c.request for c in commands if isinstance(c, Join))
            unstarted.difference_update(c.request for c in commands if isinstance(c, Leave))
            self._apply(plan)
            if not self._runner.has_work:
                continue
            started = perf_counter()
            progress = self._runner.step()
            step_s = perf_counter() - started
            iteration += 1
            self._connection.send(StepEvent(iteration, step_s, progress, depth))
            if self._depth and not unstarted:
                self._depth.note(step_s, progress, self._runner.num_drafts)
            unstarted.difference_update(p.request for p in progress)

    def _read_inbox(self) -> tuple[list[Join | Leave], bool]:
        """All that waits in the inbox, in order; sleeps on it when there is nothing else to do."""
        commands: list[Join | Leave] = []
        tokens = 0
        while (not commands and not self._runner.has_work) or self._connection.ready():
            received = self._connection.receive(Commands)
            commands += received.commands
            if received.stop:
                return commands, True
            tokens += sum(len(c.tokens) for c in received.commands if isinstance(c, Join))
            if tokens > PLAN_TOKENS:
                break
        return commands, False

    def _follow(self) -> None:
        for seq in count():
            plan = self._connection.receive(StepPlan)
            mine = self._runner.digest()
            if plan.seq != seq or plan.digest != mine:
                raise DivergenceError(
                    f"plan {plan.seq} of the leader has slot-table digest {plan.digest:#018x}; "
                    f"this rank is at plan {seq} with {mine:#018x}"
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
