"""How many drafts an iteration are worth their time: measured, chosen, and measured again.

    step (seconds, Progress) -> note -> time by (slots, depth), acceptance by position -> choose
The leader has one, and its choice goes to every rank in the StepPlan, so ranks cannot disagree. The
best depth yields the most tokens a second: (1 + sum of the chances that draft 1..k is kept) / time.
All depths are tried at first. Then it is the turn of the one not tried for longest whenever such a
trial costs at most TRIAL_COST of the tokens since the last, or PROBE_BY steps have passed: none is
off for good.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.model.step import Progress

TRIES = 3
"""Steps of one trial that count; the one before them may still be the last depth's."""
PROBE_EVERY, PROBE_BY = 96, 1536
"""Steps between two trials: at least, and at most however dear one is, for a measured time may be
another program's doing."""
TRIAL_COST = 0.005
"""A trial costs the tokens that the best depth would have made meanwhile, less its own."""
FASTER_WEIGHT, SLOWER_WEIGHT, CHANCE_WEIGHT = 0.5, 0.05, 0.03
"""Of a new measurement in its moving average. What is slower is more often another program's
doing, so it counts less: the average lies near the undisturbed time, for each depth alike."""
OUTLIER = 1.5
"""A step that took more times the average than this counts as so many."""
BETTER = 1.03
"""A depth replaces the present one from this ratio on, so that noise does not make it swing."""


class Depth:
    """Chooses among 0..most drafts. Its clock is the caller's: a test feeds it times."""

    def __init__(self, most: int) -> None:
        self.most = self.depth = most
        self._seconds: dict[tuple[int, int], float] = {}
        """(size of the batch, depth) -> moving average of a step"""
        self._tried: dict[tuple[int, int], int] = {}
        """The same -> number of the step that measured it last"""
        self._chance = [0.7] * most
        """By position: that a draft is kept, given that those before it are"""
        self._size = 1
        self._steps = self._last_trial = 0
        self._trial = 0
        """Steps that the present trial still takes; 0: the best depth runs"""

    def choose(self) -> int:
        """The depth of the next plan."""
        if self._trial > 0:
            return self.depth
        size, depths = self._size, range(self.most + 1)
        unknown = [k for k in depths if (size, k) not in self._seconds]
        if unknown:
            return self._try(unknown[-1])
        best = max(depths, key=self.tokens_per_s)
        oldest = min(depths, key=lambda k: self._tried[size, k])
        since = self._steps - self._last_trial
        wait = max(PROBE_EVERY, self._trial_steps(oldest, best) / TRIAL_COST)
        if since >= min(PROBE_BY, wait):
            return self._try(oldest)
        if self.depth != best and self.tokens_per_s(best) > BETTER * self.tokens_per_s(self.depth):
            self.depth = best
        return self.depth

    def note(self, step_s: float, progress: Sequence[Progress]) -> None:
        """One step without prefill: how long it took, and what became of its drafts."""
        verified = [p for p in progress if p.verified]
        if not verified:
            return
        self._steps += 1
        for one in verified:
            for position in range(min(one.drafted, one.accepted + 1)):
                hit = float(one.accepted > position)
                self._chance[position] += CHANCE_WEIGHT * (hit - self._chance[position])
        size = 1 << (len(verified) - 1).bit_length()
        if size != self._size:
            self._size, self._trial = size, 0
            return
        settled = self._trial != TRIES + 1
        self._trial = max(0, self._trial - 1)
        used = max(one.drafted for one in verified)
        if not settled or used != self.depth:  # requests near their end, or that want fewer
            return
        key = (size, used)
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = step_s
        else:
            weight = FASTER_WEIGHT if step_s < known else SLOWER_WEIGHT
            self._seconds[key] += weight * (min(step_s, OUTLIER * known) - known)
        self._tried[key] = self._steps

    def _try(self, depth: int) -> int:
        self.depth = depth
        self._trial, self._last_trial = TRIES + 1, self._steps
        return depth

    def _trial_steps(self, depth: int, best: int) -> float:
        """Steps of the best depth whose tokens a trial of `depth` costs."""
        length = self._seconds[self._size, depth] / self._seconds[self._size, best]
        return (TRIES + 1) * length * (1.0 - self.tokens_per_s(depth) / self.tokens_per_s(best))

    def tokens_per_s(self, depth: int) -> float:
        """What a slot gains at this depth in a batch of the present size."""
        tokens, kept = 1.0, 1.0
        for chance in self._chance[:depth]:
            kept *= chance
            tokens += kept
        return tokens / self._seconds[self._size, depth]
