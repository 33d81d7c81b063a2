"""Structured output over HTTP: every spelling of a grammar, answers that match, refusals in time.

tests/model/test_grammar.py says more of the answers, test_parameters.py compares each field with
the engine that is asked directly.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from outrider.actors.driver.grammars import LIMIT_S
from outrider.actors.http.bodies import CompletionBody
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.structured import ANY_OBJECT
from outrider.model.step import Grammar
from tests.actors.http.local_server import body, run, serving
from tests.actors.http.test_parameters import server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
TEXTS = Grammar("choice", '["a", "b"]')
SPELLINGS: tuple[tuple[dict[str, Any], Grammar | None], ...] = (
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
    ({"structured_outputs": {"json": None, "json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        AS_SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, AS_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_SCHEMA),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, TEXTS),
    ({"guided_choice": ["a", "b"]}, TEXTS),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
)


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS)
def test_every_spelling_means_the_same(fields: dict[str, Any], grammar: Grammar | None) -> None:
    said = [{"role": "user", "content": "x"}]
    for kind, given in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": said})):
        read = parse(kind, json.dumps({**given, **fields}).encode())
        assert read.grammar == grammar


def test_a_chat_answers_in_json() -> None:
    said = [{"role": "user", "content": "Describe a colour."}]
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["red", "green"]}, "parts": {"type": "array", "maxItems": 2,
            "items": {"type": "integer", "minimum": 0, "maximum": 255}},
        },
        "required": ["name", "parts"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}

    async def work() -> None:
        async with server() as ask:
            for seed in range(4):
                got = await ask(
                    "chat/completions", messages=said, response_format=form, max_tokens=90,
                    seed=seed,
                )  # fmt: skip
                (choice,) = got["choices"]
                assert choice["finish_reason"] == "stop"
                value = json.loads(choice["message"]["content"])
                assert value.keys() == {"name", "parts"}
                assert value["name"] in ("red", "green")
                assert all(0 <= part <= 255 for part in value["parts"])
                speculation = got["usage"]["speculation"]
                assert 0 < speculation["accepted_tokens"] <= speculation["drafted_tokens"]

    run(work)


def test_a_refusal_names_the_field_and_what_is_wrong() -> None:
    async def work() -> None:
        async with serving() as (client, _, _):
            for fields, why in (
                (
                    {"guided_json": {"type": "array", "contains": {}}},
                    'guided_json (json_schema): Unimplemented keys: ["contains"]',
                ),
                (
                    {"guided_regex": "a", "guided_choice": ["a"]},
                    "guided_regex and guided_choice: each says what the answer must match; "
                    "give one",
                ),
            ):
                got = await client.post("/v1/completions", json=body(**fields))
                assert got.status_code == 400
                assert got.json()["error"]["message"] == why

    run(work)


def test_a_hostile_schema_is_refused_in_time_and_others_go_on() -> None:
    slow = {"type": "integer", "multipleOf": 999983}

    async def work() -> None:
        async with serving() as (client, driver, _):
            first = await client.post("/v1/completions", json=body(guided_regex="(a"))
            assert first.status_code == 400  # and the process that tries grammars has started
            started = time.monotonic()
            asked = asyncio.ensure_future(
                client.post("/v1/completions", json=body(guided_json=slow))
            )
            await asyncio.sleep(0.05)
            others = 0
            while not asked.done():
                assert (await client.post("/v1/completions", json=body())).status_code == 200
                others += 1
            got = await asked
            assert time.monotonic() - started < LIMIT_S + 1.0
            assert got.status_code == 400
            assert f"takes more than {LIMIT_S:g} s" in got.json()["error"]["message"]
            assert others > 3
            assert driver.stats()["requests_submitted"] == others

    run(work)
