"""Drafts change the speed and nothing else: on = off token for token, with the counts as predicted.

float32 on the CPU. `off` is K = 0 on one rank, one request at a time, and is itself compared with
transformers. Every test that compares asserts that drafts were made.
"""

from __future__ import annotations

import pytest
import torch

from outrider.model.step import Join, Leave, Sampling
from tests import checkpoints
from tests.ranks import BlockAllocator, ForcedDrafter, Team, serve

PAGE, CHUNK = 8, 32
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
NUM_NEW = 24


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 158, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(varied):
    return varied.folder


class Answers:
    """K = 0, one rank, alone: what every other way of running must repeat."""

    def __init__(self, folder) -> None:
        self.team = Team(folder, draft_tokens=0, page_tokens=PAGE, prefill_chunk=CHUNK)
        self.runner = self.team.runners[0]
        self.known: dict = {}

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        self.team.assert_same(prompt, tokens, self(prompt))

    def __call__(self, prompt, sampling=None) -> list[int]:
        how = sampling or Sampling(max_tokens=NUM_NEW)
        key = (tuple(prompt), how)
        if key not in self.known:
            self.known[key] = serve(self.runner, [(prompt, how)])[0].tokens
        return self.known[key]


@pytest.fixture(scope="module")
def off(folder) -> Answers:
    return Answers(folder)


def team(folder, draft_tokens: int, **changes) -> Team:
    return Team(
        folder,
        **{"draft_tokens": draft_tokens, "page_tokens": PAGE, "prefill_chunk": CHUNK, **changes},
    )


def force(team: Team, off: Answers, prompts, right) -> None:
    """Every rank drafts the known continuation, wrong where `right` says so."""
    answers = {tuple(p): off(p, Sampling(max_tokens=2 * NUM_NEW)) for p in prompts}
    for runner in team.runners:
        runner.use_drafter(ForcedDrafter(runner, answers, right))


def test_off_equals_transformers(varied, off) -> None:
    model = varied.oracle()
    for length in (1, 9, 33):
        ids = prompt_of(length)
        with torch.inference_mode():
            for _ in range(NUM_NEW):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert off(prompt_of(length)) == ids[length:]


def test_answers_are_varied_and_remember_the_prompt(folder, off) -> None:
    """What the comparisons of this file rest on."""
    for length in LENGTHS:
        assert len(set(off(prompt_of(length)))) >= NUM_NEW // 2, f"prompt of {length}"
    for length in (2, 9):
        first, *rest = prompt_of(length)
        assert off([first + 1, *rest]) != off([first, *rest])
    runner, how = off.runner, Sampling(max_tokens=NUM_NEW)
    books = BlockAllocator(runner.run)
    runner.apply([books.join(0, 0, prompt_of(33), how)])
    while not books.outputs[0].tokens:
        books.book(runner.step())
    with torch.inference_mode():
        runner.executor.states.state.zero_()
        runner.executor.states.factors.zero_()
    while runner.has_work:
        books.book(runner.step())
    assert books.outputs[0].tokens != off(prompt_of(33)), "the delta-net states do not matter"


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 5, 8])
def test_on_equals_off_for_every_prompt_length(folder, off, draft_tokens: int) -> None:
    k = draft_tokens
    engine = team(folder, k)
    for length in sorted({*LENGTHS, k, k + 1, k + 2}):
        prompt = prompt_of(length)
        out = engine.generate([(prompt, Sampling(max_tokens=NUM_NEW))])[0]
        off.check(prompt, out.tokens)
        assert out.drafted > 0
        assert out.finish == "length"


