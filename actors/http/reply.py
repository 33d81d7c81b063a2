"""The text of a reply -> its thought, its content and its calls of tools, while it comes.

    parser = ReplyParser(ReplyForm("begun", "xml"), {"add": {...JSON schema of its parameters...}})
    events = parser.push(text)                      # as often as text comes, cut anywhere
    events = parser.finish(was_cut=finish_reason == "length")
    reply = assemble(all of these events)           # or parse(text, ...), of a whole text

Nothing here waits, and nothing knows of HTTP. Text that looks like a call and is none stays text:
nothing of a reply is lost but its tags and the white space next to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.actors.http.calls import (
    END_CALL,
    MAX_SPACE,
    READERS,
    SPACE,
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    Reading,
    Source,
    Tools,
    num_begun,
)
from outrider.model.reply_form import END_THINK, THINK, TOOL_CALL, ReplyForm


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the content."""

    text: str


Event = Reasoning | Content | CallBegins | ArgumentsPiece | CallEnds
"""In the order of the text. Between CallBegins and CallEnds there are only ArgumentsPieces, which
joined are a JSON object; a call without CallEnds is cut off, as the reply is."""


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""
    """JSON; the beginning of it where the reply was cut."""


@dataclass(slots=True)
class Reply:
    """A whole one."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ReplyParser:
    """Of one reply. `push` and `finish` return what has become certain: as little as one piece of
    text may be held back, because it may begin a tag."""

    def __init__(
        self,
        form: ReplyForm,
        tools: Tools | None = None,
        *,
        max_calls: int | None = None,
        calls_in_thought: bool = True,
    ) -> None:
        """tools: JSON schemas of the parameters by name of the tool; calls of others are text.
        Without tools there are no calls. max_calls: those behind it are dropped. calls_in_thought:
        a call ends the thought, as some models do it; otherwise nothing but </think> does."""
        self._form, self._tools, self._max_calls = form, tools or {}, max_calls
        self._calls_in_thought = calls_in_thought
        self._reader = READERS[form.calls] if form.calls and self._tools else None
        self._source = Source()
        self._num_calls = 0
        self._thought_end: int | None = None if form.thought == "begun" else 0
        self._steps = self._read()

    @property
    def num_thought_characters(self) -> int | None:
        """How far into the text the thought reaches, with its tags; None: it is not closed yet."""
        return self._thought_end

    def push(self, text: str) -> list[Event]:
        """More of the text."""
        self._source.push(text)
        return self._go_on()

    def finish(self, *, was_cut: bool) -> list[Event]:
        """No more text comes. was_cut: by the limit of tokens, so that a call may be incomplete;
        otherwise an open one is closed."""
        self._source.ended, self._source.was_cut = True, was_cut
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        events, self._source.events = self._source.events, []
        return list(_joined(events))

    def _read(self) -> Reading[None]:
        in_thought = yield from self._begin()
        while not (self._source.ended and not self._source.num_left()):
            in_thought = yield from self._text_and_tag(in_thought)

    def _begin(self) -> Reading[bool]:
        """Whether the reply begins with a thought; its tag is read."""
        if self._form.thought == "none":
            return False
        found = yield from self._source.word((THINK,))
        if found is None and self._form.thought == "possible":
            return False
        self._thought_end = None
        if found is not None:
            self._source.read(found[1])
        yield from self._skip_lines()
        return True

    def _text_and_tag(self, in_thought: bool) -> Reading[bool]:
        """Read text up to a tag, and what the tag begins or ends, or the text that there is.

        Returns whether the thought goes on.
        """
        source = self._source
        may_call = self._reader is not None and (self._calls_in_thought or not in_thought)
        tags = (*((END_THINK,) if in_thought else ()), *((TOOL_CALL,) if may_call else ()))
        places = {place: tag for tag in tags if (place := source.find(tag)) >= 0}
        if not places:
            self._say_most(tags, in_thought)
            if not source.ended:
                yield
            return in_thought
        place = min(places)
        num_space = self._num_space(place)
        self._say(source.read(place - num_space), in_thought)
        tag = source.read(num_space + len(places[place]))
        if places[place] == END_THINK:
            self._thought_end = source.num_read
            yield from self._skip_lines()
            return False
        start = source.num_read - len(TOOL_CALL)
        if not (yield from self._call()):
            self._say(tag, in_thought)
            return in_thought
        if in_thought:
            self._thought_end = start
        return False

    def _say_most(self, tags: tuple[str, ...], in_thought: bool) -> None:
        """Pass on the text that there is, but for what may belong to a tag."""
        source = self._source
        num_held = 0
        if (tags and not source.ended) or (self._num_calls and not in_thought):
            num_held = 0 if source.ended else num_begun(source, tags)
            num_held += self._num_space(source.num_left() - num_held)
        self._say(source.read(source.num_left() - num_held), in_thought)
        if source.ended:
            source.read(num_held)

    def _num_space(self, end: int) -> int:
        """White characters before `end` that belong to what stands there."""
        source = self._source
        text = source.text[source.at + max(0, end - MAX_SPACE) : source.at + end]
        return len(text) - len(text.rstrip(SPACE))

    def _say(self, text: str, in_thought: bool) -> None:
        if text:
            self._source.emit(Reasoning(text) if in_thought else Content(text))

    def _skip_lines(self) -> Reading[None]:
        """The line breaks behind a tag of the thought belong to it."""
        source = self._source
        while True:
            while source.text.startswith("\n", source.at):
                source.read(1)
            if source.num_left() or source.ended:
                return
            yield

    def _call(self) -> Reading[bool]:
        """Whether a call stands behind <tool_call>; it is read with the tag that closes it."""
        assert self._reader is not None
        self._source.is_muted = self._num_calls == self._max_calls
        is_call = yield from self._reader(self._source, self._tools)
        if is_call:
            self._num_calls += not self._source.is_muted
            closing = yield from self._source.word((END_CALL,), or_end=True)
            self._source.read(closing[1] if closing else 0)
        self._source.is_muted = False
        return is_call


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with texts of one kind that follow each other as one."""
    for kind, group in itertools.groupby(events, type):
        same = list(group)
        texts = [one.text for one in same if isinstance(one, Reasoning | Content | ArgumentsPiece)]
        yield from [kind("".join(texts))] if texts else same


def assemble(events: Iterable[Event]) -> Reply:
    """The reply that the events of a whole one tell."""
    reply, reasoning, content = Reply(), list[str](), list[str]()
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegins(name):
                reply.calls.append(Call(name))
                arguments.append([])
            case ArgumentsPiece(text):
                arguments[-1].append(text)
    reply.reasoning, reply.content = "".join(reasoning), "".join(content)
    for call, pieces in zip(reply.calls, arguments):
        call.arguments = "".join(pieces)
    return reply


def parse(
    text: str,
    form: ReplyForm,
    tools: Tools | None = None,
    *,
    max_calls: int | None = None,
    was_cut: bool = False,
) -> Reply:
    """The parts of a whole reply."""
    parser = ReplyParser(form, tools, max_calls=max_calls)
    return assemble(parser.push(text) + parser.finish(was_cut=was_cut))
