"""The faults of tests/mutants.py in who holds which pages, and who gives them back.

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import RUNNER, RUNNING, Fault

SCHEDULER = "actors/driver/scheduler.py"
PAGING = "tests/actors/driver/test_paging.py::test_"
PAGES = "tests/model/test_pages.py::test_"

PREFIX_FILE, EXECUTOR, SNAPSHOTS = "actors/driver/prefix.py", "model/executor.py", "model/cache.py"
PREFIX = "tests/actors/driver/test_prefix.py::test_"
RANDOM = PREFIX + (
    "random_traffic_with_evictions_says_what_it_would_without_and_closes_its_books[0]"
)
TURNS = "tests/model/test_prefix.py::test_second_turns_say_and_draft_what_they_would_alone"

CACHE_FAULTS = (
    Fault(
        "rows are launched that have no pages",
        RUNNING,
        "            and self._has_room(request)\n",
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
        "fits = need + reserved <= self",
        "fits = need <= self",
        PAGING + "a_request_waits_while_those_that_run_would_take_its_pages_back",
    ),
    Fault(
        "pages for the longest answer are taken at once",
        SCHEDULER,
        "return min(-(-rows // self.limits.page_tokens), most)",
        "return max(-(-rows // self.limits.page_tokens), most)",
        PAGING + "slots_are_not_kept_empty_for_what_requests_might_say",
    ),
    Fault(
        "a page is shared whatever token follows it",
        PREFIX_FILE,
        "start = (len(self._keys) - 1) * size + TOKEN_BYTES",
        "start = (len(self._keys) - 1) * size",
        RANDOM,
    ),
    Fault(
        "tenants share what they ask",
        PREFIX_FILE,
        "_hash(salt.encode(), self._bytes",
        "_hash(b'', self._bytes",
        PREFIX + "tenants_with_other_salts_share_nothing",
    ),
    Fault(
        "a state is found before it was saved",
        SCHEDULER,
        "        self.prefix.cancel(request.join_number)\n",
        "        self.prefix.publish(request.join_number, [1] * 999)\n",
        PREFIX + "what_an_aborted_request_may_not_have_saved_is_not_found",
    ),
    Fault(
        "a cached page is given to others when its request ends",
        "actors/driver/blocks.py",
        "            if page in self._cached:\n",
        "            if page < 0:\n",
        RANDOM,
    ),
    Fault(
        "what was used last makes way first",
        PREFIX_FILE,
        "self._used.move_to_end(best.index)",
        "self._used.move_to_end(best.index, last=False)",
        PREFIX + "what_was_used_longest_ago_makes_way_first",
    ),
    Fault(
        "log probabilities of a prompt begin in its middle",
        SCHEDULER,
        "return request.sampling.prompt_logprobs is None or bool(request.emitted)",
        "return True",
        PREFIX + "log_probabilities_of_a_prompt_need_all_of_its_rows",
    ),
    Fault(
        "the conv window is not restored",
        SNAPSHOTS,
        "        states.conv[:, slot, : self.conv.shape[2]] = self.conv[place]\n",
        "",
        TURNS + "[1-0-changes0]",
    ),
    Fault(
        "the hidden of a prompt's last row is not saved",
        SNAPSHOTS,
        "self.hidden[place] = hidden",
        "pass",
        TURNS + "[1-3-changes2]",
    ),
    Fault(
        "the draft's last row stays that of the other text",
        EXECUTOR,
        "self.draft.write_kv(hidden.view(1, 1, -1), token, rows)",
        "pass",
        TURNS + "[1-3-changes2]",
    ),
    Fault(
        "the page of the last rows is shared and not copied",
        EXECUTOR,
        "pages.copy(saved.copied_page, saved.page)",
        "pass",
        TURNS + "[1-0-changes0]",
    ),
    Fault(
        "looking knows nothing of restored rows",
        EXECUTOR,
        "self.history.write(slots, first, self.ints([prompt[:num_rows]]), counts)",
        "pass",
        "tests/model/test_prefix.py::test_"
        "drafts_rest_on_the_restored_rows_and_not_on_those_of_the_slots_last_tenant[lookup]",
    ),
    Fault(
        "choices of a prompt compute it each for itself",
        SCHEDULER,
        "return coming > (hit.rows if hit else 0)",
        "return False",
        PREFIX + "requests_that_begin_alike_at_the_same_time_compute_it_once",
    ),
    Fault(
        "who waits for another's rows loses its slot to those behind",
        SCHEDULER,
        "self.blocks.free_slots > len(awaiting)",
        "self.blocks.free_slots > 0",
        PREFIX + "who_waits_for_anothers_rows_keeps_its_place_and_holds_nobody_up",
    ),
    Fault(
        "a prompt that is wholly known gives no first token",
        RUNNING,
        "            self.begins = not self.prompt_left\n",
        "",
        "tests/model/test_prefix.py::test_choices_of_a_prompt_share_its_rows_and_draw_as_they_would_alone[1]",
    ),
    Fault(
        "the end of a conversation's last turn is not saved",
        SCHEDULER,
        "if tokens[index] in eos_ids), default=0)",
        "if tokens[index] in ()), default=0)",
        PREFIX + "a_conversation_is_found_although_the_words_that_ask_for_an_answer_go",
    ),
)
