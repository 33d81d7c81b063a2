"""What a request of the API may ask for, beside what each of its fields means to the engine.

    plain greedy answer -> cases -> for each: fields of a body | settings of Sampling | without it
The meaning is written out by hand: a field that the server drops or mixes up gives another answer
than the engine that was asked directly. Every case changes the answer, so dropping a field shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.model.step import Grammar

MAX_TOKENS = 16
NOT_OF_THE_ANSWER = {
    "model", "prompt", "messages", "chat_template_kwargs", "user", "stream", "stream_options",
    "return_token_ids", "return_draft_info", "speculation", "n", "echo", "logprobs", "top_logprobs",
    "prompt_logprobs", "cache_salt", "logprob_token_ids",
    "max_completion_tokens", "best_of", "bad_words", "priority", "truncate_prompt_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "return_tokens_as_token_ids",
    "reasoning_effort", "thinking", "enable_thinking", "chat_template", "add_generation_prompt",
    "continue_final_message", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning",
}  # fmt: skip
"""Fields that pick no other token, or change prompts; those that can be seen have other tests."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One field, or several that need each other."""

    fields: dict[str, Any]
    """Of a body of the API."""
    how: dict[str, Any]
    """Settings of Sampling that they stand for."""
    without: dict[str, Any]
    """The same request without the field that the case is named after."""
    stop: tuple[str, ...] = ()


def cases(plain: Sequence[int], text: str, eos: int) -> dict[str, Case]:
    """By field. plain, text: the greedy answer of at least MAX_TOKENS tokens; eos: an EOS id."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": 1.1, "seed": 2}
    late = plain[7]
    end = {"logit_bias": {str(eos): 100.0}}
    ends = {"logit_bias": ((eos, 100.0),)}

    def same(base: dict[str, Any], **setting: Any) -> Case:
        """A field whose name and value are those of Sampling."""
        return Case(fields=base | setting, how=base | setting, without=base)

    return grammar_cases(greedy) | {
        "max_tokens": same(greedy, max_tokens=5),
        "temperature": same({"seed": 1}, temperature=0.7),
        "temperature's default": Case(
            fields={"seed": 1}, how={"seed": 1, "temperature": 1.0}, without=greedy
        ),
        "top_p": same(drawn, top_p=0.5),
        "top_k": same(drawn, top_k=2),
        "min_p": same(drawn, min_p=0.4),
        "seed": same({"temperature": 1.1}, seed=9),
        "presence_penalty": same(greedy, presence_penalty=2.0),
        "frequency_penalty": same(greedy, frequency_penalty=2.0),
        "repetition_penalty": same(greedy, repetition_penalty=1.8),
        "logit_bias": Case(
            fields=greedy | {"logit_bias": {str(plain[2]): -100, str(plain[3]): 1.5}},
            how=greedy | {"logit_bias": ((plain[2], -100.0), (plain[3], 1.5))},
            without=greedy,
        ),
        "allowed_token_ids": Case(
            fields=greedy | {"allowed_token_ids": sorted({*plain} - {plain[3]})},
            how=greedy | {"allowed_ids": tuple(sorted({*plain} - {plain[3]}))},
            without=greedy,
        ),
        "stop_token_ids": Case(
            fields=greedy | {"stop_token_ids": [late]},
            how=greedy | {"stop_ids": (late,)},
            without=greedy,
        ),
        "min_tokens": Case(
            fields=greedy | {"stop_token_ids": [late], "min_tokens": 12},
            how=greedy | {"stop_ids": (late,), "min_tokens": 12},
            without=greedy | {"stop_ids": (late,)},
        ),
        "ignore_eos": Case(
            fields=greedy | end | {"ignore_eos": True},
            how=greedy | ends | {"ignore_eos": True},
            without=greedy | ends,
        ),
        "stop": Case(
            fields=greedy | {"stop": ["never in it", text[9:13]]},
            how=greedy,
            without=greedy,
            stop=("never in it", text[9:13]),
        ),
    }


def grammar_cases(base: dict[str, Any]) -> dict[str, Case]:
    """The fields that hold an answer to a grammar; base: what every case asks for too."""

    def held_to(
        kind: Literal["json_schema", "regex", "choice", "grammar"], asked: Any, **fields: Any
    ) -> Case:
        """A field that holds the answer to a grammar; asked: that, in the field's own form."""
        text = asked if isinstance(asked, str) else json.dumps(asked)
        how = base | {"grammar": Grammar(kind, text)}
        return Case(fields=base | fields, how=how, without=base)

    schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}
    texts = ["yes, of course", "no, not at all"]
    rules = 'root ::= "a" ("b" | " c")+ "."'
    return {
        "response_format": held_to(
            "json_schema",
            schema,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": True},
            },
        ),
        "structured_outputs": held_to(
            "regex", "(no|yes), [a-z]{4}", structured_outputs={"regex": "(no|yes), [a-z]{4}"}
        ),
        "guided_json": held_to("json_schema", schema, guided_json=schema),
        "guided_regex": held_to("regex", "[0-9]{5}", guided_regex="[0-9]{5}"),
        "guided_choice": held_to("choice", texts, guided_choice=texts),
        "guided_grammar": held_to("grammar", rules, guided_grammar=rules),
    }