@pytest.mark.parametrize("draft_body", ["local", "sharded"])
@pytest.mark.parametrize(
    ("tensor_parallel", "draft_tokens"), [(1, 3), (2, 1), (2, 3), (2, 8), (4, 3)]
)
def test_ranks_and_draft_homes_agree_in_ragged_batches(
    folder, off, draft_body: str, tensor_parallel: int, draft_tokens: int
) -> None:
    engine = team(
        folder, draft_tokens, tensor_parallel=tensor_parallel, draft_body=draft_body, max_slots=3
    )
    prompts = [prompt_of(n) for n in (9, 33, 2, 17, 64)]
    outs = engine.generate([(p, Sampling(max_tokens=NUM_NEW)) for p in prompts])
    for prompt, out in zip(prompts, outs, strict=True):
        off.check(prompt, out.tokens)
        assert out.drafted > 0


PATTERNS = {
    "all": lambda at, i: True,
    "none": lambda at, i: False,
    "alternating": lambda at, i: at % 2 == 0,
    "exactly two": lambda at, i: i < 2,
    "uneven": lambda at, i: (at * 2654435761 >> 7) % 3 > 0,
}


def predicted(pattern, max_tokens: int, k: int) -> tuple[list[int], int, int]:
    """Rows kept by iteration, drafted and accepted, from the pattern alone."""
    done, kept, drafted, accepted = 1, [], 0, 0
    while done < max_tokens:
        limit = min(k, max_tokens - done - 1)
        right = [pattern(done + i, i) for i in range(limit)]
        good = [*right, False].index(False)
        kept.append(good + 1)
        drafted, accepted = drafted + limit, accepted + good
        done += kept[-1]
    return kept, drafted, accepted


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize("draft_tokens", [1, 3, 5, 8])
def test_forced_drafts_are_counted_as_predicted(folder, off, name: str, draft_tokens: int) -> None:
    engine = team(folder, draft_tokens)
    prompt = prompt_of(17)
    force(engine, off, [prompt], PATTERNS[name])
    out = engine.generate([(prompt, Sampling(max_tokens=NUM_NEW))])[0]
    off.check(prompt, out.tokens)
    assert (out.kept, out.drafted, out.accepted) == predicted(PATTERNS[name], NUM_NEW, draft_tokens)


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("draft_tokens", [3, 5])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_ragged_batches_with_divergent_acceptance(
    folder, off, num_slots: int, draft_tokens: int, tensor_parallel: int
) -> None:
    """Each prompt accepts by its own pattern; requests join late and slots are used again."""
    engine = team(
        folder, draft_tokens, tensor_parallel=tensor_parallel, max_slots=num_slots, num_pages=400
    )
    prompts = [prompt_of(n, seed=1) for n in (9, 2, 33, 1, 17, 40, 8, 3, 12, 65)]
    force(engine, off, prompts, lambda at, i: (at * 7919 + i * 31) % 4 > 0)
    requests = [(p, Sampling(max_tokens=6 + 3 * (i % 5))) for i, p in enumerate(prompts)]
    for stagger in (0, 2):
        outs = engine.generate(requests, stagger=stagger)
        for (prompt, how), out in zip(requests, outs, strict=True):
            assert out.tokens == off(prompt)[: how.max_tokens]
            assert out.drafted > 0
        assert len({tuple(o.kept) for o in outs}) > 3


def test_slots_with_their_own_k_share_a_batch(folder, off) -> None:
    engine = team(folder, 5)
    prompts = [prompt_of(n, seed=2) for n in (9, 12, 33, 5)]
    force(engine, off, prompts, lambda at, i: at % 5 > 0)
    features = [0, 2, 5, None]
    requests = [
        (p, Sampling(max_tokens=NUM_NEW, draft_tokens=k)) for p, k in zip(prompts, features)
    ]
    outs = engine.generate(requests)
    for (prompt, _), out, wish in zip(requests, outs, features, strict=True):
        off.check(prompt, out.tokens)
        most = 5 if wish is None else wish
        assert max(out.kept) <= most + 1
        assert (out.drafted == 0) == (wish == 0)


