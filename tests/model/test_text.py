"""Text to ids and back; pieces of a stream join to the whole, whatever the cuts."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.model.config import ConfigError
from outrider.model.text import REPLACEMENT, Tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


TEXTS = ["Hello, world", "naïve café", "日本語のテキスト", "🦊🐎 e\u0301", "a\n\n  b\tc", " lead"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


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


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be loaded"):
        Tokenizer(tmp_path)
