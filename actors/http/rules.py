"""What is wrong with a value of a body, as pydantic's validators raise it and parsing.py tells it.

    validator -> rule(...), unsupported(...) -> ValidationError -> ApiError 400
The texts follow the name of the field, which pydantic knows.
"""

from __future__ import annotations

from pydantic_core import PydanticCustomError


def rule(text: str) -> PydanticCustomError:
    """The value breaks this rule."""
    return PydanticCustomError("rule", "{text}", {"text": text})


def unsupported(text: str) -> PydanticCustomError:
    """The value asks for something that this server does not do."""
    return PydanticCustomError("unsupported", "{text}", {"text": text})
