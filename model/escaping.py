"""Special tokens that are written in a conversation, kept apart from those of its chat template.

    messages -> escape -> chat template -> marked text -> split -> pieces: texts, and token ids
A model knows the turns of a conversation by special tokens. One whose name stands in a message is
only text: else whoever writes a message could end it and begin another in anybody's name. `escape`
puts a MARK behind each such name, and the tokens without one are those of the template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

MARK = "\udc00"
"""A lone surrogate: no text that came as UTF-8 holds one."""


class TokenNames:
    """The added tokens of a tokenizer, and how texts are encoded that may hold their names."""

    def __init__(self, tokens: tokenizers.Tokenizer) -> None:
        from tokenizers import Tokenizer

        added = tokens.get_added_tokens_decoder()
        names = [entry.content for entry in added.values()]
        self._encodings = {name: tokens.encode(name, add_special_tokens=False) for name in names}
        self._all = _Names(names)
        self._control = _Names(entry.content for entry in added.values() if entry.special)
        # The same vocabulary and the same steps without any added token; it shares their memory.
        self._plain = Tokenizer(tokens.model)
        if tokens.normalizer is not None:
            self._plain.normalizer = tokens.normalizer
        if tokens.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokens.pre_tokenizer

    def escape_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with a MARK behind each name of a token.

        What the assistant said keeps the tokens that are no control tokens, such as <think>: the
        model wrote them, and templates look for them.
        """
        names = self._control if message.get("role") == "assistant" else self._all
        return names.mark(message)

    def escape(self, value: Any) -> Any:
        """A value of the template with a MARK behind each name of a token in its texts."""
        return self._all.mark(value)

    def encode(self, marked: str) -> tokenizers.Encoding:
        """The tokens of a text that a template has made of escaped values."""
        from tokenizers import Encoding

        pieces = list(self._split(marked))
        texts = [piece for piece in pieces if isinstance(piece, str)]
        # The batched call does not hold the interpreter lock.
        encoded = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        return Encoding.merge([next(encoded) if isinstance(p, str) else p for p in pieces], False)

    def _split(self, marked: str) -> Iterator[str | tokenizers.Encoding]:
        """The texts between the template's tokens, without marks, and those tokens."""
        end = 0
        for start, name in sorted(self._find(marked), key=lambda one: (one[0], -len(one[1]))):
            if start < end:  # within a longer name
                continue
            if start > end:
                yield unmarked(marked[end:start])
            yield self._encodings[name]
            end = start + len(name)
        if end < len(marked):
            yield unmarked(marked[end:])

    def _find(self, marked: str) -> Iterator[tuple[int, str]]:
        """Where names without a MARK behind them begin. One search for all of them would hold the
        interpreter lock for 0.3 s on 4 MiB of "<"."""
        for name in self._encodings:
            start = marked.find(name)
            while start >= 0:
                end = start + len(name)
                if not marked.startswith(MARK, end):
                    yield start, name
                start = marked.find(name, end)


def unmarked(text: str) -> str:
    """A text as its readers should see it."""
    return text.replace(MARK, "")


class _Names:
    """Names to be marked, and the beginnings of each."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._starts = {name[:end] for name in self._names for end in range(1, len(name))}
        self._longest = max(map(len, self._starts), default=0)

    def mark(self, value: Any) -> Any:
        """The value with a MARK behind each name in its texts."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(one) for one in value]
        return value

    def _mark_text(self, text: str) -> str:
        """A name's beginning at the end gets a MARK too: a template may put another text directly
        behind it, with the rest of that name."""
        for name in self._names:
            text = text.replace(name, name + MARK)
        core = text.rstrip()
        tails = (core[-length:] for length in range(1, min(self._longest, len(core)) + 1))
        if any(tail in self._starts for tail in tails):
            return core + MARK + text[len(core) :]
        return text