def test_a_step_without_drafts_after_all_were_kept(folder, off) -> None:
    """remaining = 1 leaves no draft right after a step that kept K + 1."""
    prompt = prompt_of(9)
    engine = team(folder, 3)
    force(engine, off, [prompt], PATTERNS["all"])
    out = engine.generate([(prompt, Sampling(max_tokens=1 + 4 + 4 + 1))])[0]
    assert out.kept == [4, 4, 1]
    assert out.tokens == off(prompt)[:10]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_no_draft_is_made_that_could_not_be_kept(folder, off, max_tokens: int) -> None:
    """The first token counts before it is read, so the iteration beside it drafts for the rest."""
    engine = team(folder, 3)
    prompt = prompt_of(9)
    force(engine, off, [prompt], PATTERNS["all"])
    out = engine.generate([(prompt, Sampling(max_tokens=max_tokens))])[0]
    assert out.tokens == off(prompt)[:max_tokens]
    kept, drafted, accepted = predicted(PATTERNS["all"], max_tokens, 3)
    assert (out.kept, out.drafted, out.accepted) == (kept, drafted, accepted)


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 5])
def test_max_tokens_is_exact(folder, off, draft_tokens: int) -> None:
    engine = team(folder, draft_tokens)
    prompt = prompt_of(9)
    for pattern in (PATTERNS["all"], PATTERNS["none"]):
        if draft_tokens:
            force(engine, off, [prompt], pattern)
        for count in range(1, draft_tokens + 3):
            out = engine.generate([(prompt, Sampling(max_tokens=count))])[0]
            assert out.tokens == off(prompt)[:count]
            assert out.finish == "length"


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_a_stop_id_ends_at_every_draft_position(folder, off, draft_tokens: int) -> None:
    """The stop id is drafted right, or arrives as the target's correction of a wrong draft."""
    upto = draft_tokens + 3
    prompt = next(p for p in map(prompt_of, LENGTHS) if len(set(off(p)[:upto])) == upto)
    answer = off(prompt)
    for name in ("all", "none"):
        engine = team(folder, draft_tokens)
        force(engine, off, [prompt], PATTERNS[name])
        for at, stop in enumerate(answer[:upto]):
            out = engine.generate([(prompt, Sampling(max_tokens=NUM_NEW, stop_ids=(stop,)))])[0]
            assert (out.tokens, out.finish) == (answer[: at + 1], "stop")
            assert out.drafted > 0 or at == 0
            assert sum(out.kept) >= at
            assert set(out.kept) <= ({draft_tokens + 1} if name == "all" else {1})


def test_a_stop_id_that_is_drafted_and_rejected_ends_nothing(folder, off) -> None:
    prompt = prompt_of(9)
    answer = off(prompt)
    stop = next(t for t in range(160) if t not in answer and (t - 1) % 160 in answer)
    engine = team(folder, 3)
    force(engine, off, [prompt], PATTERNS["none"])  # drafts token + 1, so `stop` among them
    out = engine.generate([(prompt, Sampling(max_tokens=NUM_NEW, stop_ids=(stop,)))])[0]
    assert (out.tokens, out.finish) == (answer, "length")
    assert out.drafted > 0
    assert out.accepted == 0


def test_a_request_may_fill_the_context_to_its_end(folder, off) -> None:
    prompt = prompt_of(40)
    engine = team(folder, 5, max_model_len=64)
    force(engine, off, [prompt], PATTERNS["all"])
    out = engine.generate([(prompt, Sampling(max_tokens=24))])[0]
    assert out.tokens == off(prompt)[:24]


def test_padding_slots_and_unused_memory_may_hold_nan(folder, off) -> None:
    """Three requests in a batch of eight; the padding slot, its page and all free pages are NaN."""
    prompts = [prompt_of(n, seed=3) for n in (9, 33, 2)]
    engine = team(folder, 3, max_slots=4, batch_buckets=(8,))
    it = engine.runners[0].executor
    with torch.inference_mode():
        for pages in (it.pages, it.draft_pages):
            for tensor in pages.tensors():
                tensor.fill_(float("nan"))
        for tensor in it.states.tensors():
            tensor.fill_(float("nan"))
        it.slots.hidden.fill_(float("nan"))
    outs = engine.generate([(p, Sampling(max_tokens=NUM_NEW)) for p in prompts])
    for prompt, out in zip(prompts, outs, strict=True):
        off.check(prompt, out.tokens)
        assert out.drafted > 0


