"""Text to ids and back; pieces of a stream join to the whole, whatever the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ConfigError
from model.text import REPLACEMENT, Tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


TEXTS = ["Hello, world", "naïve café", "日本語のテキスト", "🦊🐎 e\u0301", "a\n\n  b\tc", " lead"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_a_stream_joins_to_the_whole(text: str, cuts: list[int]) -> None:
    tokenizer = Tokenizer(TINY) if not _CACHE else _CACHE[0]
    _CACHE[:] = [tokenizer]
    ids = tokenizer.encode(text)
    stream, pieces, start = tokenizer.stream(), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.push(ids[start : start + cut]))
        start += cut
        assert not pieces[-1].endswith(REPLACEMENT) or REPLACEMENT in text
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids)


_CACHE: list[Tokenizer] = []


def test_an_unfinished_character_waits_and_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🦊")
    assert len(ids) > 2, "the fox is one token: take a rarer character"
    stream = tokenizer.stream()
    assert stream.push(ids[:1]) == "x"
    assert stream.push(ids[1:-1]) == ""
    assert REPLACEMENT in stream.finish()
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in ids) == "x🦊"


def test_special_tokens_are_ids_in_prompts_and_nothing_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert len(ids) == len(set(ids)) or ids.count(ids[0]) == 2  # the turn starts twice
    assert "<|im_start|>" not in tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("user")
    assert "Hello" in tokenizer.decode(ids)


def test_a_folder_without_a_tokenizer_says_what_works(tmp_path: Path) -> None:
    assert not Tokenizer.exists(tmp_path)
    with pytest.raises(ConfigError, match="--prompt-ids"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        Tokenizer(tmp_path)
