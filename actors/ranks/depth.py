"""How many drafts an iteration are worth their time: measured, chosen, and measured again.

    step (seconds, Progress) -> note -> time by (slots, depth), acceptance by position -> choose
The leader has one, and its choice goes to every rank in the StepPlan, so ranks cannot disagree. The
best depth yields the most tokens a second: (1 + sum of the chances that draft 1..k is kept) / time.
Every depth is tried at first. After that the depth whose last trial is the oldest is tried again,
when that costs at most TRIAL_COST of the tokens since the last trial, or after MAX_PROBE_STEPS. So
a depth that was bad once is not ruled out for good. Requests may take fewer drafts than are chosen:
a step counts for the depth that ran, and a depth that a trial did not bring about waits its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.model.step import Progress

TRIAL_STEPS = 3
"""Steps of one trial that count. One more runs before them: it may still hold the draft's work for
rows that the depth before left to it."""
MIN_PROBE_STEPS, MAX_PROBE_STEPS = 96, 1536
"""Steps between two trials: at least, and at most. A depth that was dear in its last trial may have
been slowed by another program, so it is tried again however dear it seems."""
TRIAL_COST = 0.005
"""A trial costs the tokens that the best depth would have made meanwhile, less its own."""
FASTER_WEIGHT, SLOWER_WEIGHT, CHANCE_WEIGHT = 0.5, 0.05, 0.03
"""Weight of a new measurement in its moving average. What is slower is more often another program's
doing, so it counts less: the average lies near the undisturbed time, for each depth alike."""
OUTLIER = 1.5
"""A step that took more than this many times the average counts as this many."""
BETTER = 1.03
"""Another depth must be better by this ratio to replace the present one, against the noise."""


class Depth:
    """Chooses among 0 to max_depth drafts. Its caller measures the time; a test may invent it."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = self.depth = max_depth
        self._seconds: dict[tuple[int, int], float] = {}
        """(size of the batch, depth) -> moving average of a step's time."""
        self._tried_at: dict[tuple[int, int], int] = {}
        """(size of the batch, depth) -> number of the step that tried or measured it last."""
        self._chance = [0.7] * max_depth
        """By position of a draft: the chance that it is kept when all drafts before it are."""
        self._size = 1
        """Size of the batch, rounded up to a power of two."""
        self._steps = self._last_trial = 0
        self._trial_left = 0
        """Steps that the present trial still takes; 0 when the best depth runs."""

    def choose(self, limit: int) -> int:
        """The depth of the next plan, at most `limit`: more drafts than that no request takes."""
        size, depths = self._size, range(min(limit, self.max_depth) + 1)
        if self.depth not in depths:
            self._trial_left = 0
        if self._trial_left > 0:
            return self.depth
        untried = [k for k in depths if (size, k) not in self._tried_at]
        if untried:
            return self._try(untried[-1])
        known = [k for k in depths if (size, k) in self._seconds]
        best = max(known, key=self.tokens_per_s, default=depths[-1])
        oldest = min(depths, key=lambda k: self._tried_at[size, k])
        since = self._steps - self._last_trial
        cost = self._trial_cost_steps(oldest, best) if oldest in known else 0.0
        if since >= min(MAX_PROBE_STEPS, max(MIN_PROBE_STEPS, cost / TRIAL_COST)):
            return self._try(oldest)
        if self.depth not in known or (
            self.tokens_per_s(best) > BETTER * self.tokens_per_s(self.depth)
        ):
            self.depth = best
        return self.depth

    def note(self, step_s: float, progress: Sequence[Progress], num_drafts: int) -> None:
        """Learn from a step without prefill: its time, and what became of its drafts.

        num_drafts: those that its iteration made, whatever was chosen. All requests may take fewer,
        by their own settings or near their ends.
        """
        verified = [p for p in progress if p.verified]
        if not verified:
            return
        self._steps += 1
        for one in verified:
            for position in range(min(one.drafted, one.accepted + 1)):
                kept = float(one.accepted > position)
                self._chance[position] += CHANCE_WEIGHT * (kept - self._chance[position])
        self._size = 1 << (len(verified) - 1).bit_length()
        first_of_trial = self._trial_left == TRIAL_STEPS + 1
        self._trial_left = max(0, self._trial_left - 1)
        if not first_of_trial:
            self._measure((self._size, num_drafts), step_s)

    def _measure(self, key: tuple[int, int], step_s: float) -> None:
        average = self._seconds.get(key, step_s)
        weight = FASTER_WEIGHT if step_s < average else SLOWER_WEIGHT
        self._seconds[key] = average + weight * (min(step_s, OUTLIER * average) - average)
        self._tried_at[key] = self._steps

    def _try(self, depth: int) -> int:
        self.depth = depth
        self._trial_left, self._last_trial = TRIAL_STEPS + 1, self._steps
        self._tried_at[self._size, depth] = self._steps
        return depth

    def _trial_cost_steps(self, depth: int, best: int) -> float:
        """The tokens that a trial of `depth` costs, as a number of steps of the best depth."""
        length = self._seconds[self._size, depth] / self._seconds[self._size, best]
        lost = 1.0 - self.tokens_per_s(depth) / self.tokens_per_s(best)
        return (TRIAL_STEPS + 1) * length * lost

    def tokens_per_s(self, depth: int) -> float:
        """What a slot gains at this depth in a batch of the present size."""
        tokens, chance = 1.0, 1.0
        for kept in self._chance[:depth]:
            chance *= kept
            tokens += chance
        return tokens / self._seconds[self._size, depth]
