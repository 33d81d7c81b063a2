"""The fields of a body that hold an answer to a grammar, in OpenAI's form and in vLLM's.

    response_format, structured_outputs, guided_* -> Structured.grammar -> Sampling.grammar
A chat puts its thought before it, and calls beside it (tools.py).
Here their form is checked. Whether a grammar can be compiled, driver/grammars.py finds out.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator

from outrider.actors.http.rules import rule
from outrider.model.step import Grammar

Kind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
KINDS: dict[str, Kind] = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
}  # fmt: skip
"""By vLLM's name; json_object is another, which takes true."""


def _grammar(value: Any, kind: Kind) -> Grammar:
    """What a field of this kind says."""
    match kind, value:
        case "json_schema" | "regex" | "grammar", str():
            text = value
        case ("json_schema", dict()) | ("choice", [str(), *_]):
            text = json.dumps(value)
        case _:
            forms = {"json_schema": "a schema, as an object or a text", "choice": "a list of texts"}
            raise rule(f"must be {forms.get(kind, 'a text')}")
    try:
        return Grammar(kind, text)
    except ValueError as error:
        raise rule(str(error).removeprefix("sampling.grammar: ")) from None


def _response_format(value: Any) -> Grammar | None:
    said = value if isinstance(value, dict) else {}
    match {name: one for name, one in said.items() if one is not None}:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}, **rest}:
            if not rest:
                return _grammar(schema, "json_schema")
    raise rule(
        'must be {"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"schema": {...}}}'
    )


def _structured_outputs(value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise rule("must be an object")
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    if unknown := given.keys() - KINDS.keys() - {"json_object"}:
        raise rule(f"{min(unknown)}: not supported by this server")
    if len(given) > 1:
        raise rule(f"{' and '.join(sorted(given))}: give one")
    for name, one in given.items():
        if name != "json_object":
            return _grammar(one, KINDS[name])
        if one is not True:
            raise rule("json_object must be true or false")
        return ANY_OBJECT
    return None


ResponseFormat = Annotated[Any, BeforeValidator(_response_format)]
StructuredOutputs = Annotated[Any, BeforeValidator(_structured_outputs)]
GuidedJson = Annotated[Any, BeforeValidator(partial(_grammar, kind="json_schema"))]
GuidedRegex = Annotated[Any, BeforeValidator(partial(_grammar, kind="regex"))]
GuidedChoice = Annotated[Any, BeforeValidator(partial(_grammar, kind="choice"))]
GuidedGrammar = Annotated[Any, BeforeValidator(partial(_grammar, kind="grammar"))]


class Structured(pydantic.BaseModel):
    """Each field holds a Grammar, or None."""

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None

    @property
    def grammar_fields(self) -> list[str]:
        """The names of those that say something."""
        return [name for name in Structured.model_fields if getattr(self, name) is not None]

    @property
    def grammar(self) -> Grammar | None:
        given = (getattr(self, name) for name in Structured.model_fields)
        return next((one for one in given if one is not None), None)

    def grammar_conflict(self, others: dict[str, bool]) -> tuple[str, str] | None:
        """A field that does not go together with another, and why.

        others: by name, whether a field is given that says where an answer ends or what it holds.
        """
        names = self.grammar_fields
        if len(names) > 1:
            why = "each says what the answer must match; give one"
            return names[1], f"{' and '.join(names)}: {why}"
        for name, given in others.items():
            if names and given:
                return name, f"{name}: not together with {names[0]}, which says what answers are"
        return None
