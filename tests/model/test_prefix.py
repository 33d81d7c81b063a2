"""Prompts that begin alike are computed once, and every answer is what it is without that.

Real ranks under a real scheduler. `off` computes every prompt. Every test that compares asserts
that rows were restored, and with drafts that drafts were kept.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from outrider.actors.driver.request import Request
from outrider.model.step import Grammar
from outrider.model.text import Tokenizer
from outrider.parallel.device import Capabilities
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.ranks import Team
from tests.scheduled import SNAPSHOT_TOKENS, Scheduled
from tests.test_end_to_end import TINY

PAGE, NUM_NEW = 8, 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 158, (length,), generator=generator).tolist()


def team(varied: Checkpoint, draft_tokens: int, num_snapshots: int = 40, **changes: Any) -> Team:
    keys = {"num_pages": 300, "max_model_len": 512, **changes}
    return Team(
        varied.folder,
        draft_tokens=draft_tokens,
        page_tokens=PAGE,
        num_snapshots=num_snapshots,
        **keys,
    )


def ask(scheduled: Scheduled, prompt: list[int], **how: Any) -> Request:
    request = scheduled.submit(prompt, **{"max_tokens": NUM_NEW, **how})
    scheduled.run()
    return request


def counts(request: Request) -> tuple[int, int, list[int]]:
    """What drafts came to."""
    found = request.counters
    return found.iterations, found.drafted, found.per_position


BASE = prompt_of(150)
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 31, 32, 33, 70, 100)


@pytest.mark.parametrize(
    ("tensor_parallel", "draft_tokens", "changes"),
    [
        (1, 0, {}),
        (1, 1, {}),
        (1, 3, {}),
        (1, 5, {"run_ahead": 1}),
        (2, 2, {"draft_body": "sharded"}),
        (2, 5, {"run_ahead": 1}),
        (1, 3, {"drafter": "lookup"}),
        (1, 3, {"drafter": "both"}),
        (1, 3, {"auto_depth": True}),
    ],
)
def test_second_turns_say_and_draft_what_they_would_alone(
    varied: Checkpoint, tensor_parallel: int, draft_tokens: int, changes: dict[str, Any]
) -> None:
    run_ahead = changes.pop("run_ahead", 0)
    engines = [
        team(varied, draft_tokens, places, tensor_parallel=tensor_parallel, **changes)
        for places in (40, 0)
    ]
    for engine in engines:
        for runner in engine.runners:
            runner.run_ahead = run_ahead
    on, off = (Scheduled(engine) for engine in engines)
    saved = accepted = 0
    lengths = LENGTHS if tensor_parallel == 1 else LENGTHS[2:10:2]
    for length in lengths:
        prompt = BASE[:length] + prompt_of(3, length)[: length % 3]
        first = ask(on, prompt)
        turns = [prompt, [*prompt, 5], [*prompt, *first.emitted, *prompt_of(9, length)]]
        for turn in turns:
            found, expected = ask(on, turn), ask(off, turn)
            assert expected.cached_tokens == 0
            assert found.cached_tokens >= len(prompt)
            engines[0].assert_same(turn, found.emitted, expected.emitted)
            assert counts(found) == counts(expected)
            saved += found.cached_tokens
            accepted += found.counters.accepted
    assert saved > sum(lengths)
    assert (accepted > 0) == (draft_tokens > 0)


@pytest.mark.parametrize("drafter", ["mtp", "lookup", "both"])
def test_drafts_rest_on_the_restored_rows_and_not_on_those_of_the_slots_last_tenant(
    varied: Checkpoint, drafter: str
) -> None:
    repeating, found = prompt_of(9) * 8, []
    for places in (40, 0):
        scheduled = Scheduled(team(varied, 3, places, drafter=drafter, max_slots=1))
        prompts = (repeating, prompt_of(90), repeating, prompt_of(90), [*repeating, 3])
        found.append([ask(scheduled, prompt, max_tokens=40) for prompt in prompts])
    on, off = found
    assert [request.cached_tokens for request in on] == [0, 0, 72, 90, 72]
    assert [request.emitted for request in on] == [request.emitted for request in off]
    assert [counts(request) for request in on] == [counts(request) for request in off]
    assert all(request.counters.drafted > 0 for request in on)


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 9},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.5},
    {"draft_tokens": 1, "logprobs": 2},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.7, "top_k": 9, "seed": 1},
    {"draft_tokens": 0},
)


@pytest.mark.parametrize(
    ("tensor_parallel", "draft_tokens", "num_pages"),
    [(1, 3, 300), (1, 5, 60), (2, 2, 60)],
)
def test_a_batch_of_every_kind_of_request_is_answered_as_each_would_be_alone(
    varied: Checkpoint, tensor_parallel: int, draft_tokens: int, num_pages: int
) -> None:
    off = Scheduled(team(varied, draft_tokens, 0, tensor_parallel=tensor_parallel))
    engine = team(varied, draft_tokens, 9, tensor_parallel=tensor_parallel, num_pages=num_pages)
    on = Scheduled(engine, lag=1)
    asked = [(BASE[: 40 + 9 * i], {"max_tokens": 40, **KINDS[i % 8]}) for i in range(8)]
    asked += [([*BASE[:100], i], {"max_tokens": 40, **KINDS[i % 8]}) for i in range(8)]
    if tensor_parallel > 1:
        asked = asked[::2] + asked[1:4:2]
    for _ in range(2):
        found = [on.submit(prompt, **how) for prompt, how in asked]
        for step in range(40):
            on.step()
            running = [r for r in found if r.slot is not None and not r.ended]
            if running and step % 8 == 7:
                on.scheduler.suspend(running[step % len(running)].number)
        on.run()
    assert on.most_together > 1
    for (prompt, how), request in zip(asked, found, strict=True):
        expected = ask(off, prompt, **how)
        engine.assert_same(prompt, request.emitted, expected.emitted)
        assert not (request.cached_tokens and "prompt_logprobs" in how)
        chunk, wanted = request.take(), expected.take()
        assert chunk is not None
        assert wanted is not None
        assert flat(chunk.logprobs) == pytest.approx(flat(wanted.logprobs), abs=1e-4)
        assert flat(chunk.prompt_logprobs) == pytest.approx(flat(wanted.prompt_logprobs), abs=1e-4)
    assert sum(request.cached_tokens > 0 for request in found) >= 4


def flat(rows: list[Any]) -> list[float]:
    return [number for row in rows if row for pair in row for number in pair]


def test_grammars_hold_answers_behind_restored_rows_and_after_a_preemption() -> None:
    grammar = Grammar("regex", "[a-z]{3,9}( [a-z]{2,8}){4,9}\\.")
    tokenizer, found = Tokenizer(TINY), []
    prompt = tokenizer.encode("If you want to write your own template tag,")
    for places in (8, 0):
        engine = Team(TINY, draft_tokens=3, num_snapshots=places, max_model_len=512)
        scheduled = Scheduled(engine, eos_ids=engine.model.eos_ids)
        for turn in (prompt, prompt, [*prompt, 9], prompt):
            request = scheduled.submit(turn, grammar=grammar, max_tokens=60)
            while places and turn == prompt and len(request.emitted) < 5:
                scheduled.step()
            if places and request.slot is not None:
                scheduled.scheduler.suspend(request.number)
            scheduled.run()
            found.append(request)
    on, off = found[:4], found[4:]
    assert [request.emitted for request in on] == [request.emitted for request in off]
    assert [request.cached_tokens for request in on] == [0, *[len(prompt)] * 3]
    for request in on:
        text = tokenizer.decode(request.emitted[:-1])
        assert re.fullmatch(grammar.text, text), text
        assert request.finish == "stop"
    assert sum(request.counters.accepted for request in on) > 0


def test_two_prompts_that_begin_alike_at_the_same_time_end_right(varied: Checkpoint) -> None:
    engine = team(varied, 3)
    on, off = Scheduled(engine), Scheduled(team(varied, 3, 0))
    prompts = [[*BASE[:90], 7, 8], [*BASE[:90], 9], [*BASE[:90], 7, 8], BASE[:90]]
    requests = [on.submit(prompt, max_tokens=NUM_NEW) for prompt in prompts]
    on.run()
    for prompt, request in zip(prompts, requests, strict=True):
        engine.assert_same(prompt, request.emitted, ask(off, prompt).emitted)
    assert ask(on, [*BASE[:90], 1]).cached_tokens == 90


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_choices_of_a_prompt_share_its_rows_and_draw_as_they_would_alone(
    varied: Checkpoint, tensor_parallel: int
) -> None:
    engine = team(varied, 3, tensor_parallel=tensor_parallel)
    on, off = Scheduled(engine, lag=1), Scheduled(team(varied, 3, 0))
    kinds = [{"temperature": 0.9, "seed": seed, "max_tokens": NUM_NEW} for seed in range(3)]
    kinds.append({"presence_penalty": 1.0, "logprobs": 1, "max_tokens": NUM_NEW})
    requests = [on.submit(BASE[:77], **how) for how in kinds]
    on.run()
    for how, request in zip(kinds, requests, strict=True):
        alone = ask(off, BASE[:77], **how)
        assert (request.emitted, counts(request)) == (alone.emitted, counts(alone))
    assert [request.cached_tokens for request in requests] == [0, 77, 77, 77]
    assert len({tuple(request.emitted) for request in requests}) > 1


def test_a_known_prompt_runs_no_row_and_one_in_the_middle_of_a_chunk_the_rest(
    varied: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = team(varied, 3)
    (runner,) = engine.runners
    rows: list[int] = []
    prefill = runner.executor.prefill

    def counting(chunk: Any) -> Any:
        rows.append(int(chunk.counts.sum()))
        return prefill(chunk)

    monkeypatch.setattr(runner.executor, "prefill", counting)
    on = Scheduled(engine)
    for prompt, expected in ((BASE[:77], 77), (BASE[:77], 0), (BASE[:80], 3), (BASE[:79], 2)):
        rows.clear()
        ask(on, prompt)
        assert sum(rows) == expected
    assert all(count <= SNAPSHOT_TOKENS for count in rows)


def test_graphs_are_the_same_with_hits_and_without(varied: Checkpoint) -> None:
    keys = []
    for places in (40, 0):
        engine = team(varied, 3, places)
        captured = record(engine.runners[0])
        scheduled = Scheduled(engine)
        answers = [ask(scheduled, BASE[:70] + [9] * i).emitted for i in (0, 0, 0, 3, 3, 3)]
        keys.append((answers, captured()))
    (on, on_keys), (off, off_keys) = keys
    assert on == off
    assert set(on_keys) <= set(off_keys)
    assert any(key[0] != "prefill" for key in on_keys)


def test_devices_that_want_lengths_on_the_host_reuse_too(varied: Checkpoint) -> None:
    engine = team(varied, 3)
    for runner in engine.runners:
        device = runner.device
        runner.use_device(type(device)(
            torch_device=device.torch_device,
            ops=device.ops,
            tp=device.tp,
            capabilities=Capabilities(host_lengths=True),
        ))  # fmt: skip
    on, off = Scheduled(engine), Scheduled(team(varied, 3, 0))
    for prompt in (BASE[:70], BASE[:70], BASE[:80]):
        found, expected = ask(on, prompt), ask(off, prompt)
        engine.assert_same(prompt, found.emitted, expected.emitted)
        assert counts(found) == counts(expected)
    assert found.cached_tokens == 70


Known = dict[tuple[Any, ...], list[int]]


def traffic(rng: random.Random, on: Scheduled) -> list[tuple[Request, dict[str, Any]]]:
    """Random requests, with aborts, preemptions and evictions at any moment, until all have ended;
    -> each with how it was asked."""
    requests: list[tuple[Request, dict[str, Any]]] = []
    for _ in range(40):
        roll, scheduler = rng.random(), on.scheduler
        running = [request for request in scheduler.unfinished if request.slot is not None]
        if roll < 0.3 and len(requests) < 9:
            prompt = BASE[: rng.randint(1, 150)] + prompt_of(rng.randint(0, 4), rng.randint(0, 2))
            if requests and rng.random() < 0.4:  # another turn
                before = rng.choice(requests)[0]
                prompt = [*before.prompt, *before.emitted, rng.randint(0, 9)]
            how = {**rng.choice(KINDS[:4]), "min_tokens": 0, "ignore_eos": True}
            how["max_tokens"] = rng.randint(1, 20)
            requests.append((on.submit(prompt[:200], **how), how))
        elif roll < 0.35 and scheduler.unfinished:
            scheduler.abort(rng.choice(scheduler.unfinished).number)
        elif roll < 0.4 and running:
            scheduler.suspend(rng.choice(running).number)
        elif roll < 0.5 and (places := scheduler.prefix.snapshots()):
            scheduler.prefix.evict(rng.choice(places))
        on.step()
    on.run()
    return requests


def check_traffic(seed: int, engine: Team, oracle: Scheduled, known: Known) -> int:
    """Compare random traffic with the oracle; -> the rows that were restored."""
    rng = random.Random(seed)
    on = Scheduled(
        engine,
        lag=rng.randint(0, 2),
        num_snapshots=rng.randint(1, engine.run_config.num_snapshots),
        snapshot_tokens=rng.choice((8, 16, 24, 64)),
        num_pages=rng.choice((40, 80, engine.run_config.num_pages)),
        eos_ids=(5, 50, 150),
    )
    for runner in engine.runners:
        runner.run_ahead = seed % 2
    requests = traffic(rng, on)
    for request, how in requests:
        if request.error is None:
            key = (tuple(request.prompt), tuple(sorted(how.items())))
            if key not in known:
                known[key] = ask(oracle, request.prompt, **how).emitted
            oracle.team.assert_same(request.prompt, request.emitted, known[key])
    return sum(request.cached_tokens for request, _ in requests)


def run_traffic(varied: Checkpoint, seeds: range) -> None:
    engines = [
        team(varied, 3, 12, max_slots=4),
        team(varied, 2, 12, max_slots=3, tensor_parallel=2),
    ]
    oracle, known = Scheduled(team(varied, 0, 0)), Known()
    restored = sum(check_traffic(seed, engines[seed % 4 == 3], oracle, known) for seed in seeds)
    assert restored > 10 * len(seeds)


@pytest.mark.parametrize("start", range(0, 24, 8))
def test_random_traffic_with_evictions_equals_an_oracle_without_a_cache(
    varied: Checkpoint, start: int
) -> None:
    run_traffic(varied, range(start, start + 8))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 25))
def test_more_random_traffic_with_evictions_equals_an_oracle_without_a_cache(
    varied: Checkpoint, start: int
) -> None:
    run_traffic(varied, range(start, start + 25))
