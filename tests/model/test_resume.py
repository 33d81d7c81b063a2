"""A request that left its slot and comes back goes on as if it had never left.

The definition is the same request undisturbed, in float32: tokens, end, log probabilities, and the
drafts that each of its iterations was offered and kept. Each kind of sampling that remembers
something (penalties, seeds, a grammar) is interrupted behind every iteration, and behind every
token.
"""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

import pytest

from outrider.model.runner import Runner
from outrider.model.step import Grammar, Join, Leave, Sampling
from outrider.model.text import Tokenizer
from tests.ranks import BlockAllocator, Output, Team

TINY = Path(__file__).parents[2] / "examples" / "tiny"
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
)
NEW_TOKENS = 28
KINDS = {
    "greedy": Sampling(max_tokens=NEW_TOKENS, logprobs=2),
    "seeded": Sampling(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=11, logprobs=2),
    "penalties": Sampling(
        max_tokens=NEW_TOKENS,
        temperature=0.7,
        seed=5,
        presence_penalty=0.8,
        frequency_penalty=0.9,
        repetition_penalty=1.3,
    ),
    "min_tokens": Sampling(max_tokens=NEW_TOKENS, min_tokens=20, temperature=0.8, seed=3),
    "grammar": Sampling(max_tokens=NEW_TOKENS, grammar=SCHEMA, temperature=0.8, seed=2),
}
TEXT = "The parser reads a configuration file, and each option of the file has a default value. "


@pytest.fixture(scope="module", params=[(1, "mtp"), (2, "mtp"), (2, "both")], ids=str)
def team(request: pytest.FixtureRequest) -> Team:
    size, drafter = request.param
    keys: dict = {"dtype": "float32", "max_slots": 3, "num_pages": 200, "prefill_chunk": 24}
    return Team(TINY, tensor_parallel=size, draft_tokens=3, drafter=drafter, **keys)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer(TINY).encode(TEXT)[:30]


def end_ids(sampling: Sampling) -> list[int]:
    return [0, 2] if sampling.grammar or sampling.min_tokens else []


def resume(runner: Runner, prompt: list[int], sampling: Sampling, emitted: list[int]) -> Output:
    """The rest of an answer, on a rank that knows nothing of its beginning."""
    books = BlockAllocator(runner.run)
    join = books.join(0, 1, prompt, sampling)
    changes = {"emitted": emitted, "end_ids": end_ids(sampling)}
    runner.apply([Join(**{f: getattr(join, f) for f in join.__struct_fields__} | changes)])
    while runner.has_work:
        books.book(runner.step())
    return books.outputs[0]


def assert_same_logprobs(found: Output, expected: list[list[tuple[int, float]]]) -> None:
    for got, want in zip(found.logprobs, expected, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [value for _, value in got] == pytest.approx([v for _, v in want], abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_was_interrupted_anywhere_goes_on_the_same(
    team: Team, prompt: list[int], kind: str
) -> None:
    sampling = KINDS[kind]
    whole = team.each(lambda runner: resume(runner, prompt, sampling, []))[0]
    assert len(set(whole.tokens)) >= 8
    assert whole.accepted > 0
    assert whole.accepted < whole.drafted or kind == "grammar", "every draft was right"
    behind_iterations = dict(zip(accumulate(whole.kept, initial=1), range(len(whole.kept))))
    for count in range(1, len(whole.tokens)):
        emitted = whole.tokens[:count]
        rest = team.each(lambda r, emitted=emitted: resume(r, prompt, sampling, emitted))[0]
        assert emitted + rest.tokens == whole.tokens, f"interrupted behind {count} tokens"
        assert rest.finish == whole.finish
        assert_same_logprobs(rest, whole.logprobs[count:])
        assert rest.iterations == len(rest.kept), "the first token came without an iteration"
        if count in behind_iterations:
            assert rest.kept == whole.kept[behind_iterations[count] :]


def test_interruptions_at_any_step_of_a_batch_change_nothing(team: Team, prompt: list[int]) -> None:
    """Requests of all kinds share slots; any of them may leave, and comes back to any free slot."""
    asked = [(prompt[: 9 + 4 * i], sampling) for i, sampling in enumerate(KINDS.values())]
    alone = [team.each(lambda r, a=a: resume(r, a[0], a[1], []))[0] for a in asked]
    together = team.each(lambda runner: _with_interruptions(runner, asked, random.Random(7)))
    for outputs, interruptions in together:
        assert interruptions > 10
        for found, expected in zip(outputs, alone, strict=True):
            assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
            assert_same_logprobs(found, expected.logprobs)


def _with_interruptions(
    runner: Runner, asked: list[tuple[list[int], Sampling]], rng: random.Random
) -> tuple[list[Output], int]:
    """The answers of requests that are thrown out of their slots at random, and how often."""
    outputs = [Output() for _ in asked]
    waiting, joined, interruptions = list(range(len(asked))), {}, 0
    for number in range(3000):
        free = [slot for slot in range(runner.run.max_slots) if slot not in joined]
        commands: list[Join | Leave] = []
        if joined and rng.random() < 0.25:
            slot = rng.choice(sorted(joined))
            which, join = joined.pop(slot)
            commands.append(Leave(slot=slot, request=join.request))
            waiting.insert(0, which)
            free, interruptions = [*free, slot], interruptions + 1
        while waiting and free:
            which, slot = waiting.pop(0), free.pop(rng.randrange(len(free)))
            prompt, sampling = asked[which]
            join = Join(
                slot=slot,
                request=100 * number + which,
                tokens=prompt,
                pages=list(range(1 + 16 * slot, 17 + 16 * slot)),
                sampling=sampling,
                end_ids=end_ids(sampling),
                emitted=list(outputs[which].tokens),
            )
            joined[slot] = which, join
            commands.append(join)
        runner.apply(commands)
        for progress in runner.step() if runner.has_work else []:
            which, join = joined[progress.slot]
            assert join.request == progress.request, "progress of a request that has left"
            outputs[which].tokens += progress.tokens
            outputs[which].logprobs += progress.logprobs
            outputs[which].finish = progress.finish
            assert not progress.error
            if progress.finish:
                del joined[progress.slot]
        if not waiting and not joined:
            return outputs, interruptions
    raise AssertionError("no progress")


def test_log_probabilities_of_a_prompt_are_not_made_again(team: Team, prompt: list[int]) -> None:
    sampling = Sampling(max_tokens=9, prompt_logprobs=1)
    whole = team.each(lambda r: resume(r, prompt, sampling, []))[0]
    assert len(whole.prompt_logprobs) == len(prompt) - 1
    rest = team.each(lambda r: resume(r, prompt, sampling, whole.tokens[:4]))[0]
    assert (whole.tokens[:4] + rest.tokens, rest.prompt_logprobs) == (whole.tokens, [])
