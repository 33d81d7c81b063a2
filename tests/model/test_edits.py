"""Penalties, bias, bans and log probabilities: what they do, and that drafts do not change it.

The oracle edits one row at a time from the whole text, in plain Python. Every comparison of on and
off asserts that drafts were made, and that the edits really changed the text.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from msgspec.structs import replace

from outrider.model.sampling import SamplingMemory
from outrider.model.step import MAX_LOGIT_BIAS, MAX_STOP_IDS, Join, Sampling
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone, threads
from outrider.parallel.operands import PickRows
from outrider.parallel.sampling import edit, log_probs
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.ranks import Output, Team, serve
from tests.sampling import pick_by_hand

NUM_NEW, EOS = 16, 159
PROMPTS = [[3, 5, 8, 13], [21] * 9, list(range(40, 73))]
CASES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative": {"presence_penalty": 1.9, "frequency_penalty": -0.2},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": ((17, 3.0), (42, -100.0), (99, 2.5))},
    "min_tokens": {"logit_bias": ((EOS, 6.0),), "min_tokens": 9, "stop_ids": (EOS,)},
    "all": {
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        "logit_bias": ((17, 1.0),), "min_tokens": 12, "stop_ids": (EOS, 17),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def teams(varied: Checkpoint) -> dict[int, Team]:
    folder = varied.folder
    return {
        0: Team(folder, draft_tokens=0),
        3: Team(folder, draft_tokens=3, tensor_parallel=2),
        8: Team(folder, draft_tokens=8),
    }


def how(case: str, **changes: object) -> Sampling:
    keys: dict = {"max_tokens": NUM_NEW, "seed": 6, **CASES[case], **changes}
    return Sampling(**keys)


def same(out: Output, off: Output) -> None:
    assert (out.tokens, out.finish) == (off.tokens, off.finish)
    assert out.drafted > 0
    assert off.drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_on_equals_off_alone_and_in_a_batch(
    teams: dict[int, Team], case: str, temperature: float
) -> None:
    sampling = how(case, temperature=temperature)
    off = [teams[0].generate([(prompt, sampling)])[0] for prompt in PROMPTS]
    plain = teams[0].generate(
        [(p, Sampling(max_tokens=NUM_NEW, seed=6, temperature=temperature)) for p in PROMPTS]
    )
    assert [o.tokens for o in off] != [o.tokens for o in plain], "the edits changed nothing"
    others = [(PROMPTS[1], Sampling(max_tokens=30)), (PROMPTS[0], how("repetition", seed=9))]
    same(teams[8].generate([(PROMPTS[0], sampling)])[0], off[0])
    batch = teams[3].generate([*((p, sampling) for p in PROMPTS), *others], stagger=1)
    for out, alone_off in zip(batch, off):
        same(out, alone_off)


def test_the_oracle_edits_the_same(teams: dict[int, Team], varied: Checkpoint) -> None:
    """Each token is the argmax of logits edited by hand from all the text before it."""
    team = teams[3]
    sampling = how("all", max_tokens=12, min_tokens=10)
    (out,) = team.generate([(PROMPTS[0], sampling)])
    model = varied.oracle()
    for index in range(len(out.tokens)):
        emitted = out.tokens[:index]
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[0] + emitted])).logits[0, -1].double()
        assert (
            int(edited_by_hand(logits, PROMPTS[0], emitted, sampling).argmax())
            == (out.tokens[index])
        )


def test_the_oracle_draws_the_same(teams: dict[int, Team], varied: Checkpoint) -> None:
    """The random number of a token is that of its seed and of its position in the whole text."""
    sampling = Sampling(max_tokens=12, temperature=0.9, top_p=0.9, seed=4)
    (out,) = teams[3].generate([(PROMPTS[2], sampling)])
    text, first, count = PROMPTS[2] + out.tokens, len(PROMPTS[2]), len(out.tokens)
    with torch.inference_mode():
        logits = varied.oracle()(torch.tensor([text])).logits[0, first - 1 : -1]
    drawn = [pick_by_hand(logits[i], sampling, first + i) for i in range(count)]
    assert drawn == out.tokens


def edited_by_hand(logits, prompt: list[int], emitted: list[int], how: Sampling):
    logits = logits.clone()
    for token in {*prompt, *emitted}:
        value = logits[token]
        rate = how.repetition_penalty or 1.0
        logits[token] = value / rate if value > 0 else value * rate
    for token, count in Counter(emitted).items():
        logits[token] -= how.frequency_penalty * count + how.presence_penalty
    for token, value in how.logit_bias:
        logits[token] += value
    if len(emitted) < how.min_tokens:
        logits[list(how.stop_ids)] = float("-inf")
    return logits


@pytest.mark.parametrize("ranks", [1, 2])
def test_edits_are_those_done_by_hand_and_neutral_slots_keep_every_bit(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 50, generator=generator) * 4
    strong = Sampling(
        max_tokens=9, presence_penalty=-1.5, frequency_penalty=2.0, repetition_penalty=0.7,
        logit_bias=((7, 3.0), (7, 1.0), (0, -2.0)), min_tokens=3, stop_ids=(49, 7),
    )  # fmt: skip
    prompt, emitted, drafts = [1, 2, 2, 7], [2, 9], [9, 40]
    join = Join(slot=2, request=0, tokens=prompt, pages=[], sampling=strong, end_ids=[49, 7])
    rows = PickRows(
        slots=torch.tensor([1, 2]),
        last=torch.tensor([9, 5]),
        drafts=torch.tensor([[3, 3], drafts]),
    )
    for rank, part in enumerate(logits.split(50 // ranks, -1)):
        device = open_device("cpu", 0, threads(ranks)[rank] if ranks > 1 else alone())
        memory = SamplingMemory(4, 1, 50, device)
        memory.reset(join)
        for token in emitted:  # the second of two tokens was not kept
            one = torch.tensor([2]), torch.tensor([[token, 11]]), torch.tensor([1])
            device.ops.count_tokens(memory.history, *one, memory.first_id)
        out = edit(part, rows, memory.by_slot, memory.first_id)
        assert torch.equal(out[0], part[0])
        ids = slice(memory.first_id, memory.first_id + memory.width)
        for row in range(3):
            known = emitted + drafts[:row]
            expected = edited_by_hand(logits[1, row].double(), prompt, known, strong)[ids]
            torch.testing.assert_close(out[1, row].double(), expected, rtol=1e-6, atol=1e-6)
        memory.reset(Join(slot=2, request=1, tokens=prompt, pages=[], sampling=Sampling()))
        assert torch.equal(edit(part, rows, memory.by_slot, memory.first_id), part)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_models_own_with_and_without_drafts(
    teams: dict[int, Team], varied: Checkpoint, temperature: float
) -> None:
    """Of the unedited distribution, for every token, also when others in the batch want none."""
    sampling = how("presence", logprobs=3, temperature=temperature)
    off = [teams[0].generate([(prompt, sampling)])[0] for prompt in PROMPTS]
    model = varied.oracle()
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[0] + off[0].tokens])
        logs = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    assert [row[0][0] for row in off[0].logprobs] == off[0].tokens
    values = torch.tensor([[value for _, value in row] for row in off[0].logprobs])
    own = logs.gather(1, torch.tensor(off[0].tokens).unsqueeze(1))
    best = logs.topk(3, -1)
    torch.testing.assert_close(values, torch.cat((own, best.values), 1), rtol=1e-4, atol=1e-4)
    assert [[i for i, _ in row[1:]] for row in off[0].logprobs] == best.indices.tolist()
    mixed = [
        *((p, sampling) for p in PROMPTS),
        (PROMPTS[2], Sampling(max_tokens=20, logprobs=0, seed=1)),
        (PROMPTS[1], Sampling(max_tokens=20, temperature=0.7, seed=1)),
        (PROMPTS[0], Sampling(max_tokens=20)),
    ]
    outs = teams[3].generate(mixed, stagger=1)
    for out, alone_off in zip(outs, off):
        same(out, alone_off)
        assert len(out.logprobs) == len(out.tokens)
        for row, other in zip(out.logprobs, alone_off.logprobs):
            assert [i for i, _ in row] == [i for i, _ in other]
            assert [v for _, v in row] == pytest.approx([v for _, v in other], abs=1e-4)
    assert [len(row) for row in outs[3].logprobs] == [1] * 20
    assert outs[4].logprobs == outs[5].logprobs == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_of_ids_that_are_named(varied: Checkpoint, ranks: int) -> None:
    """They stand in place of the likeliest, best first; of other requests nothing changes."""
    named = (3, 0, EOS, 41)
    team = Team(varied.folder, draft_tokens=3, tensor_parallel=ranks, max_slots=4)
    asked = how("presence", logprobs=0, logprob_ids=named)
    outs = team.generate(
        [
            (PROMPTS[0], asked),
            (PROMPTS[1], how("presence", logprobs=2)),
            (PROMPTS[2], replace(asked, seed=5, temperature=1.0)),
            (PROMPTS[1], Sampling(max_tokens=20)),
        ],
        stagger=1,
    )
    assert sum(out.accepted for out in outs) > 0
    model = varied.oracle()
    for prompt, out in ((PROMPTS[0], outs[0]), (PROMPTS[2], outs[2])):
        with torch.inference_mode():
            ids = torch.tensor([prompt + out.tokens])
            logs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert [row[0][0] for row in out.logprobs] == out.tokens
        for row, right in zip(out.logprobs, logs, strict=True):
            assert {token for token, _ in row[1:]} == set(named)
            values = [value for _, value in row[1:]]
            assert values == sorted(values, reverse=True)
            told = [value for _, value in row]
            assert told == pytest.approx([right[i].item() for i, _ in row], abs=1e-4)
    assert [len(row) for row in outs[1].logprobs] == [3] * len(outs[1].tokens)
    assert outs[3].logprobs == []


def test_captured_iterations_pick_the_same(teams: dict[int, Team], varied: Checkpoint) -> None:
    """Greedy, drawn, edited and reported slots side by side, each shape of batch captured once."""
    team = Team(varied.folder, draft_tokens=3)
    (runner,) = team.runners
    captured = record(runner)
    requests = [
        (PROMPTS[0], Sampling(max_tokens=2 * NUM_NEW)),
        (PROMPTS[1], how("all", temperature=0.9, max_tokens=2 * NUM_NEW)),
        (PROMPTS[2], how("presence", logprobs=2)),
        (PROMPTS[1], Sampling(max_tokens=NUM_NEW, temperature=1.1, seed=3)),
        (PROMPTS[0], Sampling(max_tokens=NUM_NEW, logprobs=1)),
    ]
    for _ in range(2):
        got, want = serve(runner, requests), teams[3].generate(requests)
        for out, off in zip(got, want, strict=True):
            assert (out.tokens, out.finish, out.kept) == (off.tokens, off.finish, off.kept)
    features = {key[2] for key in captured() if len(key) == 3}
    assert any(w.drawn and w.filtered and w.edited and w.logprobs for w in features)


def test_log_probs_of_ties() -> None:
    ids, values = log_probs(torch.zeros(2, 4), torch.tensor([3, 1]), 20, 0, alone())
    assert ids.tolist() == [[3, 0, 1, 2, 3], [1, 0, 1, 2, 3]]
    assert values.flatten().tolist() == [pytest.approx(-(torch.tensor(4.0).log().item()))] * 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", tuple((i, 0.0) for i in range(301))),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("stop_ids", tuple(range(129))),
        ("allowed_ids", tuple(range(1025))),
        ("allowed_ids", (-1,)),
        ("banned_ids", tuple(range(1025))),
        ("logprob_ids", tuple(range(129))),
        ("logprob_ids", (5,)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    keys: dict = {name: value}
    with pytest.raises(ValueError, match=rf"sampling\.{name} = "):
        Sampling(**keys)


def test_every_allowed_edit_is_made() -> None:
    memory = SamplingMemory(1, 1, 500, open_device("cpu", 0, alone()))
    sampling = Sampling(
        min_tokens=4, logit_bias=tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS)),
        stop_ids=tuple(range(MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + MAX_STOP_IDS)),
    )  # fmt: skip
    end_ids = [*sampling.stop_ids, 498, 499]
    memory.reset(Join(slot=0, request=0, tokens=[1], pages=[], sampling=sampling, end_ids=end_ids))
    rows = PickRows(slots=torch.tensor([0]), last=torch.tensor([1]))
    out = edit(torch.zeros(1, 1, 500), rows, memory.by_slot, 0)[0, 0]
    assert (out[:MAX_LOGIT_BIAS] == 1.0).all()
    assert (out[end_ids] == float("-inf")).all()
    later = PickRows(slots=torch.tensor([0]), last=torch.tensor([4]))
    assert edit(torch.zeros(1, 1, 500), later, memory.by_slot, 0).isfinite().all()
