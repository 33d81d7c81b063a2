"""A bar on the terminal that shows how much of the weights is loaded.

    (bytes loaded, bytes to load), again and again -> LoadingBar -> stderr
It appears once the total is known and goes no further than that. It remembers the bar.
"""

from __future__ import annotations

import shutil
from typing import Any


class LoadingBar:
    """What `Engine.from_config` shows, and the commands, where stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """Both in bytes over all ranks; total 0: not known yet."""
        from tqdm import tqdm

        if total and self._bar is None:
            # tqdm shows nothing on a terminal that does not tell its size.
            width, height = shutil.get_terminal_size()
            self._bar = tqdm(
                desc="loading weights",
                total=total,
                unit="B",
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
