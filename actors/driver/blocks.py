"""The books of what requests hold: KV pages and batch slots. Pure accounts, no memory.

    open(request, n) -> Allocation(slot, pages)      close(request) -> back on the free lists
Page 0 is the null page (padding rows write there) and is never lent. The lowest free number goes
out first, so that live slots stay together. `audit` proves that nothing leaked.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

NULL_PAGE = 0


@dataclass(frozen=True)
class Allocation:
    """What one request holds until it ends."""

    slot: int
    pages: tuple[int, ...]


class BlockAllocator:
    """num_slots: requests at a time. num_pages: pages in the cache, the null page among them."""

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self._slots = list(range(num_slots))
        self._pages = list(range(NULL_PAGE + 1, num_pages))
        self._leases: dict[int, Allocation] = {}

    @property
    def usable_pages(self) -> int:
        return max(self.num_pages - 1, 0)

    @property
    def free_pages(self) -> int:
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def open(self, request: int, num_pages: int) -> Allocation | None:
        """A slot and `num_pages` pages, or None (and nothing taken) when either lacks."""
        assert request not in self._leases, f"request {request} holds a lease already"
        if not self._slots or num_pages > len(self._pages):
            return None
        lease = Allocation(
            slot=heapq.heappop(self._slots),
            pages=tuple(heapq.heappop(self._pages) for _ in range(num_pages)),
        )
        self._leases[request] = lease
        return lease

    def close(self, request: int) -> None:
        lease = self._leases.pop(request)
        heapq.heappush(self._slots, lease.slot)
        for page in lease.pages:
            heapq.heappush(self._pages, page)

    def audit(self) -> None:
        """AssertionError unless each slot and page is either free or lent, and only once."""
        slots = self._slots + [lease.slot for lease in self._leases.values()]
        pages = self._pages + [page for lease in self._leases.values() for page in lease.pages]
        assert sorted(slots) == list(range(self.num_slots)), f"slots in the books: {sorted(slots)}"
        assert sorted(pages) == list(range(1, self.num_pages)), (
            f"{len(pages)} pages in the books, {self.usable_pages} in the cache"
        )

    def audit_idle(self) -> None:
        """AssertionError when something is still lent though no request lives."""
        assert not self._leases, f"requests {sorted(self._leases)} ended and still hold pages"
        self.audit()
