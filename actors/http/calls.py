"""Reads the calls of tools in a reply: two forms, as chat templates teach them to models.

    Source (text as it comes) -> READERS[form] -> CallBegins, ArgumentsPiece, CallEnds
A reader is a generator that yields where it needs more text. It starts behind <tool_call>, takes
nothing before it is sure of a call to a tool that there is, and then all of the call. White space
between the parts of a call has no meaning; the line breaks next to a parameter's value neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.actors.http.arguments import TEXT, Parameters, Schema, Types, as_json, quoted
from outrider.model.reply_form import FUNCTION, CallForm

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it needs more text, and returns a T."""
END_CALL, END_FUNCTION = "</tool_call>", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
SPACE = " \t\r\n"
MAX_SPACE = 64
"""White characters in a row that may belong to a tag; where there are more, they are text."""
SPACE_RUN = re.compile(rf"[{SPACE}]{{0,{MAX_SPACE}}}")
HEADER = re.compile(r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\]{1,256})"'
                    r'\s{0,64},\s{0,64}"arguments"\s{0,64}:\s{0,64}(?=\{)')  # fmt: skip
"""How a call in JSON begins, up to its arguments."""
OUTSIDE_TEXT = re.compile(r'[^"{}\[\]<]*')
INSIDE_TEXT = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""What changes no depth in JSON: outside a string, and inside."""


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of this tool. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """The next characters of the arguments of the call, which are one JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The arguments are complete. A call that is cut off has no such event."""


class Source:
    """The text of a reply as far as it has come, and what was found in it.

    Positions that methods take and return are distances from `at`, up to where it is read.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = self.was_cut = False
        """No more text comes; and the reply is not complete."""
        self.is_muted = False
        """What is found is dropped."""
        self.events: list[Any] = []
        self._num_dropped = 0

    @property
    def num_read(self) -> int:
        """Characters of the reply that are read."""
        return self._num_dropped + self.at

    def push(self, text: str) -> None:
        self._num_dropped += self.at
        self.text, self.at = self.text[self.at :] + text, 0

    def emit(self, event: object) -> None:
        if not self.is_muted:
            self.events.append(event)

    def read(self, count: int) -> str:
        """The next characters, which are there."""
        self.at += count
        return self.text[self.at - count : self.at]

    def find(self, word: str, start: int = 0) -> int:
        """Where the word stands; -1: nowhere yet."""
        found = self.text.find(word, self.at + start)
        return found - self.at if found >= 0 else -1

    def num_left(self) -> int:
        return len(self.text) - self.at

    def word(
        self, words: Collection[str], start: int = 0, *, or_end: bool = False
    ) -> Reading[tuple[str, int] | None]:
        """Which of the words stands at `start`, behind white space, and the position behind it.

        None where none does. or_end: a text that ends before that is known counts as a "" there.
        """
        while True:
            run = SPACE_RUN.match(self.text, self.at + start)
            assert run is not None
            for word in words:
                if self.text.startswith(word, run.end()):
                    return word, run.end() + len(word) - self.at
            rest = self.text[run.end() : run.end() + max(map(len, words))]
            if not any(word.startswith(rest) for word in words):
                return None
            if self.ended:
                return ("", self.num_left()) if or_end else None
            yield


Tools = Mapping[str, Schema]
"""By name of a tool, the JSON schema of its parameters."""


def read_xml_call(source: Source, tools: Tools) -> Reading[bool]:
    """Whether there is a call; if not, nothing is read."""
    begun = yield from _xml_name(source, tools)
    if begun is None:
        return False
    name, length = begun
    source.read(length)
    source.emit(CallBegins(name))
    parameters, lead = Parameters(tools[name]), "{"
    while True:
        found = yield from source.word((PARAMETER, END_FUNCTION, END_CALL), or_end=True)
        assert found is not None  # _xml_name and _value have seen to that
        word, length = found
        source.read(length)
        if word != PARAMETER:
            if word or not source.was_cut:
                source.emit(ArgumentsPiece("{}" if lead == "{" else "}"))
                source.emit(CallEnds())
            return True
        name = yield from _parameter_name(source)
        if name is None:
            continue
        source.emit(ArgumentsPiece(f"{lead}{quoted(name)}: "))
        types = parameters.of(name)
        yield from _text_value(source) if types == TEXT else _typed_value(source, types)
        lead = ", "


def _xml_name(source: Source, tools: Tools) -> Reading[tuple[str, int] | None]:
    """The tool that is called, and the position behind <function=NAME>; None: this is no call."""
    head = yield from source.word((FUNCTION,))
    if head is None:
        return None
    _, start = head
    while (end := source.find(">", start)) < 0:
        said = source.text[source.at + start :]
        if source.ended or not any(name.startswith(said) for name in tools):
            return None
        yield
    name = source.text[source.at + start : source.at + end]
    if name not in tools:
        return None
    found = yield from source.word((PARAMETER, END_FUNCTION, END_CALL), end + 1)
    return None if found is None else (name, end + 1)


def _parameter_name(source: Source) -> Reading[str | None]:
    """Read up to the end of <parameter=NAME>, or of its line, where a model forgets to close it.

    None where the text ends before.
    """
    searched = 0
    while True:
        ends = [source.find(mark, searched) for mark in (">", "\n")]
        ends = [end for end in ends if end >= 0]
        if ends:
            name = source.read(min(ends))
            source.read(1 if source.text[source.at] == ">" else 0)
            return name
        searched = source.num_left()
        if source.ended:
            source.read(searched)
            return None
        yield


