"""The arguments of a call as JSON, by the JSON schema of the tool's parameters.

    schema -> Parameters.of(name) -> Types: what values are allowed
    Types, the text that a model wrote for a value -> as_json -> JSON
Some models write values without quotes and types, so that only the schema tells 5 from "5".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any]
Types = frozenset[str]
"""Names of JSON's types, as `type` of a JSON schema has them."""
ALL_TYPES: Types = frozenset({
    "string", "number", "integer", "boolean", "null", "object", "array",
})  # fmt: skip
TEXT: Types = frozenset({"string"})
WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
"""Values that are words, in lower case -> their type. Templates may write them as Python does."""


class Parameters:
    """The parameters of one tool."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._types: dict[str, Types] = {}

    def of(self, name: str) -> Types:
        """The types that a parameter may have; a text where the schema does not know its name."""
        if name not in self._types:
            self._types[name] = self._find(name)
        return self._types[name]

    def _find(self, name: str) -> Types:
        known = self._schema.get("properties")
        if isinstance(known, Mapping) and name in known:
            return types_of(known[name], self._schema)
        others = self._schema.get("additionalProperties")
        return types_of(others, self._schema) if isinstance(others, Mapping) else TEXT


def types_of(schema: object, root: Schema) -> Types:
    """The types that a schema allows, all where it does not say. root: what `$ref` refers to."""
    return _types_of(schema, root, set()) or ALL_TYPES


def _types_of(schema: object, root: Schema, seen: set[str]) -> Types:
    """As types_of; none where that is not known. seen: references, each of which is followed once,
    so that a schema costs no more time than it has characters."""
    match schema:
        case {"type": str(one)}:
            return ALL_TYPES & {one}
        case {"type": [*several]}:
            return ALL_TYPES & {one for one in several if isinstance(one, str)}
        case {"enum": [*values]}:
            return frozenset(map(_type_of, values))
        case {"const": value}:
            return frozenset({_type_of(value)})
        case {"$ref": str(reference)} if reference not in seen:
            seen.add(reference)
            return _types_of(referred(reference, root), root, seen)
        case {"anyOf": [*options]} | {"oneOf": [*options]}:
            each = [_types_of(one, root, seen) for one in options]
            return frozenset().union(*each)
        case {"allOf": [*rules]}:
            each = [_types_of(one, root, seen) or ALL_TYPES for one in rules]
            return ALL_TYPES.intersection(*each)
    return frozenset()


def as_json(text: str, types: Types) -> str:
    """The value that a model wrote as `text`, in JSON.

    What can be read as a value of an allowed type is one, as it is written; anything else is a
    text, whose quotes belong to it.
    """
    value = text.strip()
    word = WORDS.get(value.lower())
    if word in types:
        return "null" if word == "null" else value.lower()
    try:
        kind = _type_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted(text)
    is_whole = kind == "integer" and "number" in types
    is_value = kind != "string" and (kind in types or is_whole)
    return value if is_value else quoted(text)


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
        case None:
            return "null"
    return "object"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def referred(reference: str, root: Schema) -> object:
    """What `#/a/b` means in the root; None where there is nothing, and for other references."""
    start, *steps = reference.split("/")
    found: object = root if start == "#" else None
    for step in steps:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found
