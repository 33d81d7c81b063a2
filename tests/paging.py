"""Ranks without a model for the scheduler's tests: what lies in which page, row by row.

    Ranks(scheduler, rng).run(): commands -> pages, states, snapshots -> tokens -> the scheduler

Every row of a page holds a hash of the text up to it, as its target's key and value would depend on
it, and one of the text up to the token behind it, as its draft's would. A state is the hash of all
rows so far, and the next token follows from it. So an answer tells whether every state and row was
that of its own text; `answer_to` computes it from the prompt alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.actors.driver.scheduler import Scheduler
from outrider.model.running import RunningRequest, SlotTable
from outrider.model.step import Command, Join, Leave, Progress, StepEvent

GARBAGE = -1


def fold(state: int, token: int) -> int:
    """The state behind one more row."""
    return (state * 1_000_003 + token + 1) % (1 << 61)


def next_token(state: int) -> int:
    return (state >> 7) % 89


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request says that nothing disturbs."""
    state, answer = 0, []
    for token in prompt:
        state = fold(state, token)
    for _ in range(num_tokens):
        answer.append(next_token(state))
        state = fold(state, answer[-1])
    return answer


@dataclass
class Slot:
    """What the ranks know of a request, beside what the host has read."""

    request: RunningRequest
    pages: list[int]
    tokens: list[int]
    """Its text so far, on the device."""
    state: int = 0
    rows: int = 0
    fresh: int = 0
    """Rows of the last pass, which the draft has not seen yet."""


