"""How many bytes one rank will hold, by part, computed before anything is allocated.

    ModelConfig + RunConfig -> MemoryPlan -> number of KV pages that fit a budget

Loading and allocation use the same tables (rules.rules and the shapes of the caches), and a test
compares the plan with what is allocated. Page 0 holds no request's tokens, but is allocated and
counted like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.model.backlog import Backlog
from outrider.model.config import ConfigError, ModelConfig, RunConfig
from outrider.model.lookup import TokenHistory
from outrider.model.rules import rules
from outrider.model.sampling import SamplingMemory
from outrider.parallel.device import Capabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of one rank, in bytes."""

    parts: dict[str, int]
    """Bytes of weights by part: embedding, target layers, head, draft body, ...; what is stored in
    codes is a part of its own, as "target layers, fp8"."""
    kv_token_bytes: dict[str, int]
    """Bytes of one token's keys and values in the "target" and, with drafts, the "draft"."""
    page_tokens: int
    slot_bytes: int
    """Bytes of one slot: states, factors and conv windows of all delta-net layers, the rows that
    wait for the draft, and the tables of its logits' edits."""
    num_slots: int
    """Number of slots, including the one that pads batches."""
    snapshot_bytes: int
    """Bytes of one saved state of a prompt's beginning."""
    num_snapshots: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.parts.values())

    @property
    def kv_page_bytes(self) -> int:
        """Bytes of one KV page, target and draft together."""
        return self.page_tokens * sum(self.kv_token_bytes.values())

    def total_bytes(self, num_pages: int) -> int:
        """Bytes of weights, slots, saved states and `num_pages` KV pages."""
        states = self.slot_bytes * self.num_slots + self.snapshot_bytes * self.num_snapshots
        return self.weight_bytes + states + self.kv_page_bytes * num_pages

    def pages_that_fit(self, budget_bytes: int) -> int:
        """KV pages that fit beside weights and states; negative where not even those fit."""
        return (budget_bytes - self.total_bytes(0)) // self.kv_page_bytes


def memory_plan(model: ModelConfig, run: RunConfig) -> MemoryPlan:
    """The plan of one rank. Raises ConfigError when the ranks cannot share the model."""
    model.check_divides(run.tensor_parallel, expert_parallel=run.expert_parallel)
    parts: dict[str, int] = {}
    for rule in rules(model, run):
        name = rule.part if rule.form == "plain" else f"{rule.part}, {rule.form}"
        parts[name] = parts.get(name, 0) + rule.num_bytes(run)
    if run.uses_mtp and run.draft_head == "fp8":
        share = model.vocab_size // run.tensor_parallel
        parts["draft head, fp8"] = share * (model.hidden_size + 4)
    itemsize, attention = getattr(torch, run.dtype).itemsize, model.attention
    kv_heads = {"target": len(model.full_layers) * attention.kv_heads_of(run.tensor_parallel)}
    if run.uses_mtp:
        kv_heads["draft"] = attention.kv_heads_of(run.draft_size)
    head_bytes = 2 * attention.head_dim * itemsize  # a key and a value
    return MemoryPlan(
        parts=parts,
        kv_token_bytes={name: heads * head_bytes for name, heads in kv_heads.items()},
        page_tokens=run.page_tokens,
        slot_bytes=_slot_bytes(model, run, itemsize),
        num_slots=run.max_slots + 1,
        snapshot_bytes=snapshot_bytes(model, run),
        num_snapshots=run.num_snapshots,
    )


def snapshot_bytes(model: ModelConfig, run: RunConfig) -> int:
    """Bytes of a slot's state that is saved: of all delta-net layers the state and the conv rows
    before the next row, and a hidden for the draft (cache.Snapshots)."""
    g, size, itemsize = model.gdn, run.tensor_parallel, getattr(torch, run.dtype).itemsize
    state = g.num_v_heads // size * g.head_k_dim * g.head_v_dim
    conv = (g.conv_kernel - 1) * (2 * g.key_dim + g.value_dim) // size
    return len(model.gdn_layers) * (4 * state + itemsize * conv) + itemsize * model.hidden_size


def _slot_bytes(model: ModelConfig, run: RunConfig, itemsize: int) -> int:
    """Bytes of one slot. itemsize: of a number in the run's dtype; states are float32."""
    g, size, rows = model.gdn, run.tensor_parallel, run.draft_tokens + 1
    heads, keys = g.num_v_heads // size, g.num_k_heads // size
    state = heads * g.head_k_dim * g.head_v_dim
    factors = rows * (keys * g.head_k_dim + heads * g.head_v_dim + heads)
    conv = (g.conv_kernel - 1 + rows) * (2 * g.key_dim + g.value_dim) // size
    backlog = Backlog.slot_bytes(model.hidden_size, itemsize) if run.uses_mtp else 0
    positions = run.max_model_len + overshoot_rows(run.draft_tokens)
    columns = pages_for(positions, run.page_tokens) * run.page_tokens
    history = TokenHistory.slot_bytes(columns) if run.uses_lookup else 0
    tables = SamplingMemory.slot_bytes(model.vocab_size // size, rows)
    return (
        len(model.gdn_layers) * (4 * (state + factors) + itemsize * conv)
        + backlog
        + history
        + tables
    )


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Number of pages that `num_tokens` take."""
    return -(-num_tokens // page_tokens)


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """`least`, twice `least` and so on, and `most` as the last: sizes to capture graphs for."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def overshoot_rows(draft_tokens: int) -> int:
    """Most rows that iterations write after a request's last token.

    An iteration writes K+1 rows, and the host may learn of the end one iteration late.
    """
    return 2 * (draft_tokens + 1)


def check_device(run: RunConfig, can: Capabilities) -> None:
    """Raise ConfigError for settings that the ranks' kind of device cannot run."""
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
    """Raise ConfigError when there are too few pages for a request of one token."""
    least = 1 + pages_for(2 + overshoot_rows(run.draft_tokens), run.page_tokens)
    if run.num_pages < least:
        raise ConfigError(
            f"cache.num_pages = {run.num_pages}: at least {least} pages of {run.page_tokens} tokens"
            f" ({least * plan.kv_page_bytes} bytes a rank) are needed for the shortest request"
        )


def storages(root: object) -> dict[int, int]:
    """Address -> bytes of each tensor storage that is reachable from `root`.

    Attributes of this project's objects are followed, and items of lists and tuples.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    queue: list[Any] = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, list | tuple):
            queue.extend(item)
        elif type(item).__module__.startswith(("outrider.model.", "outrider.parallel.")):
            names = vars(item) if hasattr(item, "__dict__") else getattr(item, "__slots__", ())
            queue.extend(getattr(item, name) for name in names)
    return found
