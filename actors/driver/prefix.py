"""The cache of prompts' beginnings: which pages and which saved states can be used again.

    find(tokens, salt) -> Hit       reserve -> [Save] -> publish, once the ranks have saved them
    make_room(pages): the least recently used snapshots give their pages back

KV pages alone are worth nothing to a delta net: its state exists only where it was saved. So the
cache holds snapshots, each behind a number of rows of some text, and the pages of those rows. Pages
are found by content: a chain of hashes, one a full page, each over the one before and the tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.actors.driver.blocks import BlockAllocator
from outrider.model.step import Save

TOKEN_BYTES = 8


class Chain:
    """The hashes of a text, for each number of full pages.

    A page counts as full when the token behind it is known too, which is part of its hash: the
    draft's key and value of a row depend on the token that follows the row.
    """

    def __init__(self, tokens: Sequence[int], page_tokens: int, salt: str) -> None:
        self.tokens, self.page_tokens = tokens, page_tokens
        self._bytes = array("q", tokens).tobytes()
        self._keys = [_hash(salt.encode(), self._bytes[:TOKEN_BYTES])]

    def key(self, num_pages: int) -> bytes:
        """Of the first num_pages pages; the text must have a token behind them."""
        size = self.page_tokens * TOKEN_BYTES
        while len(self._keys) <= num_pages:
            start = (len(self._keys) - 1) * size + TOKEN_BYTES
            self._keys.append(_hash(self._keys[-1], self._bytes[start : start + size]))
        return self._keys[num_pages]

    def full_pages(self, rows: int) -> int:
        """Of a text of so many rows. The last page, full or not, is none of them."""
        return (rows - 1) // self.page_tokens

    def begins_like(self, other: Chain, rows: int) -> bool:
        """Whether both texts have the same first `rows` tokens, and the same salt."""
        if rows > len(other.tokens) or self._keys[0] != other._keys[0]:
            return False
        num_pages = self.full_pages(rows)
        return self.key(num_pages) == other.key(num_pages) and self.tail(rows) == other.tail(rows)

    def tail(self, rows: int) -> tuple[int, ...]:
        """The tokens of such a text that are in no key."""
        return tuple(self.tokens[self.full_pages(rows) * self.page_tokens + 1 : rows])


def _hash(before: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(before + tokens, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class Node:
    """A full page of some text."""

    parent: Node | None
    key: bytes
    page: int
    """0 for the root of a text, which has no page."""
    num_children: int = 0
    snapshots: dict[tuple[int, ...], Snapshot] = field(default_factory=dict)
    """Those whose last page comes next, by Chain.tail."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state behind `rows` rows of a text."""

    index: int
    """Where the ranks have saved it."""
    rows: int
    node: Node
    tail: tuple[int, ...]
    page: int
    """The page that holds the last of the rows, and may hold others' rows behind them."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request need not compute."""

    snapshot: int
    rows: int
    pages: list[int]
    """Full pages, to be shared."""
    last_page: int
    """The page of the last rows, of which the request needs a copy."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Snapshots that the ranks have been told to save and may not have saved yet."""

    chain: Chain
    saves: list[Save]


