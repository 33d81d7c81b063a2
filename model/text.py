"""Text to token ids, and token ids back to text, all at once or while they arrive.

    text -> Tokenizer.encode -> ids        ids -> Tokenizer.stream().push -> complete characters

A token may end inside a character. A detokenizer holds back the bytes of such a character, at most
three, until the others arrive or cannot arrive any more. A checkpoint without a tokenizer can be
used with token ids alone. This file imports `tokenizers`; transformers, which would add seconds and
torch to every start of a driver, makes a tokenizer only where its folder has no tokenizer.json.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.model.config import ConfigError
from outrider.model.escaping import MARK, TokenNames
from outrider.model.reply_form import ReplyForm, form_of

if TYPE_CHECKING:
    from outrider.model.chat import ChatTemplate

FILE = "tokenizer.json"
BPE_FILES = {"vocab_file": "vocab.json", "merges_file": "merges.txt"}
"""What a tokenizer without FILE is made from, by transformers' names."""
REPLACEMENT = "\ufffd"
"""What bytes that are no character are decoded to."""
LOSSLESS_STEPS = ("NFC", "ByteLevel", "Split", "Digits")
"""Steps of a tokenizer before its model that drop no part of a text (Split unless it removes)."""
MAX_HELD_TOKENS = 3
"""Tokens that WindowDetokenizer holds back: a character of UTF-8 has at most three more bytes."""


