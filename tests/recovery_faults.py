"""The faults of tests/mutants.py in how requests come back after they have left their slots: after
a preemption, or on a new group of ranks. What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import REQUEST, RUNNER, RUNNING, Fault

SCHEDULER = "actors/driver/scheduler.py"
SUPERVISOR = "actors/driver/supervisor.py"
RECOVERED = "tests/actors/driver/test_recovery.py::test_"
RESUMED = (
    "tests/model/test_resume.py::test_an_answer_that_was_interrupted_anywhere_goes_on_the_same"
)
SUSPENDED = "tests/actors/driver/test_scheduler.py::test_"

RECOVERY_FAULTS = (
    Fault(
        "penalties forget the answer that a request comes back with",
        "model/sampling.py",
        "self._local(join.emitted)",
        "self._local(())",
        RESUMED + "[(1, 'mtp')-penalties]",
    ),
    Fault(
        "a grammar starts anew when a request comes back",
        "model/grammar.py",
        "        if emitted:\n",
        "        if False:\n",
        RESUMED + "[(1, 'mtp')-grammar]",
    ),
    Fault(
        "prefill's token taken for the known one of a request that comes back",
        RUNNER,
        "self.executor.set_lasts(",
        "str(",
        RESUMED + "[(1, 'mtp')-seeded]",
    ),
    Fault(
        "the last known token runs twice",
        RUNNING,
        "self.join.tokens + emitted[:-1]",
        "self.join.tokens + emitted",
        RESUMED + "[(1, 'mtp')-greedy]",
    ),
    Fault(
        "log probabilities of a prompt made again",
        RUNNER,
        " and not span.request.resumes",
        "",
        "tests/model/test_resume.py::test_log_probabilities_of_a_prompt_are_not_made_again"
        "[(1, 'mtp')]",
    ),
    Fault(
        "late progress of a suspended request counts",
        SCHEDULER,
        "request.suspend(next(self._numbers))",
        "request.suspend(request.join_number)",
        SUSPENDED + "progress_from_before_a_suspension_is_not_taken_for_later_progress",
    ),
    Fault(
        "log probabilities of a half-read prompt kept over a suspension",
        REQUEST,
        "        if not self.emitted:\n            del",
        "        if False:\n            del",
        SUSPENDED + "log_probabilities_of_a_prompt_come_once_whenever_it_is_suspended",
    ),
    Fault(
        "losses that are long past still count",
        SUPERVISOR,
        "self._losses[0] < now - limits.window_s",
        "self._losses[0] < 0",
        RECOVERED + "losses_that_are_long_past_do_not_count",
    ),
    Fault(
        "a hang while all requests decode is not noticed",
        SUPERVISOR,
        'key = "prefill_s" if self._work.prefilling else "decode_s"',
        'key = "prefill_s"',
        RECOVERED + "prompts_and_answers_have_limits_of_their_own[9.0-0.3]",
    ),
    Fault(
        "what is not a number makes a token",
        "model/executor.py",
        "kept.masked_fill(_has_nan(hidden), -1)",
        "kept",
        "tests/model/test_broken_numbers.py::"
        "test_a_broken_cache_of_one_request_makes_no_later_token[0-greedy]",
    ),
)
