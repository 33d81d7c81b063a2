"""The faults of tests/mutants.py in what is taken from a checkpoint's small files: its rotary, its
defaults for requests, its chat template and tokenizer. What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

CONFIG, CHAT, ROPE = "model/config.py", "model/chat.py", "model/rope.py"
TABLES = "tests/model/test_rope.py::test_the_tables_are_those_of_transformers"
SPELLINGS = "tests/model/test_rope.py::test_yarn_is_read_in_each_of_its_spellings"
DEFAULTS = (
    "tests/actors/http/test_parameters.py::"
    "test_what_a_request_leaves_open_is_as_generation_config_says"
)
RENDERED = "tests/model/test_chat.py::test_a_template_sees_what_it_sees_in_transformers[values0]"
TOKENIZERS = "tests/model/test_text.py::test_"

CHECKPOINT_FAULTS = (
    Fault(
        "rope_scaling passed over",
        ROPE,
        '("rope_parameters", "rope_scaling")',
        '("rope_parameters",)',
        f"{SPELLINGS}[text3]",
    ),
    Fault(
        "YaRN slows the fast pairs instead of the slow ones",
        "model/blocks.py",
        "kept = 1 - ramp",
        "kept = ramp",
        f"{TABLES}[yarn-10000000.0]",
    ),
    Fault(
        "YaRN's attention factor left out of the sines",
        "model/blocks.py",
        "angle.sin() * scale",
        "angle.sin()",
        f"{TABLES}[attention_factor-10000000.0]",
    ),
    Fault(
        "positions of pre-training taken for all that YaRN gives",
        CONFIG,
        "int(rope.yarn.original_positions * rope.yarn.factor)",
        "rope.yarn.original_positions",
        "tests/model/test_config.py::test_yarn_gives_as_many_positions_as_it_stretches_to",
    ),
    Fault(
        "the API's defaults before the model's",
        "actors/http/bodies.py",
        "{**DEFAULTS, **defaults}",
        "{**defaults, **DEFAULTS}",
        DEFAULTS,
    ),
    Fault(
        "the model's defaults used over HTTP alone",
        "actors/driver/scheduler.py",
        "sampling.with_defaults(limits.sampling_defaults)",
        "sampling",
        "tests/actors/driver/test_scheduler.py::"
        "test_what_a_request_leaves_open_is_the_models_default_and_what_it_says_wins",
    ),
    Fault(
        "a default that wins over what a request says",
        "model/step.py",
        "in defaults.items() if getattr(self, name) is None",
        "in defaults.items()",
        DEFAULTS,
    ),
    Fault(
        "the tokenizer's end of a chat turn left out",
        CONFIG,
        "found.append(_tokenizer_eos(folder))",
        "pass",
        "tests/actors/http/test_parameters.py::"
        "test_a_chat_ends_at_the_tokenizers_end_without_a_generation_config",
    ),
    Fault(
        "JSON in a conversation written in ASCII alone",
        CHAT,
        "ensure_ascii: bool = False",
        "ensure_ascii: bool = True",
        RENDERED,
    ),
    Fault(
        "code of a model's folder makes its tokenizer",
        "model/text.py",
        "trust_remote_code=False",
        "trust_remote_code=True",
        f"{TOKENIZERS}no_code_of_a_folder_makes_its_tokenizer",
    ),
)
