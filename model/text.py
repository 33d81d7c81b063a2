"""Text to token ids and back, whole or as it comes.

    Tokenizer.encode -> ids          ids -> Detokenizer.push -> the characters that are complete

A byte-level token may end inside a character: its text waits until the rest has come. A checkpoint
without tokenizer files is usable by token ids alone. Only `tokenizers` and jinja2 are imported:
transformers would add seconds and torch to every start of a driver.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from outrider.model.config import ConfigError

FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a model folder. Nothing is downloaded, and no code of it is executed."""

    def __init__(self, model_dir: str | Path) -> None:
        self._folder = Path(model_dir)
        if not self.exists(model_dir):
            raise ConfigError(
                f"{model_dir}: no {FILE}. Text prompts need one; token ids work without "
                f"(--prompt-ids, or lists of ids in the Python API)."
            )
        import tokenizers

        try:
            text = (self._folder / FILE).read_text(encoding="utf-8")
            self._tokens = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"{self._folder / FILE}: cannot be loaded: {error}") from error

    @staticmethod
    def exists(model_dir: str | Path) -> bool:
        """True when the folder holds a tokenizer."""
        return (Path(model_dir) / FILE).is_file()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it count as such."""
        return self._tokens.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._tokens.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """Text of one token, special ones too; U+FFFD where it is part of a character."""
        return self._tokens.decode([token], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], /, **values: object
    ) -> list[int]:
        """Ids of a conversation [{"role": ..., "content": ...}] that asks for a reply.

        values are handed to the template (`enable_thinking=False`, for example). Raises
        ConfigError when the checkpoint has no chat template or the template refuses.
        """
        import jinja2

        try:
            template, names = self._template
            said = {**names, **values, "messages": list(messages), "add_generation_prompt": True}
            text = template.render(said)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._folder}: the chat template refuses: {error}") from error
        return self.encode(text)

    @functools.cached_property
    def _template(self) -> tuple[Any, dict[str, Any]]:
        """The compiled chat template, and the special tokens it may name."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self._folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file = self._folder / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(f"{self._folder}: this checkpoint has no chat template")
        names = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, (str, dict))
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(source), names

    def stream(self) -> Detokenizer:
        """A decoder for one request's tokens."""
        return Detokenizer(self)


class Detokenizer:
    """Turns tokens into text as they come; the pieces joined equal decode() of all.

    Decodes a window: the last piece's tokens again, with the new ones behind them, since a token's
    text may depend on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start, self._done = 0, 0

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; "" while a character is unfinished."""
        self._ids.extend(ids)
        text = self._pending()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        text = self._pending()
        self._start = self._done = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


def _refuse(message: str) -> NoReturn:
    """What a template calls to say that a conversation does not fit it."""
    import jinja2

    raise jinja2.TemplateError(message)
