"""`return_draft_info`: a stream tells of each token whether it was a draft or the target's own.

What is right is what the ranks told the driver of each step. `Counting` ranks keep a known number
of drafts, from none to all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.actors.driver.driver import Driver
from outrider.model.text import Tokenizer
from tests.actors.http.local_server import body, chat, events, run, serving
from tests.actors.http.scripted import saying
from tests.templates import IN_TAGS, folder_with
from tests.test_end_to_end import TINY

PARTS = ("reasoning_content", "content")
LONG: dict[str, Any] = {"max_model_len": 300, "num_pages": 120}


def told(driver: Driver, index: int = -1) -> list[tuple[int, str, int | None, int | None]]:
    """What the ranks said of the tokens of a choice: id, source, and with the last token of an
    iteration the drafts that were made and accepted. index: among all choices so far."""
    ranks: Any = driver.ranks
    numbers = sorted({one.request for event in ranks.events for one in event.progress})
    found = []
    for event in ranks.events:
        for step in event.progress:
            if step.request != numbers[index]:
                continue
            kinds = ["draft"] * step.accepted + ["target"]
            rows = [(token, kind, None, None) for token, kind in zip(step.tokens, kinds)]
            if step.verified:
                kept = min(step.accepted, len(step.tokens))
                rows[-1] = (*rows[-1][:2], step.drafted, kept)
            found += rows
    return found


def shown(choices: list[dict[str, Any]]) -> list[tuple[int, str, int | None, int | None]]:
    """The same as the events of a stream tell it."""
    found = []
    for choice in choices:
        if not choice.get("token_ids"):
            assert "draft_info" not in choice
            continue
        info = choice["draft_info"]
        rows = [(token, info["source"], None, None) for token in choice["token_ids"]]
        rows[-1] = (*rows[-1][:2], info["drafted"], info["accepted"])
        found += rows
    return found


async def choices_of(client: Any, path: str, **what: Any) -> tuple[list[Any], dict[str, Any]]:
    got = await events(client, path, **what, stream_options={"include_usage": True})
    assert got.pop() == "[DONE]"
    usage = got.pop()["usage"]
    return [choice for event in got for choice in event["choices"]], usage


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 90, 91, 92, 93])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_token_is_named_a_draft_or_the_targets_own(path: str, max_tokens: int) -> None:
    async def work() -> None:
        tokenizer = Tokenizer(TINY)
        async with serving(**LONG) as (client, driver, _):
            make = chat if path.endswith("chat/completions") else body
            what = make(max_tokens=max_tokens, return_token_ids=True)
            choices, usage = await choices_of(client, path, **what, return_draft_info=True)
            rows = shown(choices)
            assert rows == told(driver)
            assert len(rows) == max_tokens
            if max_tokens > 5:
                assert {row[1] for row in rows} == {"draft", "target"}
            ends = [row for row in rows if row[2] is not None]
            counts = usage["speculation"]
            assert counts["iterations"] == len(ends)
            assert counts["drafted_tokens"] == sum(row[2] or 0 for row in ends)
            assert counts["accepted_tokens"] == sum(row[1] == "draft" for row in rows)
            plain, _ = await choices_of(client, path, **what)
            assert not any("draft_info" in choice for choice in plain)
            detokenizer = tokenizer.stream()
            for choice in choices:
                if ids := choice.get("token_ids"):
                    text = choice["text"] if "text" in choice else choice["delta"]["content"]
                    assert text == detokenizer.push(ids)

    run(work)


def test_a_stop_string_takes_its_tokens_with_it_and_the_text_stays() -> None:
    async def work() -> None:
        path = "/v1/completions"
        async with serving(**LONG) as (client, driver, _):
            long = body(max_tokens=100, prompt=[300])
            whole = (await client.post(path, json=long)).json()["choices"][0]["text"]
            at = len(whole) // 2
            for include in (False, True):
                for length in (1, 7):
                    stop = whole[at : at + length]
                    right = whole[: whole.find(stop) + (length if include else 0)]
                    what = long | {"stop": [stop], "include_stop_str_in_output": include}
                    choices, _ = await choices_of(client, path, **what, return_draft_info=True)
                    assert "".join(choice["text"] for choice in choices) == right
                    assert choices[-1]["finish_reason"] == "stop"
                    rows = shown(choices)
                    assert [row[:2] for row in rows] == [row[:2] for row in told(driver)][
                        : len(rows)
                    ]
                    assert sum(choice["finish_reason"] is not None for choice in choices) == 1

    run(work)


def test_choices_are_told_apart() -> None:
    async def work() -> None:
        async with serving(**LONG) as (client, driver, _):
            what = body(max_tokens=60, n=4, return_draft_info=True)
            choices, _ = await choices_of(client, "/v1/completions", **what)
            found = [[c for c in choices if c["index"] == index] for index in range(4)]
            assert [shown(one) for one in found] == [told(driver, index - 4) for index in range(4)]
            assert len({str([row[1] for row in shown(one)]) for one in found}) == 4
            assert {row[3] for one in found for row in shown(one)} == {None, 0, 1, 2, 3}

    run(work)


def test_thought_and_content_tell_their_sources(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, IN_TAGS)
    thought, content = "I think about it.", "Now I know."

    async def work() -> None:
        async with saying(f"{thought}\n</think>\n\n{content}", folder) as (client, _):
            what = chat(max_tokens=300, return_draft_info=True)
            choices, usage = await choices_of(client, "/v1/chat/completions", **what)
        deltas = [c for c in choices if any(c["delta"].get(name) for name in PARTS)]
        for name, text in zip(PARTS, (thought, content)):
            assert "".join(c["delta"].get(name) or "" for c in deltas) == text
            sources = [c["draft_info"]["source"] for c in deltas if c["delta"].get(name)]
            assert set(sources) == {"draft", "target"}
        infos = [c["draft_info"] for c in choices if "draft_info" in c]
        counts = usage["speculation"]
        assert counts["drafted_tokens"] == sum(info["drafted"] or 0 for info in infos)
        assert counts["accepted_tokens"] == sum(info["accepted"] or 0 for info in infos)

    run(work)


def test_without_a_stream_it_is_refused_by_name() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            for path, what in (("completions", body()), ("chat/completions", chat())):
                got = await client.post(f"/v1/{path}", json=what | {"return_draft_info": True})
                assert (got.status_code, got.json()["error"]["param"]) == (400, "return_draft_info")
                assert "stream: true" in got.json()["error"]["message"]
            none = body(max_tokens=0, return_draft_info=True)
            choices, _ = await choices_of(client, "/v1/completions", **none)
            assert not any("draft_info" in choice for choice in choices)

    run(work)
