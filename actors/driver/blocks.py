"""Who holds which KV pages and which batch slot. Numbers only, no memory.

    allocate(request, n) -> Allocation(slot, pages)      grow(request, n) -> more pages
    free(request) -> all of it is back on the free lists
Page 0 is the null page, which padding rows write to; it is never allocated. The lowest free number
goes out first, so that running slots stay together.
"""

from __future__ import annotations

import heapq
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

    @property
    def usable_pages(self) -> int:
        """All pages but the null page."""
        return max(self.num_pages - 1, 0)

    @property
    def free_pages(self) -> int:
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def allocate(self, request: int, num_pages: int) -> Allocation | None:
        """A slot and `num_pages` pages, or None (and nothing taken) when either lacks."""
        assert request not in self._allocations, f"request {request} holds pages already"
        if not self._slots or num_pages > len(self._pages):
            return None
        allocation = Allocation(
            slot=heapq.heappop(self._slots),
            pages=self._take(num_pages),
        )
        self._allocations[request] = allocation
        return allocation

    def grow(self, request: int, num_pages: int) -> list[int]:
        """Up to `num_pages` more pages for a request that has a slot: as many as are free."""
        pages = self._take(min(num_pages, len(self._pages)))
        self._allocations[request].pages.extend(pages)
        return pages

    def held_pages(self, request: int) -> int:
        """The pages of a request that has a slot."""
        return len(self._allocations[request].pages)

    def free(self, request: int) -> None:
        allocation = self._allocations.pop(request)
        heapq.heappush(self._slots, allocation.slot)
        for page in allocation.pages:
            heapq.heappush(self._pages, page)

    def _take(self, num_pages: int) -> list[int]:
        return [heapq.heappop(self._pages) for _ in range(num_pages)]

    def check_idle(self) -> None:
        """AssertionError when something is still held though no request runs. Takes no time."""
        held = sorted(self._allocations)
        assert not held, f"requests {held} ended and still hold pages"
        assert len(self._slots) == self.num_slots, f"{len(self._slots)} slots are free"
        assert len(self._pages) == self.usable_pages, f"{len(self._pages)} pages are free"

    def check(self) -> None:
        """AssertionError unless each slot and page is free or held, and only once.

        It sorts all pages, so it is for tests.
        """
        slots, pages = list(self._slots), list(self._pages)
        for allocation in self._allocations.values():
            slots.append(allocation.slot)
            pages += allocation.pages
        assert sorted(slots) == list(range(self.num_slots)), f"slots: {sorted(slots)}"
        assert sorted(pages) == list(range(1, self.num_pages)), (
            f"{len(pages)} pages are free or held, the cache has {self.usable_pages}"
        )
