"""Text to token ids and back, whole or as it comes.

    Tokenizer.encode -> ids          ids -> Detokenizer.push -> the characters that are complete

A byte-level token may end inside a character: its text waits until the rest has come. A checkpoint
without tokenizer files is usable by token ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from model.config import ConfigError

FILES = ("tokenizer.json", "vocab.json")
REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a model folder, by transformers; nothing is downloaded or executed."""

    def __init__(self, model_dir: str | Path) -> None:
        if not self.exists(model_dir):
            raise ConfigError(
                f"{model_dir}: no tokenizer ({' or '.join(FILES)}). Text prompts need one; token "
                f"ids work without (--prompt-ids, or lists of ids in the Python API)."
            )
        from transformers import AutoTokenizer

        try:
            self._hf = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{model_dir}: the tokenizer cannot be loaded: {error}") from error

    @staticmethod
    def exists(model_dir: str | Path) -> bool:
        """True when the folder holds tokenizer files."""
        return any((Path(model_dir) / name).is_file() for name in FILES)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it count as such."""
        return self._hf.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._hf.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation [{"role": ..., "content": ...}] that asks for a reply.

        Raises ConfigError when the checkpoint has no chat template.
        """
        if not self._hf.chat_template:
            raise ConfigError("this checkpoint's tokenizer has no chat template")
        text = self._hf.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

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
