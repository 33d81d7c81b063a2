"""The grammar of calls: what a model may write to call one of some tools, as calls.py reads it.

    names and JSON schemas of tools, form -> call_grammar -> a grammar in Lark's form
In tags (xml) texts stand without quotes: what their schemas ask of them is put into regular
expressions. All other values are JSON, and llguidance holds them to their schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.actors.http.arguments import Schema, referred, types_of
from outrider.actors.http.calls import END_CALL, END_FUNCTION, END_PARAMETER, PARAMETER, Tools
from outrider.model.reply_form import FUNCTION, TOOL_CALL, CallForm
from outrider.model.step import JSON_WHITESPACE, MAX_GRAMMAR_CHARS

ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
"""Names of the parameters that a tool takes without listing them."""
ANY_TEXT = "(?s:.*)"
MAX_REFERENCES = 16
"""References to other schemas that are followed to one that says what a value is."""
MAX_VALUES = 1000
"""Schemas of values in one grammar, each as often as it is referred to."""


def call_grammar(tools: Tools, form: CallForm, *, several: bool) -> str:
    """One call, or several on lines of their own. ValueError for a schema that cannot be written
    as a grammar; most of what is wrong with one only shows when the grammar is compiled."""
    rules = _Rules(form)
    names = [rules.tool(name, schema) for name, schema in tools.items()]
    rules.add("call", f'"{TOOL_CALL}\\n" ({" | ".join(names)}) "\\n{END_CALL}"')
    return rules.text('call ("\\n" call)*' if several else "call")


class _Rules:
    """The rules of a grammar, while it is written."""

    def __init__(self, form: CallForm) -> None:
        self._form, self._lines = form, list[str]()
        self._num_values = self._num_chars = 0

    def add(self, name: str, body: str) -> str:
        """Add a rule, with a number if need be -> its name. The attributes of a rule stand behind
        its name, in brackets."""
        self._lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._lines))

    def _new(self, body: str, attributes: str = "") -> str:
        return self.add(f"r{len(self._lines)}{attributes}", body)

    def tool(self, name: str, schema: Schema) -> str:
        if self._form == "json":
            begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            return self._new(f'{begin} {self._json({**schema, "type": "object"}, schema)} "}}"')
        required = schema.get("required", ())
        parameters = [
            self._parameter(json.dumps(f"{PARAMETER}{_checked(key)}>\n"), one, schema)
            + ("" if key in required else "?")
            for key, one in schema.get("properties", {}).items()
        ]
        others = schema.get("additionalProperties", not parameters)
        if others is not False:
            tag = f'"{PARAMETER}" {ANY_NAME} ">\\n"'
            parameters.append(self._parameter(tag, others, schema) + "*")
        tag = json.dumps(f"{FUNCTION}{name}>\n")
        return self._new(f'{tag} {" ".join(parameters)} "{END_FUNCTION}"')

    def _parameter(self, tag: str, schema: object, root: Schema) -> str:
        """A rule for a parameter, its tags included."""
        options = " | ".join(self._values(schema, root, 0))
        return self._new(f'{tag} ({options}) "\\n"')

    def _values(self, schema: object, root: Schema, num_references: int) -> Iterator[str]:
        """What the value may be, each with the tag that closes it."""
        end = f'"\\n{END_PARAMETER}"'
        self._num_values += 1
        if self._num_values > MAX_VALUES or num_references > MAX_REFERENCES:
            rule = f"at most {MAX_VALUES}, and {MAX_REFERENCES} references to one of them"
            raise ValueError(f"too many schemas of values: {rule}")
        match schema:
            case {"$ref": str(reference)}:
                yield from self._values(referred(reference, root), root, num_references + 1)
            case (
                {"anyOf": [_, *_] as several}
                | {"oneOf": [_, *_] as several}
                | {"allOf": [_] as several}
            ):
                for one in several:
                    yield from self._values(one, root, num_references)
            case {"enum": [_, *_] as values}:
                yield f"({' | '.join(map(_constant, values))}) {end}"
            case {"const": value}:
                yield f"{_constant(value)} {end}"
            case _:
                types = types_of(schema, root)
                if "string" in types:
                    yield self._new(_text(schema), f"[suffix={json.dumps(END_PARAMETER)}]")
                if others := sorted(types - {"string"}):
                    said = schema if isinstance(schema, Mapping) else {}
                    yield f"{self._json({**said, 'type': others}, root)} {end}"

    def _json(self, schema: Schema, root: Schema) -> str:
        """A value in JSON. root: where its references lead."""
        whole = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
        text = json.dumps(whole)
        if '"$ref"' in text:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            text = json.dumps(whole | definitions)
        self._num_chars += len(text)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            rule = f"at most {MAX_GRAMMAR_CHARS} characters, with what they refer to each time"
            raise ValueError(f"too many schemas of values: {rule}")
        return f"%json {text}"


def _checked(name: str) -> str:
    if ">" in name or "\n" in name or not name:
        raise ValueError(f"a parameter cannot be called {name!r}")
    return name


def _constant(value: object) -> str:
    return json.dumps(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _text(schema: Any) -> str:
    """The regular expression of a text and the line break behind it."""
    said = schema if isinstance(schema, Mapping) else {}
    bounds = [said.get("minLength", 0), said.get("maxLength", "")]
    if wrong := [one for one in bounds if one != "" and not _is_count(one)]:
        raise ValueError(f"minLength, maxLength: {wrong[0]!r} is no number of characters")
    is_bounded = bounds != [0, ""]
    if "pattern" in said:
        if is_bounded or not isinstance(said["pattern"], str):
            raise ValueError("pattern: a text, and not together with minLength or maxLength")
        return f"/{_whole_pattern(said['pattern'])}\\n/"
    return f"/(?s:.{{{bounds[0]},{bounds[1]}}})\\n/" if is_bounded else f"/{ANY_TEXT}/"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _whole_pattern(pattern: str) -> str:
    """What a whole text must be for the pattern to be found in it."""
    start, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    core = pattern[start : len(pattern) - end]
    core = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", core)
    return f"{'' if start else ANY_TEXT}(?:{core}){'' if end else ANY_TEXT}"
