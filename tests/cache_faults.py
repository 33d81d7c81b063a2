"""The faults of tests/mutants.py in who holds which pages, and who gives them back.

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import RUNNER, RUNNING, Fault

SCHEDULER = "actors/driver/scheduler.py"
PAGING = "tests/actors/driver/test_paging.py::test_"
PAGES = "tests/model/test_pages.py::test_"

CACHE_FAULTS = (
    Fault(
        "rows are launched that have no pages",
        RUNNING,
        "            and self._has_room(r)\n",
        "",
        PAGES + "a_request_whose_pages_are_full_waits_while_the_others_go_on",
    ),
    Fault(
        "results in flight are taken for one row each",
        RUNNING,
        "(request.in_flight + 1) * self._num_rows",
        "request.in_flight + self._num_rows",
        PAGING + "random_traffic_in_a_small_pool_ends_with_clean_books[0]",
    ),
    Fault(
        "more pages are written over the first ones",
        RUNNER,
        "self.executor.slots.grow(command, had)",
        "self.executor.slots.grow(command, 0)",
        PAGES + "a_request_whose_pages_are_full_waits_while_the_others_go_on",
    ),
    Fault(
        "the oldest request is suspended, not the youngest",
        SCHEDULER,
        "self.suspend(max(self._running.values()",
        "self.suspend(min(self._running.values()",
        PAGING + "the_youngest_of_the_least_urgent_leaves_first_and_comes_back_first",
    ),
    Fault(
        "a request joins on the pages that the running ones need next",
        SCHEDULER,
        "need + reserved > self",
        "need > self",
        PAGING + "a_request_waits_while_those_that_run_would_take_its_pages_back",
    ),
    Fault(
        "pages for the longest answer are taken at once",
        SCHEDULER,
        "return min(-(-rows // self.limits.page_tokens), most)",
        "return max(-(-rows // self.limits.page_tokens), most)",
        PAGING + "slots_are_not_kept_empty_for_what_requests_might_say",
    ),
)
