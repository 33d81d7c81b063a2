"""Who holds which KV pages and which batch slot. Numbers only, no memory.

    allocate(request, n, shared) -> Allocation(slot, pages)      grow(request, n) -> more pages
    free(request): a page that nobody else holds is free again, unless it is cached
Several requests may hold a page; a cached one stays as it is for those to come (prefix.py). Page 0
is the null page, which padding rows write to; it is never allocated. The lowest free number goes
out first, so that running slots stay together.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NULL_PAGE = 0


@dataclass(frozen=True)
class Allocation:
    """What one request holds until it leaves its slot."""

    slot: int
    pages: list[int]
    """In the order of positions; `BlockAllocator.grow` adds to them."""


class BlockAllocator:
    """num_slots: requests at a time. num_pages: pages in the cache, the null page among them."""

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self._slots = list(range(num_slots))
        self._pages = list(range(NULL_PAGE + 1, num_pages))
        self._allocations: dict[int, Allocation] = {}
        self._holders = [0] * num_pages
        """Of each page, the requests that hold it."""
        self._cached: dict[int, int] = {}
        """Page -> how often it is cached."""
        self._num_idle = 0
        """Cached pages that no request holds."""

    @property
    def usable_pages(self) -> int:
        """All pages but the null page."""
        return max(self.num_pages - 1, 0)

    @property
    def free_pages(self) -> int:
        """Pages that are neither held nor cached."""
        return len(self._pages)

    @property
    def available_pages(self) -> int:
        """Pages that no request holds: those that are free, and those that are only cached."""
        return len(self._pages) + self._num_idle

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def allocate(
        self, request: int, num_pages: int, shared: Sequence[int] = ()
    ) -> Allocation | None:
        """A slot and `num_pages` free pages behind `shared` ones, which `hold` has taken already;
        None (and nothing taken) when a slot or pages lack."""
        assert request not in self._allocations, f"request {request} holds pages already"
        if not self._slots or num_pages > len(self._pages):
            return None
        allocation = Allocation(
            slot=heapq.heappop(self._slots), pages=[*shared, *self._take(num_pages)]
        )
        self._allocations[request] = allocation
        return allocation

    def grow(self, request: int, num_pages: int) -> list[int]:
        """Up to `num_pages` more pages for a request that has a slot: as many as are free."""
        pages = self._take(min(num_pages, len(self._pages)))
        self._allocations[request].pages.extend(pages)
        return pages

    def pages_of(self, request: int) -> Sequence[int]:
        """The pages of a request that has a slot, in the order of positions."""
        return self._allocations[request].pages

    def free(self, request: int) -> None:
        allocation = self._allocations.pop(request)
        heapq.heappush(self._slots, allocation.slot)
        self.release(allocation.pages)

    def hold(self, pages: Sequence[int]) -> None:
        """One more request holds these pages, which are cached."""
        for page in pages:
            self._num_idle -= not self._holders[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One request less holds these pages."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._cached:
                self._num_idle += 1
            else:
                heapq.heappush(self._pages, page)

    def cache(self, page: int) -> None:
        """Keep a page that is held or cached, until `uncache` was called as often."""
        self._cached[page] = self._cached.get(page, 0) + 1

    def uncache(self, page: int) -> None:
        self._cached[page] -= 1
        if self._cached[page]:
            return
        del self._cached[page]
        if not self._holders[page]:
            self._num_idle -= 1
            heapq.heappush(self._pages, page)

    def _take(self, num_pages: int) -> list[int]:
        pages = [heapq.heappop(self._pages) for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def check_idle(self) -> None:
        """AssertionError when something is still held though no request runs. Takes no time."""
        held = sorted(self._allocations)
        assert not held, f"requests {held} ended and still hold pages"
        assert len(self._slots) == self.num_slots, f"{len(self._slots)} slots are free"
        assert self._num_idle == len(self._cached), f"{self._num_idle} pages are only cached"
        assert self.available_pages == self.usable_pages, f"{len(self._pages)} pages are free"

    def check(self) -> None:
        """AssertionError unless each slot is free or held, only once, and each page is free, or
        held by as many requests as it says, or cached.

        It looks at all pages, so it is for tests.
        """
        slots, holders = list(self._slots), Counter[int]()
        for allocation in self._allocations.values():
            slots.append(allocation.slot)
            holders.update(allocation.pages)
        assert sorted(slots) == list(range(self.num_slots)), f"slots: {sorted(slots)}"
        assert holders == Counter(dict(enumerate(self._holders))), "pages of requests"
        assert self._num_idle == len(self._cached.keys() - holders.keys())
        pages = [*self._pages, *(holders.keys() | self._cached.keys())]
        assert sorted(pages) == list(range(1, self.num_pages)), (
            f"{len(pages)} pages are free or held, the cache has {self.usable_pages}"
        )