@dataclass
class Ranks:
    """Each iteration brings a request 1 to K+1 tokens; its results are read one step later, and
    reach the scheduler `lag` steps after that."""

    scheduler: Scheduler
    rng: random.Random
    lag: int = 2
    chunk: int = 512
    slots: dict[int, Slot] = field(default_factory=dict)
    target: dict[tuple[int, int], int] = field(default_factory=dict)
    """(page, row of it) -> the hash of the text up to the row."""
    draft: dict[tuple[int, int], int] = field(default_factory=dict)
    """The same up to the token behind it."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Place -> state."""
    num_restored: int = 0
    num_run: int = 0
    """Rows of prompts that were computed."""
    most_together: int = 0

    def __post_init__(self) -> None:
        limits = self.scheduler.limits
        self.page, self.num_rows = limits.page_tokens, limits.draft_tokens + 1
        self.table = SlotTable(self.page, self.num_rows)
        self.events: deque[StepEvent] = deque()
        self.flying: deque[list[tuple[Slot, list[int]]]] = deque()

    def apply(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Join):
                self._join(command)
            elif isinstance(command, Leave):
                self.table.remove(command)
            elif (had := self.table.grow(command)) is not None:
                pages = self.slots[command.slot].pages
                assert had == len(pages)
                pages += command.pages
        self._check_owners()

    def _join(self, join: Join) -> None:
        request = self.table.add(join, self.num_rows - 1)
        slot = Slot(request, list(join.pages), [*join.tokens, *join.emitted])
        self.slots[join.slot] = slot
        if join.restore is None:
            return
        saved = join.restore
        self.num_restored += saved.rows
        slot.state, slot.rows = self.snapshots[saved.snapshot], saved.rows
        assert slot.pages[(saved.rows - 1) // self.page] == saved.page
        for memory in (self.target, self.draft):
            for row in range(self.page):
                memory[saved.page, row] = memory.get((saved.copied_page, row), GARBAGE)
        slot.fresh = 1
        if saved.rows < len(request.prompt):
            self._show_draft(slot)
        self._check_rows(slot)

    @property
    def has_work(self) -> bool:
        return bool(self.flying) or self.table.can_run

    def step(self) -> None:
        """Launch, then read what was launched before."""
        launched: list[tuple[Slot, list[int]]] = []
        for request in [*self.table.beginning(), *self.table.prefilling()[:2]]:
            slot = self.slots[request.slot]
            left = request.stop_after(request.prefilled) - request.prefilled
            self._run_prompt(slot, min(self.chunk, left))
            if not (request.prompt_left or request.resumes):
                slot.tokens.append(next_token(slot.state))
                launched.append((slot, slot.tokens[-1:]))
        for request in self.table.decoding():
            slot = self.slots[request.slot]
            launched.append((slot, self._iterate(slot)))
            request.launch_rows(self.num_rows)
        if launched:
            self.flying.append(launched)
        progress: list[Progress] = []
        while self.flying and (len(self.flying) > 1 or not launched):
            for slot, tokens in self.flying.popleft():
                verified = slot.request.emitted > 0
                progress += self.table.add_tokens(slot.request, tokens, [], verified=verified)
        self.events.append(StepEvent(1, 0.0, progress))

    def _run_prompt(self, slot: Slot, count: int) -> None:
        request = slot.request
        self.num_run += count
        for token in request.prompt[slot.rows : slot.rows + count]:
            self._write(slot, slot.rows, token)
        slot.fresh = count or slot.fresh
        request.launch_prompt(count)
        if request.prompt_left:
            self._show_draft(slot)
        else:
            slot.fresh -= 1  # the last one's follower is not known to the draft yet
            slot.rows -= 1
            self._show_draft(slot)
            slot.rows, slot.fresh = slot.rows + 1, 1
        place = request.place_at(slot.rows) if count else None
        if place is not None:
            self.snapshots[place] = slot.state

    def _iterate(self, slot: Slot) -> list[int]:
        """-> the tokens of a verify pass that kept 1 to K+1 rows."""
        self._show_draft(slot)
        self._check_rows(slot)
        slot.fresh = self.rng.randint(1, self.num_rows)
        start = slot.rows
        for _ in range(slot.fresh):
            self._write(slot, slot.rows, slot.tokens[slot.rows])
            slot.tokens.append(next_token(slot.state))
        for row in range(start, start + self.num_rows):
            place = slot.pages[row // self.page], row % self.page
            self.draft[place] = GARBAGE
            if row >= slot.rows:
                self.target[place] = GARBAGE
        return slot.tokens[-slot.fresh :]

    def _write(self, slot: Slot, row: int, token: int) -> None:
        slot.state = fold(slot.state, token)
        self.target[slot.pages[row // self.page], row % self.page] = slot.state
        slot.rows += 1

    def _show_draft(self, slot: Slot) -> None:
        """The draft sees the rows of the last pass, with the tokens that followed them."""
        for row in range(slot.rows - slot.fresh, slot.rows):
            place = slot.pages[row // self.page], row % self.page
            self.draft[place] = fold(self.target[place], slot.tokens[row + 1])

    def _check_rows(self, slot: Slot) -> None:
        """Each row of a slot is that of its text, in target and draft."""
        if self.rng.random() > 0.2:
            return
        state = 0
        for row in range(slot.rows):
            state = fold(state, slot.tokens[row])
            place = slot.pages[row // self.page], row % self.page
            assert self.target[place] == state, f"row {row} is of another text"
            if row + 1 < min(slot.rows, len(slot.tokens)):
                seen = fold(state, slot.tokens[row + 1])
                assert self.draft[place] == seen, f"the draft's row {row} is of another text"
        assert slot.state == state, "the state is of another text"

    def _check_owners(self) -> None:
        """Two requests hold a page together only if both have begun with it."""
        owners: dict[int, tuple[Slot, int]] = {}
        for number, slot in self.slots.items():
            if self.table.get(number) is not slot.request:
                continue
            for index, page in enumerate(slot.pages):
                other, at = owners.setdefault(page, (slot, index))
                end = (index + 1) * self.page + 1
                same = other is slot or other.tokens[:end] == slot.tokens[:end]
                assert at == index and same, f"page {page} has two owners"  # noqa: PT018

    def turn(self) -> None:
        """Commands to the ranks, a step, and the events that have arrived."""
        commands = self.scheduler.commands()
        self.scheduler.blocks.check()
        self.scheduler.prefix.check()
        self.apply(commands)
        self.most_together = max(self.most_together, self.scheduler.num_running)
        if self.has_work:
            self.step()
        while self.events and (len(self.events) > self.lag or not self.has_work):
            self.scheduler.apply(self.events.popleft())

    def run(self, most_turns: int = 100_000) -> None:
        """Until all requests have ended."""
        for _ in range(most_turns):
            if not (self.scheduler.unfinished or self.has_work or self.events):
                self.scheduler.blocks.check_idle()
                return
            self.turn()
        raise AssertionError(f"{len(self.scheduler.unfinished)} requests never ended")
