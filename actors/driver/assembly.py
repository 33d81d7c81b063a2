"""What a driver is made of: its limits, its group of ranks and its tokenizer.

    DriverSetup -> assemble -> (Driver, warnings)
Used by the driver's actor and by a Serve replica alike.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from outrider.actors.cluster.shares import HostShare
from outrider.actors.cluster.spec import Spec
from outrider.actors.driver.driver import Driver
from outrider.actors.driver.scheduler import Limits
from outrider.actors.ranks.group import RankGroup
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.text import Tokenizer
from outrider.parallel.affinity import pin_process


@dataclass(frozen=True, kw_only=True)
class DriverSetup:
    """All that a DriverActor is told."""

    spec: Spec
    run: RunConfig
    limits: Limits
    placement: PlacementGroup
    """Bundle 0 is the driver's, the others are the ranks'."""
    name: str
    """Prefix of the ranks' actor names."""


def assemble(setup: DriverSetup, share: HostShare) -> tuple[Driver, list[str]]:
    """A driver, not started, and warnings for the user. Pins this process.

    share: this engine's part of the host; the caller keeps it for as long as the engine lives.
    """
    spec = setup.spec
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_cpus, driver_cpus = spec.rank_cpu_sets(share=share.cpus), spec.driver_cpu_set()
    if driver_cpus is not None:
        pin_process(driver_cpus)
    generations = count()

    def new_ranks() -> RankGroup:
        name = f"{setup.name}:{next(generations)}"
        return RankGroup(spec, setup.run, setup.placement, cpus=rank_cpus, name=name)

    driver = Driver(
        setup.limits,
        new_ranks,
        recovery=spec.recovery,
        load_text=lambda: load_text(spec, Path(setup.run.model_dir)),
    )
    return driver, [str(warning.message) for warning in caught]


def limits_of(spec: Spec, model: ModelConfig, run: RunConfig) -> Limits:
    """What bounds a request of this engine."""
    # Imported here, because it imports torch: a driver's own process needs it for nothing.
    from outrider.model.plan import overshoot_rows

    return Limits(
        max_slots=run.max_slots,
        max_model_len=run.max_model_len,
        max_queue=spec.limits.max_queue,
        num_pages=run.num_pages,
        page_tokens=run.page_tokens,
        draft_tokens=run.draft_tokens,
        drafter=run.drafter,
        overshoot_rows=overshoot_rows(run.draft_tokens),
        num_snapshots=run.num_snapshots,
        snapshot_tokens=spec.cache.prefix_tokens,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        sampling_defaults=spec.sampling_defaults(model),
    )


def load_text(spec: Spec, model_dir: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has none (then prompts are token ids)."""
    if not Tokenizer.exists(model_dir):
        return None
    return Tokenizer(model_dir, special_in_messages=spec.serve.special_tokens)
