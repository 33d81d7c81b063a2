"""Replies are divided into thought, content and calls, wherever their text is cut into pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.actors.http.calls import ArgumentsPiece, CallBegins, CallEnds
from outrider.actors.http.reply import Call, Event, Reply, ReplyParser, assemble, parse
from outrider.model.reply_form import CallForm, ReplyForm, Thought, form_of

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "append": {"type": "boolean"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            "first": {"$ref": "#/$defs/line"},
            "mode": {"enum": ["a", "b", 1]},
            "any": {},
        },
        "$defs": {"line": {"allOf": [{"type": ["object", "null"]}, {"description": "a line"}]}},
    },
    "now": {},
}
FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "<function=now>",
    "<function=write>", "<function=other>", "</function>", "<parameter=a>", "<parameter=text>",
    "</parameter>", "\n", " ", "\n\n", "12", "Grüße 🦊", '"', "\\", "{", "}", "[1, ", "<", "<tool_",
    '{"name": "add", "arguments": ', '{"arguments": {}, "name": "now"}', '{"a": 1, "b": "}<"}',
    "\t" * 70,
)  # fmt: skip
replies = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
thoughts: st.SearchStrategy[Thought] = st.sampled_from(("none", "possible", "begun"))
call_forms: st.SearchStrategy[CallForm | None] = st.sampled_from(("xml", "json", None))
forms = st.builds(ReplyForm, thoughts, call_forms)

XML_CALL = """<tool_call>
<function=write>
<parameter=text>
a "line"
and another
</parameter>
<parameter=append>
True
</parameter>
</function>
</tool_call>"""
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}\\"<"}}\n</tool_call>'
WRITTEN = Call("write", '{"text": "a \\"line\\"\\nand another", "append": true}')
ADDED = Call("add", '{"a": 1, "b": "}\\"<"}')


def events_of(pieces: Sequence[str], form: ReplyForm, **how: Any) -> list[Event]:
    was_cut = how.pop("was_cut", False)
    parser = ReplyParser(form, TOOLS, **how)
    pushed = [event for piece in pieces for event in parser.push(piece)]
    return pushed + parser.finish(was_cut=was_cut)


@settings(deadline=None)
@given(
    text=replies, form=forms, cuts=st.lists(st.integers(0, 300)), was_cut=st.booleans(),
    max_calls=st.sampled_from((None, 1)),
)  # fmt: skip
def test_pieces_add_up_to_the_whole(
    text: str, form: ReplyForm, cuts: list[int], was_cut: bool, max_calls: int | None
) -> None:
    how: dict[str, Any] = {"max_calls": max_calls, "was_cut": was_cut}
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    whole = parse(text, form, TOOLS, **how)
    for pieces in ([text[a:b] for a, b in pairwise(places)], text):
        events = events_of(pieces, form, **how)
        assert assemble(events) == whole
        begun = 0
        for event in events:
            begun += isinstance(event, CallBegins)
            assert bool(begun) or not isinstance(event, ArgumentsPiece | CallEnds)
            begun -= isinstance(event, CallEnds)


@settings(deadline=None)
@given(text=replies, form=forms)
def test_what_is_no_call_is_not_lost(text: str, form: ReplyForm) -> None:
    """Of a reply without calls only the tags of its thought and the space beside them go."""
    reply = parse(text, form, TOOLS)
    for sure in ("12", "Grüße", "{"):
        told = reply.reasoning + reply.content + "".join(c.name + c.arguments for c in reply.calls)
        if form.calls is None or not reply.calls:
            assert told.count(sure) == text.count(sure)
    if form.thought == "none" and not reply.calls:
        assert reply == Reply(content=text)


@pytest.mark.parametrize(
    ("text", "form", "reply"),
    [
        ("Hm.\n</think>\n\nYes.\n", ReplyForm("begun"), Reply("Hm.", "Yes.\n")),
        ("\nHm.</think>Yes.", ReplyForm("begun"), Reply("Hm.", "Yes.")),
        ("<think>\nHm.\n</think>\n\nYes.", ReplyForm("possible"), Reply("Hm.", "Yes.")),
        ("<think>\n\n</think>\n\n", ReplyForm("possible"), Reply()),
        ("Hm. <think>no</think>", ReplyForm("possible"), Reply("", "Hm. <think>no</think>")),
        ("a <b> </thinker>", ReplyForm("begun"), Reply("a <b> </thinker>")),
        ("It never ends\n", ReplyForm("begun"), Reply("It never ends\n")),
        ("</think>", ReplyForm("none"), Reply("", "</think>")),
        (f"So.\n\n{XML_CALL}", ReplyForm("none", "xml"), Reply("", "So.", [WRITTEN])),
        (f"Hm.\n{XML_CALL}\n", ReplyForm("begun", "xml"), Reply("Hm.", "", [WRITTEN])),
        (
            f"Hm.</think>\n{XML_CALL}\n{XML_CALL}\nDone.\n", ReplyForm("begun", "xml"),
            Reply("Hm.", "\nDone.", [WRITTEN, WRITTEN]),
        ),
        (f"{JSON_CALL}{JSON_CALL}", ReplyForm("possible", "json"), Reply("", "", [ADDED, ADDED])),
        (
            '<tool_call>{"arguments": "{\\"a\\": 5}", "name": "add"}</tool_call>',
            ReplyForm("none", "json"), Reply("", "", [Call("add", '{"a": 5}')]),
        ),
        (
            "<tool_call><function=now></tool_call>", ReplyForm("none", "xml"),
            Reply("", "", [Call("now", "{}")]),
        ),
    ],
)  # fmt: skip
def test_a_reply_has_its_parts(text: str, form: ReplyForm, reply: Reply) -> None:
    assert parse(text, form, TOOLS) == reply


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> first.",
        "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\nand then its parameters",
        "<tool_call>\n<function=ad",
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>",
        "<function=add>\n</function>",
        "``<tool_call></tool_call>``",
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_in_tags_is_text(text: str) -> None:
    assert parse(text, ReplyForm("none", "xml"), TOOLS) == Reply(content=text)
    assert parse(text, ReplyForm("begun", "xml"), TOOLS) == Reply(reasoning=text)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": 5}\n</tool_call>',
        "<tool_call>\n{add: 5}\n</tool_call> and more",
        '<tool_call>\n{"name": "add"',
        "<tool_call>" + "[" * 5000,
        "<tool_call>{" + '"a":[' * 5000,
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_in_json_is_text(text: str) -> None:
    assert parse(text, ReplyForm("none", "json"), TOOLS) == Reply(content=text)


@pytest.mark.parametrize(("form", "call"), [("xml", XML_CALL), ("json", JSON_CALL)])
def test_a_call_that_is_cut_has_the_beginning_of_its_arguments(form: CallForm, call: str) -> None:
    """Wherever max_tokens cuts: nothing but what came, and a call as soon as it is one for sure."""
    (whole,) = parse(call, ReplyForm("none", form), TOOLS).calls
    seen = set()
    for end in range(len(call)):
        events = events_of([call[:end]], ReplyForm("none", form), was_cut=True)
        reply = assemble(events)
        if reply.calls:
            (part,) = reply.calls
            assert part.name == whole.name
            assert reply.content == ""
            if any(isinstance(event, CallEnds) for event in events):
                assert part == whole
            else:
                assert whole.arguments.startswith(part.arguments)
            seen.add(part.arguments)
        else:
            assert reply.content == call[:end]
    assert len(seen) > 10


def test_a_call_that_ends_without_its_tags_is_closed() -> None:
    for text in (XML_CALL[: XML_CALL.index("</function>")], XML_CALL[:-3]):
        assert parse(text, ReplyForm("none", "xml"), TOOLS).calls == [WRITTEN]
    text = XML_CALL[: XML_CALL.index("another")]
    (call,) = parse(text, ReplyForm("none", "xml"), TOOLS).calls
    assert json.loads(call.arguments) == {"text": 'a "line"\nand '}


def test_of_several_calls_only_as_many_as_asked_for_are_told() -> None:
    text = f"{XML_CALL}\n{XML_CALL}\nDone."
    for most, calls in ((1, [WRITTEN]), (2, [WRITTEN, WRITTEN]), (None, [WRITTEN, WRITTEN])):
        reply = parse(text, ReplyForm("none", "xml"), TOOLS, max_calls=most)
        assert reply == Reply("", "\nDone.", calls)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "null", "null"),
        ("text", "  two\n\nlines\n", "  two\n\nlines\n"),
        ("text", "</parameter> in <parameter=text>\nit", "</parameter> in <parameter=text>\nit"),
        ("name", "None", None),
        ("name", "nil", "nil"),
        ("name", '"nil"', '"nil"'),
        ("append", "True", True),
        ("append", "false", False),
        ("append", "maybe", "maybe"),
        ("lines", '[{"a": 1}, null]', [{"a": 1}, None]),
        ("lines", "[{'a': 1}]", "[{'a': 1}]"),
        ("first", '{"a": [1.5]}', {"a": [1.5]}),
        ("first", "5", "5"),
        ("mode", "1", 1),
        ("mode", "a", "a"),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("any", "NaN", "NaN"),
        ("new", "5", "5"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(name: str, written: str, value: object) -> None:
    text = (
        f"<tool_call>\n<function=write>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n"
    )
    (call,) = parse(text + "</tool_call>", ReplyForm("none", "xml"), TOOLS).calls
    assert json.loads(call.arguments) == {name: value}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [("a", "5", 5), ("a", "5.0", 5.0), ("a", "5.5", "5.5"), ("b", "5", 5), ("b", "1e3", 1000.0)],
)
def test_a_number_is_written_as_the_model_wrote_it(name: str, written: str, value: object) -> None:
    text = (
        f"<tool_call><function=add><parameter={name}>{written}</parameter></function></tool_call>"
    )
    (call,) = parse(text, ReplyForm("none", "xml"), TOOLS).calls
    assert json.loads(call.arguments) == {name: value}
    assert written in call.arguments


def test_a_text_arrives_while_it_is_written() -> None:
    """Not first when its parameter is closed: clients wait for the text of a file."""
    parser = ReplyParser(ReplyForm("none", "xml"), TOOLS)
    parser.push("<tool_call>\n<function=write>\n<parameter=text>\n")
    for word in ("one ", "two ", "three "):
        assert parser.push(word) == [ArgumentsPiece(word)]


def test_long_replies_take_no_longer_than_their_length() -> None:
    for text in (
        " \n" * 50_000,
        "<tool_call>" * 20_000,
        XML_CALL * 3000,
        "<tool_call>{" + "a" * 200_000,
    ):
        for form in ("xml", "json"):
            started = time.process_time()
            events_of([text], ReplyForm("none", form))
            events_of([text[i : i + 50] for i in range(0, len(text), 50)], ReplyForm("begun", form))
            assert time.process_time() - started < 2.0


def test_the_template_and_the_prompt_tell_the_form() -> None:
    thinks = "{{ '<think>' }}{{ '</think>' }}"
    for source, prompt, continued, form in (
        ("{{ messages }}", "<think>\n", None, ReplyForm("none", None)),
        (thinks, "assistant\n<think>\n", None, ReplyForm("begun", None)),
        (thinks, "assistant\n", None, ReplyForm("possible", None)),
        (thinks, "assistant\n<think>\n\n</think>\n\n", None, ReplyForm("none", None)),
        (thinks, "assistant\nSo", "So", ReplyForm("none", None)),
        (thinks, "assistant\n<think>So", "<think>So", ReplyForm("begun", None)),
        (thinks, "<think>So</think>a", "<think>So</think>a", ReplyForm("none", None)),
        ("<tool_call>{{ '<function=' }}", "", None, ReplyForm("none", "xml")),
        ("<tool_call>{{ tools }}", "", None, ReplyForm("none", "json")),
    ):
        assert form_of(source, prompt, continued) == form
