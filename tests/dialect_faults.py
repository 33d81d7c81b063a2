"""The faults of tests/mutants.py in the doors beside completions and chats.

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

TOKENS = "tests/actors/http/test_tokens.py::test_"

DIALECT_FAULTS = (
    Fault(
        "special tokens lost on the way back to text",
        "actors/http/prompts.py",
        "ids, special=True)",
        "ids, special=False)",
        TOKENS + "a_prompt_becomes_the_ids_that_completions_make_of_it",
    ),
    Fault(
        "an id that the model lacks has no text",
        "actors/http/tokens.py",
        ") >= vocab_size:",
        ") < 0:",
        TOKENS + "what_cannot_be_tokenised_is_refused_by_name",
    ),
)