def _text_value(source: Source) -> Reading[None]:
    """The value of a parameter that can only be a text, passed on while it comes."""

    def write(piece: str) -> None:
        if piece:
            source.emit(ArgumentsPiece(quoted(piece)[1:-1]))

    source.emit(ArgumentsPiece('"'))
    is_closed = yield from _up_to_end(source, write)
    if is_closed or not source.was_cut:
        source.emit(ArgumentsPiece('"'))


def _typed_value(source: Source, types: Types) -> Reading[None]:
    """The value of any other parameter, passed on when all of it is there."""
    pieces: list[str] = []
    is_closed = yield from _up_to_end(source, pieces.append)
    if is_closed or not source.was_cut:
        source.emit(ArgumentsPiece(as_json("".join(pieces), types)))


def _up_to_end(source: Source, write: Callable[[str], None]) -> Reading[bool]:
    """Write a value up to the </parameter> behind which the call goes on or ends; any other belongs
    to the value. Returns False where the text ends before."""
    while not source.num_left() and not source.ended:
        yield
    source.read(1 if source.text.startswith("\n", source.at) else 0)
    tags = ("\n" + END_PARAMETER, END_PARAMETER)
    while True:
        end = source.find(END_PARAMETER)
        if end >= 0:
            behind = end + len(END_PARAMETER)
            goes_on = (PARAMETER, END_FUNCTION, END_CALL)
            if (yield from source.word(goes_on, behind, or_end=True)) is not None:
                write(source.read(end).removesuffix("\n"))
                source.read(len(END_PARAMETER))
                return True
            write(source.read(behind))
        elif source.ended:
            write(source.read(source.num_left() - num_begun(source, tags)))
            source.read(source.num_left())
            return False
        else:
            write(source.read(source.num_left() - num_begun(source, tags)))
            yield


def num_begun(source: Source, tags: Collection[str]) -> int:
    """How many of the last characters that have come may be the beginning of a tag."""
    most = min(source.num_left(), max(map(len, tags)) - 1)
    for count in range(most, 0, -1):
        end = source.text[len(source.text) - count :]
        if any(tag.startswith(end) for tag in tags):
            return count
    return 0


def read_json_call(source: Source, tools: Tools) -> Reading[bool]:
    """Whether there is a call; if not, nothing is read."""
    found = yield from source.word(("{",))
    if found is None:
        return False
    searched = 0
    while True:
        if header := HEADER.match(source.text, source.at):
            if header[1] not in tools:
                return False
            source.read(header.end() - source.at)
            source.emit(CallBegins(header[1]))
            yield from _json_arguments(source)
            return True
        end = source.find(END_CALL, searched)
        if end >= 0 or source.ended:
            return _whole_json_call(source, end if end >= 0 else source.num_left(), tools)
        searched = max(0, source.num_left() - len(END_CALL))
        yield


def _whole_json_call(source: Source, end: int, tools: Tools) -> bool:
    """A call in JSON that is not written as usual; `end`: where its text ends."""
    try:
        said = json.loads(source.text[source.at : source.at + end])
        arguments = said.get("arguments", said.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        is_call = said.get("name") in tools and isinstance(arguments, dict)
    except (ValueError, RecursionError, AttributeError, TypeError):
        return False
    if is_call:
        source.read(end)
        source.emit(CallBegins(said["name"]))
        source.emit(ArgumentsPiece(json.dumps(arguments, ensure_ascii=False)))
        source.emit(CallEnds())
    return is_call


class ObjectScanner:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self.depth, self._in_text = 0, False

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Up to where `text` from `at` belongs to the object, and whether that is over.

        It also is where a < stands outside of its texts, which no object can hold.
        """
        while at < len(text):
            run = (INSIDE_TEXT if self._in_text else OUTSIDE_TEXT).match(text, at)
            assert run is not None
            at = run.end()
            mark = text[at : at + 1]
            if mark in ("", "\\", "<"):  # the character behind a backslash has not come yet
                return at, mark == "<"
            at += 1
            if mark == '"':
                self._in_text = not self._in_text
            else:
                self.depth += 1 if mark in "{[" else -1
            if self.depth == 0:
                return at, True
        return at, False


def _json_arguments(source: Source) -> Reading[None]:
    """Pass on an object as it is written, up to where it ends, and read the } of the call."""
    scanner, is_over = ObjectScanner(), False
    while not is_over:
        end, is_over = scanner.scan(source.text, source.at)
        _pass_on(source, end - source.at)
        if source.ended and not is_over:
            _pass_on(source, source.num_left())
            return
        if not is_over:
            yield
    if scanner.depth == 0:
        source.emit(CallEnds())
        closing = yield from source.word(("}",))
        source.read(closing[1] if closing else 0)


def _pass_on(source: Source, count: int) -> None:
    if count:
        source.emit(ArgumentsPiece(source.read(count)))


READERS: Mapping[CallForm, Callable[[Source, Tools], Reading[bool]]] = {
    "xml": read_xml_call,
    "json": read_json_call,
}
