"""The books lend every page and slot once, never the null page, and prove that none leaked."""

from __future__ import annotations

import random

import pytest

from outrider.actors.driver.blocks import NULL_PAGE, BlockAllocator


def test_the_lowest_free_numbers_go_out_first_and_never_the_null_page():
    books = BlockAllocator(num_slots=2, num_pages=8)
    first, second = books.open(1, 3), books.open(2, 4)
    assert first is not None
    assert second is not None
    assert (first.slot, first.pages) == (0, (1, 2, 3))
    assert (second.slot, second.pages) == (1, (4, 5, 6, 7))
    assert NULL_PAGE not in first.pages + second.pages
    assert books.free_pages == books.free_slots == 0


def test_what_comes_back_is_lent_again():
    books = BlockAllocator(num_slots=2, num_pages=8)
    books.open(1, 3)
    books.open(2, 4)
    books.close(1)
    lease = books.open(3, 2)
    assert lease is not None
    assert (lease.slot, lease.pages) == (0, (1, 2))


@pytest.mark.parametrize(("slots", "pages", "want"), [(1, 9, 3), (2, 4, 2)])
def test_nothing_is_taken_when_slots_or_pages_lack(slots: int, pages: int, want: int):
    books = BlockAllocator(num_slots=slots, num_pages=pages)
    assert books.open(1, 2) is not None
    before = (books.free_slots, books.free_pages)
    assert books.open(2, want) is None
    assert (books.free_slots, books.free_pages) == before


def test_a_request_holds_one_lease():
    books = BlockAllocator(num_slots=2, num_pages=8)
    books.open(1, 1)
    with pytest.raises(AssertionError, match="request 1 holds a lease already"):
        books.open(1, 1)


def test_an_audit_when_idle_names_who_still_holds_pages():
    books = BlockAllocator(num_slots=2, num_pages=8)
    books.open(7, 1)
    with pytest.raises(AssertionError, match=r"requests \[7\] ended"):
        books.audit_idle()
    books.close(7)
    books.audit_idle()


def test_an_audit_finds_a_lost_page():
    books = BlockAllocator(num_slots=1, num_pages=4)
    books._pages.pop()
    with pytest.raises(AssertionError, match="2 pages in the books, 3 in the cache"):
        books.audit()


def test_random_traffic_leaks_nothing():
    rng = random.Random(0)
    books, live = BlockAllocator(num_slots=5, num_pages=40), []
    for request in range(2000):
        if live and rng.random() < 0.5:
            books.close(live.pop(rng.randrange(len(live))))
        elif books.open(request, rng.randint(0, 12)) is not None:
            live.append(request)
        books.audit()
    for request in live:
        books.close(request)
    books.audit_idle()
