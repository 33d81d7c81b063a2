"""The faults of tests/mutants.py in what keeps clients and neighbours apart (docs/security.md).

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

SECURITY = "tests/actors/http/test_security.py::test_"
ESCAPING = "tests/model/test_escaping.py::test_"
READING = "tests/actors/http/test_reading.py::test_"

SECURITY_FAULTS = (
    Fault(
        "a special token in a message closes the turn",
        "model/escaping.py",
        "text = text.replace(name, name + MARK)",
        "pass",
        SECURITY + "special_tokens_in_messages_are_plain_text",
    ),
    Fault(
        "texts that a template puts together become a token",
        "model/escaping.py",
        "if any(tail in self._starts for tail in tails):",
        "if not text:",
        ESCAPING + "texts_that_a_template_puts_together_make_no_token",
    ),
    Fault(
        "refused bodies keep their memory",
        "actors/http/reading.py",
        "refusal.__context__ = None",
        "refusal.__context__ = error.__context__",
        READING + "refused_bodies_leave_no_memory_behind",
    ),
)
