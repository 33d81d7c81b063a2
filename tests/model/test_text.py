"""Text to ids and back; pieces of a stream join to the whole, whatever the cuts."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import threading
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from outrider.model.config import ConfigError, load_config
from outrider.model.text import MAX_HELD_TOKENS, REPLACEMENT, Tokenizer, TooManyTokensError

TINY = Path(__file__).parents[2] / "examples" / "tiny"
LEAD_OF_THREE = 175
"""Token of the bundled tokenizer: byte 0xEC, which begins a character of three bytes."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


TEXTS = ["Hello, world", "naïve café", "日本語のテキスト", "🦊🐎 e\u0301", "a\n\n  b\tc", " lead"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_what_a_tokenizer_puts_around_a_text_is_added_where_asked(tmp_path: Path) -> None:
    data = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    end = "<|endoftext|>"
    data["post_processor"] = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": end, "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    made = Tokenizer(tmp_path)
    plain = made.encode("a view")
    assert made.encode("a view", add_special_tokens=True) == [0, *plain]
    assert [made.token_name(token) for token in (0, *plain, 10**6)] == [end, "a", "Ġview", None]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_a_stream_joins_to_the_whole(text: str, cuts: list[int]) -> None:
    tokenizer = tiny()
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces) or REPLACEMENT in text


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Pieces of a stream that gets `cuts` tokens at a time, then the rest; finish() is the last."""
    stream, pieces, start = tokenizer.stream(), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.push(ids[start : start + cut]))
        start += cut
    return [*pieces, stream.finish()]


@functools.cache
def tiny() -> Tokenizer:
    return Tokenizer(TINY)


@functools.cache
def tiny_with_added_tokens() -> Tokenizer:
    """The bundled tokenizer with added tokens of every kind: special or not, of the byte-level
    alphabet, outside of it, and partly."""
    rust = RustTokenizer.from_file(str(TINY / "tokenizer.json"))
    plain = ["日本", "Ġx y", "ĠĠ", "a b", "ĠÄé漢", "<think>"]
    rust.add_tokens([AddedToken(text, special=False) for text in plain])
    rust.add_special_tokens(["<|odd|>", "Ċ", "特"])
    return saved(rust)


def saved(rust: RustTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        rust.save(f"{folder}/tokenizer.json")
        return Tokenizer(folder)


BYTES = range(7, 7 + 256)
"""Ids of the bundled tokenizer's tokens of one byte; 7 special ones come before."""
ANY_ID = st.one_of(st.integers(0, 4096 + 20), st.sampled_from(BYTES), st.integers(4090, 4110))


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(ANY_ID, max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_a_stream_of_any_ids_joins_to_the_tokenizers_own_text(
    ids: list[int], cuts: list[int]
) -> None:
    """Bytes that are no character give as many U+FFFD as in the tokenizer's own decoder."""
    tokenizer = tiny_with_added_tokens()
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xC3, 0x41, 0xFF]), max_size=24)
)
def test_at_most_three_bytes_are_held_back(data: list[int]) -> None:
    tokenizer, seen = tiny(), b""
    of_byte = {tokenizer.token_bytes(i): i for i in BYTES}
    stream, text = tokenizer.stream(), ""
    for byte in data:
        seen += bytes([byte])
        text += stream.push([of_byte[bytes([byte])]])
        shown = [n for n in range(4) if seen[: len(seen) - n].decode(errors="replace") == text]
        assert shown, f"{text!r} is too little of {seen!r}"


def test_what_is_no_character_comes_out_at_once_however_long() -> None:
    """3,000 of these tokens gave one piece, after 137 s: the window grew with every token."""
    stream = tiny().stream()
    pieces = [stream.push([LEAD_OF_THREE]) for _ in range(100_000)]
    assert pieces == ["", *[REPLACEMENT] * 99_999]
    assert stream.finish() == REPLACEMENT