def test_a_used_slot_forgets_its_last_tenant(folder, off) -> None:
    """One slot, many tenants: ended by length, by stop, by leaving mid-prefill and mid-decode."""
    engine = team(folder, 3, max_slots=1)
    runner = engine.runners[0]
    books = BlockAllocator(runner.run)
    long, short = prompt_of(65), prompt_of(9)
    for request, (prompt, steps) in enumerate([(long, 1), (short, 2), (long, 4), (short, 0)]):
        runner.apply([books.join(request, 0, prompt, Sampling(max_tokens=NUM_NEW))])
        for _ in range(steps):
            runner.step()
        runner.apply([Leave(slot=0, request=request), Leave(slot=0, request=99)])
        books.free += books.held.pop(request)
        assert not runner.has_work
        assert engine.generate([(short, Sampling(max_tokens=NUM_NEW))])[0].tokens == off(short)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_launching_ahead_of_the_results_changes_nothing(folder, off, tensor_parallel: int) -> None:
    """A device that runs an iteration ahead learns of an end late; the extra tokens are dropped."""
    engine = team(folder, 3, max_slots=2, tensor_parallel=tensor_parallel)
    prompts = [prompt_of(n, seed=4) for n in (9, 33, 2, 17)]
    for runner in engine.runners:
        runner.run_ahead = 1
    answer = off(prompts[0])
    requests = [(p, Sampling(max_tokens=NUM_NEW)) for p in prompts]
    requests[0] = (prompts[0], Sampling(max_tokens=NUM_NEW, stop_ids=(answer[7],)))
    outs = engine.generate(requests)
    assert outs[0].tokens == answer[: answer.index(answer[7]) + 1]
    for prompt, out in list(zip(prompts, outs, strict=True))[1:]:
        off.check(prompt, out.tokens)
        assert out.drafted > 0


def test_ties_go_to_the_smallest_id_on_every_rank(tmp_path) -> None:
    """Head rows repeated across the shard border: ids 3 and 83 always tie."""
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text, seed=2)
    weights["lm_head.weight"][80:] = weights["lm_head.weight"][:80]
    folder = checkpoints.write(tmp_path, text, weights)
    alone = team(folder, 0).generate([(prompt_of(9), Sampling(max_tokens=NUM_NEW))])[0]
    assert max(alone.tokens) < 80
    for size in (2, 4):
        out = team(folder, 3, tensor_parallel=size).generate(
            [(prompt_of(9), Sampling(max_tokens=NUM_NEW))]
        )[0]
        assert out.tokens == alone.tokens
        assert out.drafted > 0


def test_digests_follow_the_slot_table(folder) -> None:
    first, second = (team(folder, 3).runners[0] for _ in range(2))
    assert first.digest() == second.digest()
    join = Join(
        slot=1, request=7, tokens=[1, 2, 3], pages=[1, 2, 3, 4], sampling=Sampling(max_tokens=9)
    )
    first.apply([join])
    assert first.digest() != second.digest()
    second.apply([join])
    assert first.digest() == second.digest()
    first.step()
    assert first.digest() != second.digest()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_depth_may_change_before_every_step(folder, off, tensor_parallel: int) -> None:
    engine = team(folder, 5, tensor_parallel=tensor_parallel, auto_depth=True)
    prompts = [prompt_of(n) for n in (9, 33, 2)]
    requests = [(p, Sampling(max_tokens=NUM_NEW)) for p in prompts]

    def changing(runner):
        step, depths = runner.step, iter([0, 5, 1, 0, 0, 3, 5, 2] * 50)

        def stepped():
            runner.limit_drafts(next(depths))
            return step()

        runner.step = stepped
        return serve(runner, requests, stagger=1)

    for outs in engine.each(changing):
        assert [o.tokens for o in outs] == [off(p) for p in prompts]
        assert all(o.drafted > 0 for o in outs)
