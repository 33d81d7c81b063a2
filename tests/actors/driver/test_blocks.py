"""Every page and slot is held once, never the null page, and nothing leaks unseen."""

from __future__ import annotations

import random
import time

import pytest

from outrider.actors.driver.blocks import NULL_PAGE, BlockAllocator


def test_the_lowest_free_numbers_go_out_first_and_never_the_null_page():
    blocks = BlockAllocator(num_slots=2, num_pages=8)
    first, second = blocks.allocate(1, 3), blocks.allocate(2, 4)
    assert first is not None
    assert second is not None
    assert (first.slot, first.pages) == (0, [1, 2, 3])
    assert (second.slot, second.pages) == (1, [4, 5, 6, 7])
    assert NULL_PAGE not in first.pages + second.pages
    assert blocks.free_pages == blocks.free_slots == 0


def test_what_comes_back_is_allocated_again():
    blocks = BlockAllocator(num_slots=2, num_pages=8)
    blocks.allocate(1, 3)
    blocks.allocate(2, 4)
    blocks.free(1)
    allocation = blocks.allocate(3, 2)
    assert allocation is not None
    assert (allocation.slot, allocation.pages) == (0, [1, 2])


@pytest.mark.parametrize(("slots", "pages", "want"), [(1, 9, 3), (2, 4, 2)])
def test_nothing_is_taken_when_slots_or_pages_lack(slots: int, pages: int, want: int):
    blocks = BlockAllocator(num_slots=slots, num_pages=pages)
    assert blocks.allocate(1, 2) is not None
    before = (blocks.free_slots, blocks.free_pages)
    assert blocks.allocate(2, want) is None
    assert (blocks.free_slots, blocks.free_pages) == before


def test_a_request_allocates_once():
    blocks = BlockAllocator(num_slots=2, num_pages=8)
    blocks.allocate(1, 1)
    with pytest.raises(AssertionError, match="request 1 holds pages already"):
        blocks.allocate(1, 1)


def test_the_check_when_idle_names_who_still_holds_pages():
    blocks = BlockAllocator(num_slots=2, num_pages=8)
    blocks.allocate(7, 1)
    with pytest.raises(AssertionError, match=r"requests \[7\] ended"):
        blocks.check_idle()
    blocks.free(7)
    blocks.check_idle()


def test_a_lost_page_is_found():
    blocks = BlockAllocator(num_slots=1, num_pages=4)
    blocks._pages.pop()
    with pytest.raises(AssertionError, match="2 pages are free or held, the cache has 3"):
        blocks.check()
    with pytest.raises(AssertionError, match="2 pages are free"):
        blocks.check_idle()


def test_the_check_when_idle_takes_no_time_however_many_pages_there_are():
    """It runs before the last chunk of the last request leaves."""
    blocks = BlockAllocator(num_slots=8, num_pages=524_288)

    def seconds(check) -> float:
        times = []
        for _ in range(3):
            started = time.perf_counter()
            check()
            times.append(time.perf_counter() - started)
        return min(times)

    assert seconds(blocks.check_idle) < seconds(blocks.check) / 100


def test_random_traffic_leaks_nothing():
    rng = random.Random(0)
    blocks, live = BlockAllocator(num_slots=5, num_pages=40), []
    for request in range(2000):
        if live and rng.random() < 0.5:
            blocks.free(live.pop(rng.randrange(len(live))))
        elif blocks.allocate(request, rng.randint(0, 12)) is not None:
            live.append(request)
        blocks.check()
    for request in live:
        blocks.free(request)
    blocks.check_idle()