class PrefixCache:
    """blocks: who holds the pages. num_snapshots: places for states, 0 for no cache. every: a long
    prompt's state is saved at multiples of so many rows, and at its end. Where a conversation's
    last turn ends it is saved too, if that spares the next turn an eighth of so many."""

    def __init__(self, blocks: BlockAllocator, num_snapshots: int, every: int) -> None:
        self.blocks, self.num_snapshots, self.every = blocks, num_snapshots, every
        self.num_evicted = 0
        self._nodes: dict[bytes, Node] = {}
        self._used: OrderedDict[int, Snapshot] = OrderedDict()
        """By index, the least recently used first."""
        self._free = list(range(num_snapshots))
        self._reserved: dict[int, Reserved] = {}
        """By the number of the join that saves them."""

    def find(self, chain: Chain) -> Hit | None:
        """The snapshot behind the most rows of a text, which counts as used now."""
        best: Snapshot | None = None
        pages: list[int] = []
        num_pages = chain.full_pages(len(chain.tokens))
        for depth in range(num_pages + 1):
            node = self._nodes.get(chain.key(depth))
            if node is None:
                break
            if depth:
                pages.append(node.page)
            if node.snapshots:
                best = self._longest(node, chain, depth) or best
        if best is None:
            return None
        self._used.move_to_end(best.index)
        return Hit(best.index, best.rows, pages[: chain.full_pages(best.rows)], best.page)

    def coming(self, chain: Chain) -> int:
        """The most rows of a text behind which a request that runs will have saved its state."""
        return max(
            (
                save.rows
                for reserved in self._reserved.values()
                for save in reserved.saves
                if reserved.chain.begins_like(chain, save.rows)
            ),
            default=0,
        )

    def reserve(self, join: int, chain: Chain, start: int, turn_end: int = 0) -> list[Save]:
        """Places for the states of a prompt that runs from row `start` on; what is there already
        makes way. They can be found once `publish` says that they are there.

        turn_end: rows with which the next turn of a conversation will surely begin; 0: unknown.
        """
        end = len(chain.tokens)
        places = len(self._free) + len(self._used)
        if end == start or not places:
            return []
        stops = [*self._stops(start, end), end]
        before = max((stop for stop in stops if stop <= turn_end), default=start)
        if before < turn_end < end and turn_end - before >= self.every // 8:
            stops = sorted([*stops, turn_end])
        saves = [Save(rows=rows, snapshot=self._take()) for rows in stops[-places:]]
        self._reserved[join] = Reserved(chain, saves)
        return saves

    def publish(self, join: int, pages: Sequence[int]) -> None:
        """The ranks have saved what they were told to. pages: of the request, in order."""
        reserved = self._reserved.pop(join, None)
        if reserved is None:
            return
        chain = reserved.chain
        node = self._root(chain)
        depth = 0
        for save in reserved.saves:
            while depth < chain.full_pages(save.rows):
                depth += 1
                node = self._child(node, chain.key(depth), pages[depth - 1])
            tail = chain.tail(save.rows)
            if tail in node.snapshots:
                self._free.append(save.snapshot)
                continue
            page = pages[depth]
            snapshot = Snapshot(save.snapshot, save.rows, node, tail, page)
            node.snapshots[tail] = self._used[save.snapshot] = snapshot
            self.blocks.cache(page)
        self._prune(node)

    def cancel(self, join: int) -> None:
        """A request leaves; what it has not been known to save is not there."""
        reserved = self._reserved.pop(join, None)
        if reserved is not None:
            self._free += [save.snapshot for save in reserved.saves]

    def make_room(self, num_pages: int) -> bool:
        """See to it that so many pages are free -> whether they are. Where that cannot be, nothing
        is lost."""
        if num_pages > self.blocks.available_pages:
            return False
        while self.blocks.free_pages < num_pages:
            self.evict()
        return True

    def evict(self, index: int | None = None) -> None:
        """Forget the least recently used snapshot, or that one."""
        index = next(iter(self._used)) if index is None else index
        snapshot = self._used.pop(index)
        self._free.append(index)
        self.num_evicted += 1
        del snapshot.node.snapshots[snapshot.tail]
        self.blocks.uncache(snapshot.page)
        self._prune(snapshot.node)

    def clear(self) -> None:
        """What the ranks have saved is gone."""
        for join in list(self._reserved):
            self.cancel(join)
        while self._used:
            self.evict()

    def snapshots(self) -> list[int]:
        """The places of those that can be found, the least recently used first."""
        return list(self._used)

    def check(self) -> None:
        """AssertionError unless each place is free, reserved or used, and only once, and no page is
        kept that leads to no snapshot."""
        places = [*self._free, *self._used]
        for reserved in self._reserved.values():
            places += [save.snapshot for save in reserved.saves]
        assert sorted(places) == list(range(self.num_snapshots)), f"snapshots: {sorted(places)}"
        for node in self._nodes.values():
            assert node.num_children or node.snapshots, "a page leads to no snapshot"

    def _longest(self, node: Node, chain: Chain, depth: int) -> Snapshot | None:
        """The snapshot of a node behind the most rows of the text."""
        start = depth * chain.page_tokens + 1
        most = len(chain.tokens) - start
        fits = (
            snapshot
            for tail, snapshot in node.snapshots.items()
            if len(tail) <= most and tuple(chain.tokens[start : start + len(tail)]) == tail
        )
        return max(fits, key=lambda snapshot: snapshot.rows, default=None)

    def _stops(self, start: int, end: int) -> list[int]:
        """Rows between `start` and `end` behind which the state is saved: at most a quarter of all
        snapshots are one prompt's."""
        most = max(1, self.num_snapshots // 4)
        step = self.every * max(1, -(-(end - start) // (self.every * most)))
        return list(range((start // step + 1) * step, end, step))

    def _take(self) -> int:
        """A place for a snapshot."""
        if not self._free:
            self.evict()
        return self._free.pop()

    def _root(self, chain: Chain) -> Node:
        key = chain.key(0)
        return self._nodes.setdefault(key, Node(None, key, page=0))

    def _child(self, parent: Node, key: bytes, page: int) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(parent, key, page)
            parent.num_children += 1
            self.blocks.cache(page)
        return node

    def _prune(self, node: Node) -> None:
        """Forget a page that leads to no snapshot any more, and those before it."""
        while not node.num_children and not node.snapshots:
            del self._nodes[node.key]
            if node.parent is None:
                return
            self.blocks.uncache(node.page)
            node.parent.num_children -= 1
            node = node.parent
