"""Bars on the terminal: how much of the weights is loaded, how many prompts are answered.

    (done, to do), again and again -> ProgressBar -> stderr
It appears once the total is known and goes no further than that. It remembers the bar.
"""

from __future__ import annotations

import shutil
from typing import Any


class ProgressBar:
    """What an Engine shows, and the commands, where stderr is a terminal."""

    def __init__(self, what: str = "loading weights", unit: str = "B") -> None:
        """what: is being done; unit: of what is counted, bytes over all ranks for weights."""
        self._what, self._unit = what, unit
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """How much is done of how much; total 0: not known yet."""
        from tqdm import tqdm

        if total and self._bar is None:
            # tqdm shows nothing on a terminal that does not tell its size.
            width, height = shutil.get_terminal_size()
            self._bar = tqdm(
                desc=self._what,
                total=total,
                unit=self._unit,
                unit_scale=True,
                ncols=width,
                nrows=height,
            )
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        """Leave the bar as it is; twice does no harm."""
        if self._bar is not None:
            self._bar.close()
