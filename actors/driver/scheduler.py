"""Admission: which request runs next, in which slot, on which pages. First come, first served.

    add(prompt, sampling) -> Entry -> queue -- admit() --> Join      progress -> Entry, freed at end
A request is admitted once a slot and pages for its whole length are free (prompt + max_tokens +
the rows an iteration may overshoot), so nothing is ever evicted. What can never fit is refused at
once. An Entry keeps prompt and emitted tokens: all that a replay on fresh ranks needs.
Letters: K drafted tokens an iteration
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from outrider.actors.driver.blocks import BlockAllocator
from outrider.actors.errors import QueueFullError, RequestError
from outrider.model.step import Join, Leave, Progress, Sampling


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a request; all of it follows from cluster.yaml and the model."""

    max_slots: int
    max_model_len: int
    max_queue: int
    num_pages: int
    page_tokens: int
    draft_tokens: int
    overshoot_rows: int
    """Rows past max_tokens that an iteration may write (model.plan.overshoot_rows)."""
    vocab_size: int
    eos_ids: tuple[int, ...]

    def room_for(self, prompt_tokens: int) -> int:
        """Tokens an answer may have at most behind such a prompt; 0 or less: it does not fit."""
        cached = (self.num_pages - 1) * self.page_tokens - self.overshoot_rows
        return min(self.max_model_len, cached) - prompt_tokens


@dataclass(kw_only=True)
class Entry:
    """One request from submit to end. `prompt` + `emitted` is its whole text so far."""

    request: int
    prompt: list[int]
    sampling: Sampling
    """As the ranks get it: seed drawn, EOS ids among the stop ids, max_tokens clamped."""
    emitted: list[int] = field(default_factory=list)
    slot: int | None = None
    """None while it waits."""
    finish: str | None = None


class Scheduler:
    """Knows every unfinished request; touches no device and no clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.books = BlockAllocator(limits.max_slots, limits.num_pages)
        self._queue: deque[Entry] = deque()
        self._active: dict[int, Entry] = {}
        self._next = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._active

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Entry:
        """Queue a request. RequestError when it can never run, QueueFullError when too many wait.

        max_tokens beyond the context is cut to what fits; the answer then ends with "length".
        """
        limits = self.limits
        tokens = list(prompt)
        self._check_ids("prompt token {} at index {}", tokens)
        self._check_ids("logit_bias token {}", [token for token, _ in sampling.logit_bias])
        self._check_ids("stop token {}", sampling.stop_ids)
        self._check_prompt(tokens)
        max_tokens = min(sampling.max_tokens, limits.max_model_len - len(tokens))
        self._check_pages(len(tokens), max_tokens)
        if len(self._queue) >= limits.max_queue:
            raise QueueFullError(
                f"{len(self._queue)} requests wait: limits.max_queue = {limits.max_queue} is the "
                "most; send it again later, or raise limits.max_queue in cluster.yaml"
            )
        stops = sampling.stop_ids + (() if sampling.ignore_eos else limits.eos_ids)
        settled = msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=tuple(dict.fromkeys(stops)),
        )
        entry = Entry(request=self._next, prompt=tokens, sampling=settled)
        self._next += 1
        self._queue.append(entry)
        return entry

    def admit(self) -> list[Join]:
        """Joins for the requests, in order, that fit now. One that does not holds up the rest."""
        joins = []
        while self._queue:
            entry = self._queue[0]
            need = self._pages_of(len(entry.prompt), entry.sampling.max_tokens)
            lease = self.books.open(entry.request, need)
            if lease is None:
                break
            self._queue.popleft()
            entry.slot = lease.slot
            self._active[entry.request] = entry
            joins.append(
                Join(
                    slot=lease.slot,
                    request=entry.request,
                    tokens=entry.prompt,
                    pages=list(lease.pages),
                    sampling=entry.sampling,
                )
            )
        return joins

    def advance(self, progress: Progress) -> Entry | None:
        """Book one step's tokens. None: the request ended before (aborted while under way)."""
        entry = self._active.get(progress.request)
        if entry is None:
            return None
        assert entry.slot == progress.slot, f"request {entry.request} moved to {progress.slot}"
        entry.emitted += progress.tokens
        if progress.finish is not None:
            entry.finish = progress.finish
            self._close(entry)
        return entry

    def abort(self, request: int) -> Leave | None:
        """Forget a request. The Leave, if any, must reach the ranks before the next Join does."""
        for entry in self._queue:
            if entry.request == request:
                self._queue.remove(entry)
                return None
        entry = self._active.get(request)
        if entry is None:
            return None
        assert entry.slot is not None
        self._close(entry)
        return Leave(slot=entry.slot, request=request)

    def _close(self, entry: Entry) -> None:
        del self._active[entry.request]
        self.books.close(entry.request)
        if self.idle:
            self.books.audit_idle()

    def _pages_of(self, prompt_tokens: int, max_tokens: int) -> int:
        rows = prompt_tokens + max_tokens + self.limits.overshoot_rows
        return -(-rows // self.limits.page_tokens)

    def _check_ids(self, what: str, tokens: Sequence[int]) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self.limits.vocab_size:
                raise RequestError(
                    f"{what.format(token, index)}: token ids of this model lie in "
                    f"[0, {self.limits.vocab_size})"
                )

    def _check_prompt(self, tokens: list[int]) -> None:
        limits = self.limits
        if not tokens:
            raise RequestError("the prompt is empty: it needs at least 1 token")
        longest = limits.max_model_len - 1
        if len(tokens) > longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, {len(tokens) - longest} too many: "
                f"limits.max_model_len = {limits.max_model_len} leaves {longest} for a prompt; "
                "shorten it, or raise limits.max_model_len in cluster.yaml"
            )

    def _check_pages(self, prompt_tokens: int, max_tokens: int) -> None:
        limits = self.limits
        need, have = self._pages_of(prompt_tokens, max_tokens), self.books.usable_pages
        if need > have:
            raise RequestError(
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} needs {need} KV pages "
                f"of {limits.page_tokens} tokens, the cache has {have}: {need - have} too few; "
                "lower max_tokens, or raise cache.num_pages in cluster.yaml"
            )
