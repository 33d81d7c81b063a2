"""The bytes of a body become one of bodies.py, or an error that says what is wrong with them.

    bytes -> JSON -> pydantic's checks -> limits -> CompletionBody or ChatBody | ApiError 400
A field that is not known is refused by name, and so are all others with it, unless
serve.unknown_fields has them dropped.
"""

from __future__ import annotations

import codecs
import difflib
import json
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails, from_json

from outrider.actors.http.bodies import ApiError, Body, BodyLimits
from outrider.actors.http.fields import neutral_values

BodyT = TypeVar("BodyT", bound=Body)

MAX_NAME_CHARS = 64
"""Longest field name that an error repeats in full."""
MAX_NAMED_FIELDS = 20
"""Most fields that one error names."""


def parse(kind: type[BodyT], data: bytes, limits: BodyLimits | None = None) -> BodyT:
    """The body, or an ApiError 400.

    The error names all fields that are not supported, or else the first that is wrong and its rule.
    """
    try:
        given = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as problem:
        raise ApiError(400, f"the body: Invalid JSON: {problem}") from None
    body = validated(kind, given, limits)
    body.check(limits)
    return body


def validated(kind: type[BodyT], given: Any, limits: BodyLimits | None) -> BodyT:
    """The body of what JSON holds, not checked against the limits yet; ApiError 400."""
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as problem:
        problems = problem.errors(include_url=False)
        unknown = [one for one in problems if _is_unknown(one)]
        if limits is None or not limits.ignore_unknown or not unknown:
            raise _refusal(kind, problems) from None
        return _without(kind, given, unknown)


def _is_unknown(problem: ErrorDetails) -> bool:
    """Whether it is a field that nobody here has heard of."""
    return problem["type"] == "extra_forbidden" and not neutral_values(str(problem["loc"][-1]))


def _without(kind: type[BodyT], given: Any, unknown: Sequence[ErrorDetails]) -> BodyT:
    """The body without its unknown fields; ApiError where something else is wrong."""
    for problem in unknown:
        *path, name = problem["loc"]
        holder = given
        for step in path:
            holder = holder[step]
        del holder[name]
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as problem:
        raise _refusal(kind, problem.errors(include_url=False)) from None


def _refusal(kind: type[Body], problems: Sequence[ErrorDetails]) -> ApiError:
    """problems: pydantic's description of what is wrong; its `loc` holds names and indices."""
    foreign = [one for one in problems if one["type"] in ("extra_forbidden", "unsupported")]
    if foreign:
        why = "; ".join(_why_unsupported(kind, one) for one in foreign[:MAX_NAMED_FIELDS])
        more = len(foreign) - MAX_NAMED_FIELDS
        why += f"; and {more} more" if more > 0 else ""
        return ApiError(400, why, param=_name_of(foreign[0]), code="unsupported")
    problem = problems[0]
    name = _name_of(problem)
    if not problem["loc"]:
        return ApiError(400, f"the body: {problem['msg']}")
    if problem["type"] in ("rule", "missing"):
        return ApiError(400, f"{name}: {problem['msg']}", param=name)
    value = reprlib.repr(problem["input"])
    return ApiError(400, f"{name} = {value}: {problem['msg']}", param=name)


def _why_unsupported(kind: type[Body], problem: ErrorDetails) -> str:
    name = _name_of(problem)
    if problem["type"] == "unsupported":
        return f"{name}: {problem['msg']}"
    if neutral := neutral_values(str(problem["loc"][-1])):
        allowed = " or ".join(json.dumps(value) for value in neutral)
        value = reprlib.repr(problem["input"])
        return f"{name} = {value}: not supported by this server; only {allowed} is accepted"
    known = kind.model_fields if len(problem["loc"]) == 1 else ()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{name or repr(name)}: not supported by this server{hint}"


def _name_of(problem: ErrorDetails) -> str:
    """The field that a problem is about; names of nested ones are joined by dots."""
    return ".".join(_shortened(str(part)) for part in problem["loc"])


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."
