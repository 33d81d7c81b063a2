"""What a driver is made of: its limits, its group of ranks and its tokenizer.

    DriverSetup -> assemble -> (RankGroup, Driver, warnings)
Used by the driver's actor and by a Serve replica alike.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from outrider.actors.cluster.spec import Spec
from outrider.actors.driver.driver import Driver, Text
from outrider.actors.driver.scheduler import Limits
from outrider.actors.ranks.group import RankGroup
from outrider.model.config import RunConfig
from outrider.parallel.affinity import pin_process


@dataclass(frozen=True, kw_only=True)
class DriverSetup:
    """All that a DriverActor is told."""

    spec: Spec
    run: RunConfig
    limits: Limits
    placement: PlacementGroup
    name: str


def assemble(setup: DriverSetup) -> tuple[RankGroup, Driver, list[str]]:
    """The driver of this process, pinned, and its ranks, not started; and what to warn of."""
    spec = setup.spec
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpus, mine = spec.rank_cpu_sets(), spec.driver_cpu_set()
    if mine is not None:
        pin_process(mine)
    ranks = RankGroup(spec, setup.run, setup.placement, cpus=cpus, name=setup.name)
    driver = Driver(
        setup.limits,
        ranks,
        watchdog_s=spec.ray.watchdog_s,
        load_text=lambda: load_text(Path(setup.run.model_dir)),
    )
    return ranks, driver, [str(warning.message) for warning in caught]


def load_text(model_dir: Path) -> Text | None:
    """The checkpoint's tokenizer, or None where it has none (then prompts are token ids)."""
    from outrider.model.text import Tokenizer

    return Tokenizer(model_dir) if Tokenizer.exists(model_dir) else None