def test_bytes_of_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(LEAD_OF_THREE) == b"\xec"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    for text in ("naïve", "日本", "🦊"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    added = tiny_with_added_tokens()
    (id,) = added.encode("日本")
    assert added.token_bytes(id) == "日本".encode()
    assert added.token_bytes(10**6) == b""


@functools.cache
def byte_fallback() -> Tokenizer:
    """In the manner of SentencePiece: ▁ for a space, one token a byte for rare characters."""
    letters = ["▁", *"abcdefghij", "▁a", "▁b", "cd"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {letter: 256 + i for i, letter in enumerate(letters)}
    rust = RustTokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("c", "d")], byte_fallback=True)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    rust.add_special_tokens(["</s>"])
    return saved(rust)


@functools.cache
def word_piece() -> Tokenizer:
    """In the manner of BERT: ## continues a word, spaces before punctuation are cleaned up."""
    words = ["[UNK]", "a", "bc", "##bc", "##d", ".", ",", "!", "n't", "##'s"]
    rust = RustTokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    rust.add_special_tokens(["[SEP]"])
    return saved(rust)


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab cdé日🦊", max_size=30), cuts=st.lists(st.integers(1, 5), max_size=30))
def test_tokenizers_with_byte_fallback_stream_too(text: str, cuts: list[int]) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 11), max_size=30), cuts=st.lists(st.integers(1, 5), max_size=30))
def test_word_piece_tokenizers_stream_too(ids: list[int], cuts: list[int]) -> None:
    """Ids: the words, a special token, and one that the tokenizer does not know."""
    tokenizer = word_piece()
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("token", [0xEC, 256 + 14], ids=["no character", "special"])
def test_other_tokenizers_hold_a_bounded_number_of_tokens(token: int) -> None:
    """Neither bytes that are no character nor tokens without text make the window grow."""
    tokenizer = byte_fallback()
    decoded: list[int] = []

    class Counting(Tokenizer):
        def __init__(self) -> None:
            self.__dict__ |= tokenizer.__dict__

        def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids, special=special)

    stream = Counting().stream()
    for _ in range(500):
        stream.push([token])
    assert max(decoded, default=0) <= 2 * (MAX_HELD_TOKENS + 1)
    assert stream.push([256 + 1]).endswith("a")


def test_an_unfinished_character_waits_and_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🦊")
    assert len(ids) > 2, "the fox is one token: take a rarer character"
    stream = tokenizer.stream()
    assert stream.push(ids[:1]) == "x"
    assert stream.push(ids[1:-1]) == ""
    assert REPLACEMENT in stream.finish()
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in ids) == "x🦊"


def test_ids_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(TINY)
    for text in [*TEXTS, "<|im_start|>user\nHi<|im_end|>"]:
        ids = oracle.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    for conversation in (messages, messages[1:]):
        text = oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(conversation) == tokenizer.encode(text)