class TooManyTokensError(ValueError):
    """A text has more tokens than its caller can use."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens: at most {max_tokens} fit")
        self.num_tokens = num_tokens


class Tokenizer:
    """The tokenizer of a model folder. Nothing is downloaded, and no code of it is executed."""

    def __init__(self, model_dir: str | Path, *, special_in_messages: bool = False) -> None:
        """special_in_messages: whether the name of a special token in a message of a conversation
        is that token; else it is plain text there."""
        self._folder = Path(model_dir)
        self._special_in_messages = special_in_messages
        if not self.exists(model_dir):
            raise ConfigError(
                f"{model_dir}: no {FILE}, and not both of vocab.json and merges.txt. Text prompts "
                f"need them; token ids work without (--prompt-ids, or lists of ids in the Python "
                f"API). AutoTokenizer of transformers makes a {FILE} of most other tokenizers."
            )
        import tokenizers

        file = self._folder / FILE
        try:
            if file.is_file():
                self._tokens = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
            else:
                file = self._folder / BPE_FILES["vocab_file"]
                self._tokens = _made_by_transformers(self._folder)
        except Exception as error:  # tokenizers raises bare Exception, transformers many kinds
            raise ConfigError(f"{file}: cannot be loaded: {error}") from error
        self._tokens.no_truncation()  # a file may ask for either; prompts are encoded as they are
        self._tokens.no_padding()
        added = self._tokens.get_added_tokens_decoder()
        self._special_ids = {token for token, entry in added.items() if entry.special}
        self._is_byte_level = isinstance(self._tokens.decoder, tokenizers.decoders.ByteLevel)
        self._is_bpe = isinstance(self._tokens.model, tokenizers.models.BPE)
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def exists(model_dir: str | Path) -> bool:
        """True when the folder holds a tokenizer.json, or else vocab.json and merges.txt."""
        folder = Path(model_dir)
        return (folder / FILE).is_file() or all((folder / f).is_file() for f in BPE_FILES.values())

    def encode(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Ids of `text`; a special token that is written in it becomes its one id, unless a mark of
        escaping.py says that it is plain text.

        In a thread other threads run meanwhile. TooManyTokensError beyond max_tokens.
        add_special_tokens: with those that the tokenizer puts around a text, if it has any.
        """
        if MARK in text:
            encoding = self._token_names.encode(text)
            encoding = self._tokens.post_process(encoding, None, add_special_tokens)
        else:
            # `encode` of the library holds the interpreter lock, the batched call does not.
            (encoding,) = self._tokens.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding), max_tokens)  # the ids alone would take long
        return encoding.ids

    def to_json(self) -> str:
        """All of it in the form of a tokenizer.json."""
        return self._tokens.to_str()

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least; 0 where nothing is known of the tokenizer.

        Takes no time, so that a text that is far too long need not be encoded.
        """
        if self._max_token_chars is None:
            return 0
        # NFC composes at most four characters into one, and changes no ASCII text.
        composed = 1 if text.isascii() else 4
        return -(-len(text) // (self._max_token_chars * composed))

    @functools.cached_property
    def _max_token_chars(self) -> int | None:
        """Characters of normalised text that one token stands for, at most; None: unknown.

        Known where nothing of a text can be lost: byte-level BPE with a token for each byte, whose
        normaliser composes characters and whose other steps only split.
        """
        vocabulary = self._tokens.get_vocab(with_added_tokens=True)
        added = self._tokens.get_added_tokens_decoder().values()
        steps = [_settings(self._tokens.pre_tokenizer), _settings(self._tokens.normalizer)]
        steps = [inner for step in steps for inner in step.get("pretokenizers", [step]) if inner]
        keeps_text = (
            self._is_byte_level
            and self._is_bpe
            and _byte_alphabet().keys() <= vocabulary.keys()
            and not any(token.lstrip or token.rstrip for token in added)
            and all(step["type"] in LOSSLESS_STEPS for step in steps)
            and all(step.get("behavior") != "Removed" for step in steps)
        )
        return max(map(len, vocabulary)) if keeps_text else None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`, without special tokens or with them."""
        return self._tokens.decode(list(ids), skip_special_tokens=not special)

    def token_name(self, token: int) -> str | None:
        """The token as the vocabulary writes it: `Ġa` for " a" where bytes have letters of their
        own. None for an unknown id."""
        return self._tokens.id_to_token(token)

    def token_text(self, token: int) -> str:
        """Text of one token, special tokens included; U+FFFD for a part of a character."""
        return self._tokens.decode([token], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], /, **values: Any
    ) -> list[int]:
        """Ids of a conversation, as `render_chat` writes it."""
        return self.encode(self.render_chat(messages, **values))

    def render_chat(
        self,
        messages: Sequence[dict[str, str]],
        /,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: object,
    ) -> str:
        """Text of a conversation [{"role": ..., "content": ...}], up to where the reply begins.

        Marks stand behind the names of special tokens in messages and values, so that `encode`
        takes those for text (escaping.py), unless special_in_messages is set.
        chat_template replaces the checkpoint's; the two flags are those of ChatTemplate.render.
        values are variables of the template (`enable_thinking=False`, for example). Raises
        ConfigError when the checkpoint has no chat template or the template raises an error.
        """
        if not self._special_in_messages:
            messages = [self._token_names.escape_message(message) for message in messages]
            values = {name: self._token_names.escape(value) for name, value in values.items()}
        return self._template(chat_template).render(
            messages,
            values,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def reply_form(
        self, prompt: str, *, continued: str | None = None, chat_template: str | None = None
    ) -> ReplyForm:
        """The form of the reply to a prompt that render_chat has written.

        continued: with continue_final_message, the last message. ConfigError as of render_chat.
        """
        return form_of(self._template(chat_template).source, prompt, continued)

    def _template(self, source: str | None) -> ChatTemplate:
        """The checkpoint's, or what stands in its place."""
        template = self._chat_template
        return template if source is None else type(template)(self._folder, source)

    @functools.cached_property
    def _token_names(self) -> TokenNames:
        return TokenNames(self._tokens)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        from outrider.model.chat import ChatTemplate

        return ChatTemplate(self._folder)

    def shown(self, ids: Sequence[int], *, special: bool = False) -> list[int]:
        """The ids that decode() makes text of: not unknown, and special ones only where asked."""
        text_of, hidden = self._tokens.id_to_token, () if special else self._special_ids
        return [id for id in ids if id not in hidden and text_of(id) is not None]

    def num_characters(self, token: int, *, special: bool = False) -> int:
        """Characters of a text that begin in this token. special: special tokens have text."""
        if not self.shown([token], special=special):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token))

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for, special tokens included; b"" for an unknown id.

        Of a byte-level tokenizer these may be a part of a character.
        """
        if token not in self._bytes:
            alphabet, text = _byte_alphabet(), self._tokens.id_to_token(token) or ""
            if not self._is_byte_level:
                self._bytes[token] = self.token_text(token).encode()
            elif alphabet.keys() >= set(text):
                self._bytes[token] = bytes(alphabet[character] for character in text)
            else:  # an added token, which holds plain text
                self._bytes[token] = text.encode()
        return self._bytes[token]

    def stream(self, *, special: bool = False) -> ByteLevelDetokenizer | WindowDetokenizer:
        """A detokenizer for the tokens of one request. special: special tokens have text too."""
        kind = ByteLevelDetokenizer if self._is_byte_level else WindowDetokenizer
        return kind(self, special=special)


class ByteLevelDetokenizer:
    """Turns the tokens of a byte-level tokenizer into text while they arrive.

    The pieces joined equal Tokenizer.decode of all tokens. Bytes that can no longer become a
    character come out as U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; "" while a character is unfinished."""
        shown = self._tokenizer.shown(ids, special=self._special)
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, shown)))

    def finish(self) -> str:
        """The text still held back: an unfinished character as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Turns the tokens of any other tokenizer into text while they arrive.

    The text of a token may depend on the token before it. So the tokens of the last piece are
    decoded again together with those that follow, and what exceeds the last piece is new. Text that
    ends in U+FFFD is held back for at most MAX_HELD_TOKENS tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._last: list[int] = []
        """Tokens of the last piece."""
        self._held: list[int] = []
        """Tokens after it, whose text has not come out."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; "" while a character may be unfinished."""
        shown = self._tokenizer.shown(ids, special=self._special)
        return "".join(map(self._push_one, shown))

    def finish(self) -> str:
        """The text still held back: an unfinished character as U+FFFD."""
        text = self._held_text()
        self._last, self._held = self._held, []
        return text

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        text = self._held_text()
        if text.endswith(REPLACEMENT) and len(self._held) <= MAX_HELD_TOKENS:
            return ""
        self._last, self._held = self._held, []
        return text

    def _held_text(self) -> str:
        last_text = self._tokenizer.decode(self._last, special=self._special)
        text = self._tokenizer.decode(self._last + self._held, special=self._special)
        return text[len(last_text) :]


def _made_by_transformers(folder: Path) -> Any:
    """The tokenizer of vocab.json and merges.txt. No code of the folder is executed.

    How a text is split before its bytes are merged stands in neither file: transformers knows it of
    each type of model. The files are named, because its class for Qwen3.5 does not look for them
    and has an empty vocabulary then.
    """
    from transformers import AutoTokenizer

    files = {name: str(folder / file) for name, file in BPE_FILES.items()}
    made = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, **files
    )
    return made.backend_tokenizer


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte -> that byte.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, are written as
    the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _settings(step: Any) -> dict[str, Any]:
    """What tokenizer.json says of a step; empty where there is none."""
    return {} if step is None else json.loads(step.__getstate__())
