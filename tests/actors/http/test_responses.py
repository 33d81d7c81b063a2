"""Answers in OpenAI's form: log probabilities by token, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.actors.driver.messages import Chunk, Completion, RequestStats
from outrider.actors.http.bodies import CompletionBody, Settings
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.responses import ResponseWriter, usage_of
from outrider.model.text import Tokenizer
from tests.test_end_to_end import TINY

LEAD_OF_THREE = 175
"""Token of the bundled tokenizer: byte 0xEC, which begins a character of three bytes."""
BYTES = range(7, 7 + 256)
"""Ids of its tokens of one byte; 7 special ones come before."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def writer(tokenizer: Tokenizer | None, *, chat: bool = False, **fields: Any) -> ResponseWriter:
    if chat:
        said = [{"role": "user", "content": "a"}]
        body: Settings = parse(ChatBody, json.dumps({"messages": said, **fields}).encode())
    else:
        body = parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())
    return ResponseWriter(body=body, model="tiny", tokenizer=tokenizer)


def answer_of(rows: list[list[tuple[int, float]]], text: str = "") -> Completion:
    return Completion(
        prompt_ids=[1], token_ids=[row[0][0] for row in rows], text=text, logprobs=rows,
        finish_reason="length", seed=0, stats=RequestStats(),
    )  # fmt: skip


def logprobs_of(writer: ResponseWriter, answer: Completion) -> dict[str, Any]:
    return json.loads(writer.whole([answer], usage_of(1, 1, [])))["choices"][0]["logprobs"]


def test_a_part_of_a_character_is_told_as_bytes(tokenizer: Tokenizer) -> None:
    rows = [[(LEAD_OF_THREE, -0.5), (LEAD_OF_THREE, -0.5), (2, -1.0)]]
    (entry,) = logprobs_of(writer(tokenizer, chat=True, logprobs=True), answer_of(rows))["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\\xec", [236], -0.5)
    assert entry["top_logprobs"][1]["token"] == "<|im_end|>"
    assert entry["top_logprobs"][1]["bytes"] == list(b"<|im_end|>")
    told = logprobs_of(writer(tokenizer, logprobs=2), answer_of(rows))
    assert told["tokens"] == ["bytes:\\xec"]
    assert told["top_logprobs"] == [{"bytes:\\xec": -0.5, "<|im_end|>": -1.0}]


def test_so_many_entries_come_as_were_asked_for(tokenizer: Tokenizer) -> None:
    """All of these read U+FFFD, and a completion held one entry of twenty."""
    likely = [(LEAD_OF_THREE + i, -float(i)) for i in range(20)]
    unknown = [(10_000 + i, -float(i)) for i in range(20)]
    for tokens, some in ((likely, tokenizer), (unknown, tokenizer), (likely, None)):
        rows = [[tokens[0], *tokens]]
        (by_name,) = logprobs_of(writer(some, logprobs=20), answer_of(rows))["top_logprobs"]
        assert sorted(by_name.values(), reverse=True) == [value for _, value in tokens]
        (entry,) = logprobs_of(writer(some, chat=True, logprobs=True), answer_of(rows))["content"]
        assert len({top["token"] for top in entry["top_logprobs"]}) == 20
    twins = [[(5, -1.0), (5, -1.0), (5, -2.0)]]
    assert len(logprobs_of(writer(tokenizer, logprobs=2), answer_of(twins))["top_logprobs"][0]) == 2


def test_a_token_that_is_none_of_the_likeliest_is_told_beside_them(tokenizer: Tokenizer) -> None:
    """OpenAI's completions hold it in any case, so that logprobs 0 has one entry."""
    row = [(40, -3.0), (41, -0.5), (42, -1.0)]
    (by_name,) = logprobs_of(writer(tokenizer, logprobs=2), answer_of([row]))["top_logprobs"]
    assert sorted(by_name.values()) == [-3.0, -1.0, -0.5]
    (alone,) = logprobs_of(writer(tokenizer, logprobs=0), answer_of([row[:1]]))["top_logprobs"]
    assert list(alone.values()) == [-3.0]


def test_text_offsets_point_into_the_text(tokenizer: Tokenizer) -> None:
    text = "na\u00efve \uc5ec \U0001f98a!"
    ids = [7 + list(map(tokenizer.token_bytes, BYTES)).index(bytes([b])) for b in text.encode()]
    ids.insert(1, 2)  # a special token, which is no part of the text
    told = logprobs_of(writer(tokenizer, logprobs=2), answer_of([[(i, 0.0)] for i in ids], text))
    stream, seen = tokenizer.stream(), ""
    for token, offset in zip(ids, told["text_offset"], strict=True):
        assert offset - len(seen) in (0, 1)  # 1 within a character that began before
        seen += stream.push([token])
    assert seen == text


def stream(writer: ResponseWriter, *chunks: Chunk) -> list[dict[str, Any]]:
    events = [event for chunk in chunks for event in writer.events(0, chunk, [1, 2])]
    return [event["choices"][0] for event in events]


def test_a_chat_stream_ends_with_an_empty_delta(tokenizer: Tokenizer) -> None:
    chunks = (
        Chunk(token_ids=[5], text="Hel"),
        Chunk(token_ids=[6], text="lo", finish_reason="stop", logprobs=[[(6, -1.0)]]),
    )
    got = stream(writer(tokenizer, chat=True, logprobs=True), *chunks)
    assert [choice["delta"] for choice in got] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in got] == [None, None, None, "stop"]
    assert [bool(choice["logprobs"]) for choice in got] == [False, False, True, False]
    assert [choice["index"] for choice in got] == [0] * 4


def test_nothing_is_sent_while_there_is_nothing_to_say(tokenizer: Tokenizer) -> None:
    quiet = writer(tokenizer, chat=True)
    chunks = [Chunk(token_ids=[LEAD_OF_THREE], text="")] * 3
    assert [choice["delta"] for choice in stream(quiet, *chunks)] == [
        {"role": "assistant", "content": ""}
    ]
    assert stream(writer(tokenizer), *chunks) == []
    ids = writer(tokenizer, chat=True, return_token_ids=True)
    got = stream(ids, *chunks)
    assert [choice.get("token_ids") for choice in got] == [None, *[[LEAD_OF_THREE]] * 3]
    assert got[0]["prompt_token_ids"] == [1, 2]


def test_a_completion_stream_says_text_and_end_together(tokenizer: Tokenizer) -> None:
    last = Chunk(token_ids=[6], text="lo", finish_reason="length")
    (choice,) = stream(writer(tokenizer), last)
    assert (choice["text"], choice["finish_reason"]) == ("lo", "length")