def test_a_template_may_refuse_and_may_be_absent(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(messages)
    template = "{% if not x %}{{ raise_exception('x is needed') }}{% endif %}{{ eos_token }}!"
    (tmp_path / "chat_template.jinja").write_text(template)
    config = '{"eos_token": {"content": "<|endoftext|>"}, "add_bos_token": false}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match="x is needed"):
        Tokenizer(tmp_path).apply_chat_template(messages)
    ids = Tokenizer(tmp_path).apply_chat_template(messages, x=1)
    assert ids == Tokenizer(tmp_path).encode("<|endoftext|>!")


def test_special_tokens_are_ids_in_prompts_and_nothing_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert "<|im_start|>" not in tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("user\nHello")


def test_a_folder_without_a_tokenizer_says_what_works(tmp_path: Path) -> None:
    assert not Tokenizer.exists(tmp_path)
    with pytest.raises(ConfigError, match="--prompt-ids"):
        Tokenizer(tmp_path)


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen3.5 splits a text. The bundled tokenizer splits before combining marks, too."""


def bpe_folder(folder: Path) -> Path:
    """The bundled tokenizer in the older form: vocab.json and merges.txt, no tokenizer.json."""
    whole = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    config = json.loads((TINY / "tokenizer_config.json").read_text("utf-8"))
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in whole["model"]["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config["tokenizer_class"] = "Qwen2Tokenizer"
    config["added_tokens_decoder"] = {
        str(token.pop("id")): token for token in whole["added_tokens"]
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    return folder


def test_a_folder_with_vocabulary_and_merges_alone_has_a_tokenizer(tmp_path: Path) -> None:
    rust = RustTokenizer.from_file(str(TINY / "tokenizer.json"))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    right, made = saved(rust), Tokenizer(bpe_folder(tmp_path))
    for text in [*TEXTS, "हिन्दी", "<|im_start|>user\nHi<|im_end|>", "it's 1,234 == \r\n\n  x"]:
        ids = right.encode(text)
        assert made.encode(text) == ids
        assert made.decode(ids) == right.decode(ids)
        assert streamed(made, ids, [1] * len(ids)) == streamed(right, ids, [1] * len(ids))
    assert made.min_tokens("x" * 1000) == right.min_tokens("x" * 1000) > 0
    said = [{"role": "user", "content": "Hello"}]
    assert made.apply_chat_template(said) == tiny().apply_chat_template(said)
    assert load_config(tmp_path).eos_ids == (0, 2)


def test_no_code_of_a_folder_makes_its_tokenizer(tmp_path: Path) -> None:
    folder, path = bpe_folder(tmp_path), tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    path.write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\nclass Own: pass\n"
    )
    with contextlib.suppress(ConfigError):
        Tokenizer(folder)
    assert not (tmp_path / "executed").exists()


def test_vocabulary_and_merges_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (bpe_folder(tmp_path) / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match=r"vocab\.json: cannot be loaded"):
        Tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"not both of vocab\.json and merges\.txt"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be loaded"):
        Tokenizer(tmp_path)


WRITTEN = st.lists(
    st.sampled_from(
        ["<|im_end|>", "e\u0301", "\u1161", "\u1100", "\u11a8", "=" * 16, " " * 19, "a"]
    )
    | st.characters(codec="utf-8"),
    max_size=40,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=WRITTEN | st.text(max_size=200))
def test_ids_are_those_of_the_call_that_holds_the_lock(text: str) -> None:
    """And no text has fewer tokens than is said without encoding it."""
    ids = tiny().encode(text)
    assert ids == tiny()._tokens.encode(text, add_special_tokens=False).ids
    assert tiny().min_tokens(text) <= len(ids)
    assert tiny_with_added_tokens().min_tokens(text) <= len(tiny_with_added_tokens().encode(text))


def test_the_least_number_of_tokens_is_near_the_truth_for_long_ones() -> None:
    spaces = " " * 19 * 500
    assert tiny().min_tokens(spaces) == 500
    assert 500 <= len(tiny().encode(spaces)) < 700
    decomposed = max(map(chr, range(0x110000)), key=lambda c: len(unicodedata.normalize("NFD", c)))
    assert len(unicodedata.normalize("NFD", decomposed)) == 4  # what min_tokens reckons with


def test_nothing_is_said_of_tokenizers_that_may_drop_text(tokenizer: Tokenizer) -> None:
    def changed(**parts: Any) -> Tokenizer:
        rust = RustTokenizer.from_file(str(TINY / "tokenizer.json"))
        for name, part in parts.items():
            setattr(rust, name, part)
        return saved(rust)

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    removing = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level])
    for other in (
        byte_fallback(),
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        changed(pre_tokenizer=removing),
    ):
        assert other.min_tokens("a" * 10_000) == 0
    assert changed(normalizer=None, pre_tokenizer=byte_level).min_tokens("a" * 10_000) > 0
    swallowing = RustTokenizer.from_file(str(TINY / "tokenizer.json"))
    swallowing.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert saved(swallowing).min_tokens("a" * 10_000) == 0


def test_a_file_that_asks_for_truncation_or_padding_is_encoded_whole() -> None:
    rust = RustTokenizer.from_file(str(TINY / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=50)
    text = "more than three tokens in all"
    assert saved(rust).encode(text) == tiny().encode(text)


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """In one call that held the interpreter lock the longest pause was the whole time."""
    text = (TINY / "README.md").read_text("utf-8") * 60
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    started = before = time.perf_counter()
    longest = 0.0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    assert longest < (before - started) / 2


def test_too_many_tokens_are_counted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    assert tokenizer.encode("one two three", len(ids)) == ids
    with pytest.raises(TooManyTokensError, match=f"{len(ids)} tokens: at most 2"):
        tokenizer.encode("one two three", 2)
