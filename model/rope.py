"""Rotary position embeddings as a config.json describes them: plain, or stretched by YaRN.

    keys of config.json -- read_rope --> Rope -- blocks.RotaryTable --> cosines and sines

The keys stand in `rope_parameters`, in `rope_scaling`, or (theta and the share of a head that
rotates) beside the other keys of the text model. This file needs no torch. Source of the formulas:
YaRN, arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARTIAL_ROTARY_FACTOR = 0.25
"""Share of each head that rotates in all models of this class; a config.json may leave it out."""
SHARED_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
}
YARN_KEYS = {
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """How YaRN stretches the positions of pre-training."""

    factor: float
    """Positions now, over those of pre-training."""
    original_positions: int
    """Positions of pre-training."""
    beta_fast: float
    """What turns this often within the original positions, or more often, stays as it was."""
    beta_slow: float
    """What turns this often, or less, is slowed down by the whole factor."""
    truncate: bool
    """Whether the range between the two is widened to whole pairs of dimensions."""
    attention_factor: float
    """Multiplies cosines and sines."""

    def range_of(self, theta: float, rotary_dim: int) -> tuple[float, float]:
        """The pairs of dimensions, from 0, between which the slowing grows from nothing to all."""
        low, high = (
            rotary_dim
            * math.log(self.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, rotary_dim - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embeddings of a model's attention heads."""

    theta: float
    """Pair i of a head's dimensions turns by theta^(-2 i / rotary_dim) radians a position."""
    rotary_dim: int
    """Dimensions of a head that rotate, the first ones."""
    yarn: Yarn | None = None


def read_rope(text: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """The rotary of a text model with these keys of config.json.

    A key in `rope_scaling` wins over the same one in `rope_parameters`, and that over one beside
    them. max_positions: the model's max_position_embeddings. Raises ValueError with key, value and
    rule.
    """
    keys = {name: text[name] for name in ("rope_theta", "partial_rotary_factor") if name in text}
    kind = "default"
    for place in ("rope_parameters", "rope_scaling"):
        table = text.get(place) or {}
        if not isinstance(table, Mapping):
            raise ValueError(f"{place} = {table!r}: a table is needed")
        keys |= table
        kind = table.get("rope_type") or table.get("type") or kind
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported: only default and yarn")
    foreign = keys.keys() - SHARED_KEYS - (YARN_KEYS if kind == "yarn" else set())
    if foreign:
        raise ValueError(
            f"{min(foreign)} is not used by rope_type {kind!r}: name the type, or drop it"
        )
    theta = _number(keys, "rope_theta", None, above=1)
    share = _number(keys, "partial_rotary_factor", PARTIAL_ROTARY_FACTOR, above=0)
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        rule = (
            f"an even number of the head_dim = {head_dim} dimensions must rotate, not {rotary_dim}"
        )
        raise ValueError(f"partial_rotary_factor = {share}: {rule}")
    yarn = _read_yarn(keys, max_positions) if kind == "yarn" else None
    return Rope(theta=theta, rotary_dim=rotary_dim, yarn=yarn)


def _read_yarn(keys: Mapping[str, Any], max_positions: int) -> Yarn:
    factor = _number(keys, "factor", None, above=0)
    if factor < 1:
        raise ValueError(f"factor = {factor}: YaRN needs at least 1")
    fast, slow = _number(keys, "beta_fast", 32, above=0), _number(keys, "beta_slow", 1, above=0)
    if fast <= slow:
        raise ValueError(f"beta_fast = {fast}: more than beta_slow = {slow} is needed")
    truncate = keys.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate = {truncate!r}: true or false is needed")
    own, all_dim = (keys.get(name) for name in ("mscale", "mscale_all_dim"))
    attention = _growth(factor, 1)
    if own and all_dim:
        own, all_dim = (_number(keys, name, None, above=0) for name in ("mscale", "mscale_all_dim"))
        attention = _growth(factor, own) / _growth(factor, all_dim)
    return Yarn(
        factor=factor,
        original_positions=int(
            _number(keys, "original_max_position_embeddings", max_positions, above=0)
        ),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=_number(keys, "attention_factor", attention, above=0),
    )


def _growth(factor: float, scale: float) -> float:
    """By how much YaRN raises attention at this factor."""
    return 0.1 * scale * math.log(factor) + 1.0


def _number(keys: Mapping[str, Any], name: str, default: float | None, *, above: float) -> float:
    """A key's value; null and a key that is not there are the default, None: there must be one."""
    value = keys.get(name)
    value = default if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value < math.inf
    ):
        raise ValueError(f"{name} = {value!r}: a number above {above:g} is needed")
    return value
