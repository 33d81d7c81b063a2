"""Conversations to text, by the chat template of a model's folder.

    chat_template.jinja, else tokenizer_config.json -> ChatTemplate -> render -> text

A template is a program that came with the weights: it runs in jinja2's sandbox and sees nothing but
the conversation. It finds there what transformers gives to templates (a test compares the two), so
that templates which were written for transformers run here. This file is imported when the first
conversation comes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.model.config import ConfigError
from outrider.model.escaping import MARK

TROUBLE = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a template may raise, at no fault of ours."""


class GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the model has said; here it changes nothing."""

    tags = {"generation"}  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of a folder. ConfigError where there is none, and where it is malformed."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        """source: a template to be taken instead of the folder's."""
        self._folder = folder
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file = folder / "chat_template.jinja"
        if source is None:
            source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(f"{folder}: this checkpoint has no chat template")
        self.source = source
        self._special_tokens = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, (str, dict))
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        values: Mapping[str, object],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, up to where the reply begins.

        add_generation_prompt: whether a reply is begun. continue_final_message: whether the text
        ends with that of the last message, for more of it, and nothing that closes it follows.
        values: variables of the template beside `messages`, `tools` and `documents` (there are
        none) and the special tokens. Raises ConfigError with what the template objects to.
        """
        nothing = {"tools": None, "documents": None}
        given = {**nothing, **self._special_tokens, **values, "messages": list(messages)}
        try:
            text = self._template.render(given, add_generation_prompt=add_generation_prompt)
        except TROUBLE as error:
            raise ConfigError(f"{self._folder}: the chat template refuses: {error}") from error
        if not continue_final_message:
            return text
        open_text = _up_to(text, str(messages[-1]["content"]))
        if open_text is None:
            why = "the last message cannot be continued: the chat template writes it otherwise"
            raise ConfigError(f"{self._folder}: {why}, or it is empty")
        return open_text


def _up_to(text: str, message: str) -> str | None:
    """`text` up to the end of the last place where it holds `message`; None: nowhere.

    Templates may strip the white space around a message. What of it stands behind is kept.
    """
    core = message.strip()
    start = text.rfind(core) if core else -1
    if start < 0:
        return None
    end, space = start + len(core), message[len(message.rstrip()) :]
    return text[: end + len(space)] if text.startswith(space, end) else text[:end]


def _refuse(message: str) -> NoReturn:
    """The function `raise_exception` of templates, which refuse a conversation with it."""
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    """The function `strftime_now` of templates."""
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of templates; jinja2's own writes < and & for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    kept = (one if one.isascii() or one == MARK else json.dumps(one)[1:-1] for one in text)
    return "".join(kept)
