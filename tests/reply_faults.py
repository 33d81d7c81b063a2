"""The faults of tests/mutants.py in replies of chats: thoughts, calls of tools, forced calls.

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

REPLY = "tests/actors/http/test_reply.py::test_"
TOOLS = "tests/actors/http/test_tools.py::test_"
FORCED = "tests/actors/http/test_forced_calls.py::test_"

REPLY_FAULTS = (
    Fault(
        "the beginning of a tag is passed on before it is known",
        "actors/http/reply.py",
        "num_held = 0 if source.ended else num_begun(source, tags)",
        "num_held = 0",
        REPLY + "pieces_add_up_to_the_whole",
    ),
    Fault(
        "a call of a tool that there is not counts",
        "actors/http/calls.py",
        "if header[1] not in tools:",
        "if not header[1]:",
        REPLY + "text_that_only_looks_like_a_call_in_json_is_text",
    ),
    Fault(
        "a prompt that begins the thought is not seen",
        "model/reply_form.py",
        "end.endswith(THINK) or ",
        "",
        TOOLS + "a_whole_answer_has_its_parts[tags]",
    ),
    Fault(
        "any </parameter> ends a value",
        "actors/http/calls.py",
        "behind, or_end=True)) is not None:",
        "behind, or_end=True)) != 5:",
        REPLY + "an_argument_has_the_type_of_its_schema",
    ),
    Fault(
        "a text in quotes loses them",
        "actors/http/arguments.py",
        'kind != "string" and ',
        "",
        REPLY + "an_argument_has_the_type_of_its_schema",
    ),
    Fault(
        "a call that max_tokens cuts is closed",
        "actors/http/reply_reader.py",
        'was_cut=part.finish_reason == "length"',
        "was_cut=False",
        TOOLS + "deltas_add_up_to_the_whole_wherever_max_tokens_cuts[tags]",
    ),
    Fault(
        "an answer with calls ends as any other",
        "actors/http/chat_reply.py",
        'return "tool_calls" if finish',
        'return "stop" if finish',
        TOOLS + "a_whole_answer_has_its_parts[json]",
    ),
    Fault(
        "all tokens count as thought",
        "actors/http/reply_reader.py",
        "if at >= end:",
        "if at < 0:",
        TOOLS + "a_whole_answer_has_its_parts[tags]",
    ),
    Fault(
        "a template gets arguments as a text",
        "actors/http/chats.py",
        'value = from_json(value or "{}", allow_inf_nan=False)',
        'value = {"text": value}',
        TOOLS + "a_chat_is_replayed_through_the_template[json]",
    ),
    Fault(
        "with tool_choice none the model is told of tools",
        "actors/http/tools.py",
        'if self.choice.mode == "none" or not self.functions:',
        "if not self.functions:",
        TOOLS + "with_tool_choice_none_the_model_is_told_of_no_tools",
    ),
    Fault(
        "a grammar begins inside the thought",
        "actors/http/tools.py",
        'return Grammar("grammar", calls, form.thought)',
        'return Grammar("grammar", calls)',
        FORCED + "a_thought_comes_before_the_call_it_must_make[xml]",
    ),
    Fault(
        "an answer in JSON leaves no room for calls",
        "actors/http/tools.py",
        "thought=form.thought, calls=calls)",
        "thought=form.thought)",
        FORCED + "an_answer_in_json_comes_behind_the_thought_or_calls_come_instead[json]",
    ),
    Fault(
        "a pattern holds from the beginning of a text",
        "actors/http/call_grammar.py",
        "{'' if start else ANY_TEXT}",
        "{''}",
        FORCED + "a_pattern_holds_as_it_would_in_json_schema",
    ),
)
