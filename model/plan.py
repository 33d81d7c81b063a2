"""How many bytes one rank holds, by part, before anything is allocated.

    ModelConfig + RunConfig -> MemoryPlan -> pages that fit a budget

The same tables (weights.rules, cache shapes) size the allocation, so the plan is what is allocated;
a test compares the two. Page 0 is the null page and counts as a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.model.backlog import Backlog
from outrider.model.config import ConfigError, ModelConfig, RunConfig
from outrider.model.weights import rules
from outrider.parallel.device import Capabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes per rank."""

    parts: dict[str, int]
    """Weights by part: embedding, target layers, head, draft body, ..."""
    kv_token_bytes: dict[str, int]
    """KV of one token: "target" and "draft"."""
    page_tokens: int
    slot_bytes: int
    """States, factors and conv windows of one slot, all GDN layers; and the draft's backlog."""
    num_slots: int
    """Slots, the padding slot included."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def kv_page_bytes(self) -> int:
        return self.page_tokens * sum(self.kv_token_bytes.values())

    def total_bytes(self, num_pages: int) -> int:
        """Weights, states and `num_pages` KV pages."""
        return self.weight_bytes + self.slot_bytes * self.num_slots + self.kv_page_bytes * num_pages

    def pages_that_fit(self, budget_bytes: int) -> int:
        """KV pages left of a budget after weights and states; may be 0 or negative."""
        return (budget_bytes - self.total_bytes(0)) // self.kv_page_bytes


def memory_plan(model: ModelConfig, run: RunConfig) -> MemoryPlan:
    """Bytes of one rank. Raises ConfigError when the ranks cannot share the model."""
    model.check_divides(run.tensor_parallel)
    parts: dict[str, int] = {}
    for rule in rules(model, run):
        parts[rule.part] = parts.get(rule.part, 0) + rule.num_bytes(run)
    if run.draft_tokens and run.draft_head == "fp8":
        share = model.vocab_size // run.tensor_parallel
        parts["draft head, fp8"] = share * (model.hidden_size + 4)
    item, a = getattr(torch, run.dtype).itemsize, model.attention
    kv = {"target": len(model.full_layers) * a.kv_heads_of(run.tensor_parallel)}
    if run.draft_tokens:
        kv["draft"] = a.kv_heads_of(run.draft_size)
    return MemoryPlan(
        parts=parts,
        kv_token_bytes={name: heads * 2 * a.head_dim * item for name, heads in kv.items()},
        page_tokens=run.page_tokens,
        slot_bytes=_slot_bytes(model, run, item),
        num_slots=run.max_slots + 1,
    )


def _slot_bytes(model: ModelConfig, run: RunConfig, item: int) -> int:
    g, size, rows = model.gdn, run.tensor_parallel, run.draft_tokens + 1
    heads, keys = g.num_v_heads // size, g.num_k_heads // size
    state = heads * g.head_k_dim * g.head_v_dim
    factors = rows * (keys * g.head_k_dim + heads * g.head_v_dim + heads)
    conv = (g.conv_kernel - 1 + rows) * (2 * g.key_dim + g.value_dim) // size
    waiting = Backlog.slot_bytes(model.hidden_size, item) if run.draft_tokens else 0
    return len(model.gdn_layers) * (4 * (state + factors) + item * conv) + waiting


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // page_tokens)


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """`least` and its doubles, and `most` at the end: sizes that graphs are captured for."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def overshoot_rows(draft_tokens: int) -> int:
    """Rows that iterations may write past a request's last token.

    An iteration writes K+1 rows; the host learns of the end one iteration late at most.
    """
    return 2 * (draft_tokens + 1)


def check_device(run: RunConfig, can: Capabilities) -> None:
    """Raise ConfigError for what the ranks' kind of device cannot run."""
    if can.max_rows is not None and run.draft_tokens + 1 > can.max_rows:
        raise ConfigError(
            f"speculation.draft_tokens = {run.draft_tokens}: attention on this device takes "
            f"{can.max_rows} rows a slot, K + 1 of them: set it to {can.max_rows - 1} or less"
        )
    if run.page_tokens % can.page_multiple:
        raise ConfigError(
            f"cache.page_tokens = {run.page_tokens}: this device needs a multiple of "
            f"{can.page_multiple}"
        )


def check_pages(run: RunConfig, plan: MemoryPlan) -> None:
    """Raise ConfigError when not even one request of one token fits."""
    least = 1 + pages_for(2 + overshoot_rows(run.draft_tokens), run.page_tokens)
    if run.num_pages < least:
        raise ConfigError(
            f"cache.num_pages = {run.num_pages}: at least {least} pages of {run.page_tokens} tokens"
            f" ({least * plan.kv_page_bytes} bytes a rank) are needed for the shortest request"
        )


def storages(root: object) -> dict[int, int]:
    """Address and bytes of every tensor storage reachable from `root` by attributes and lists."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    queue: list[Any] = [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, list | tuple):
            queue.extend(thing)
        elif type(thing).__module__.startswith(("outrider.model.", "outrider.parallel.")):
            names = vars(thing) if hasattr(thing, "__dict__") else getattr(thing, "__slots__", ())
            queue.extend(getattr(thing, name) for name in names)
    return found
