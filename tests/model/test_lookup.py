"""Drafts by looking: what is found, and that it changes no token."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.model.lookup import MOST_MATCHED, TokenHistory
from outrider.model.step import Sampling
from tests.model.conftest import Checkpoint
from tests.ranks import Team


def found_by_hand(tokens: list[int], num_drafts: int) -> tuple[list[int], int]:
    """The latest of the longest matches, and what followed it."""
    best, longest, last = None, 0, len(tokens) - 1
    for position in range(last):
        length = 0
        while (
            length < min(MOST_MATCHED, position + 1)
            and tokens[position - length] == tokens[last - length]
        ):
            length += 1
        if length and length >= longest:
            best, longest = position, length
    if best is None:
        return [], 0
    text = list(tokens)
    for i in range(num_drafts):
        text.append(text[best + 1 + i])
    return text[len(tokens) :], longest


@pytest.mark.parametrize("alphabet", [2, 3, 9, 40])
def test_the_latest_of_the_longest_matches_is_found(alphabet: int) -> None:
    """Slots of many lengths at once, in memory that held other requests before."""
    draw = random.Random(alphabet)
    history = TokenHistory(33, 64, torch.device("cpu"))
    history.tokens.random_(0, alphabet)
    texts = [[draw.randrange(alphabet) for _ in range(n)] for n in range(1, 32)]
    slots = torch.tensor([i + 1 for i in range(len(texts))])
    for slot, text in zip(slots, texts):
        cut = draw.randrange(len(text) + 1)  # in two pieces, with padding behind each
        for first, part in ((0, text[:cut]), (cut, text[cut:])):
            padded = torch.tensor([[*part, *[1] * 5]])
            history.write(slot[None], torch.tensor([first]), padded, torch.tensor([len(part)]))
    last = torch.tensor([len(text) - 1 for text in texts])
    drafts, lengths = history.find(slots, last, 5, 48)
    assert lengths.amax() > 0
    for row, length, text in zip(drafts.tolist(), lengths.tolist(), texts):
        expected, longest = found_by_hand(text, 5)
        assert length == longest
        if longest:
            assert row == expected, text


def copying(generator: random.Random, length: int = 40) -> list[int]:
    """A prompt that says the same twice."""
    half = [generator.randrange(150) for _ in range(length)]
    return [*half, *half[: length // 2]]


@pytest.mark.parametrize("drafter", ["lookup", "both"])
@pytest.mark.parametrize("size", [1, 2])
def test_drafts_by_looking_change_no_token(varied: Checkpoint, drafter: str, size: int) -> None:
    """Greedy and sampled, in ragged batches, with requests that cap their drafts; some are kept."""
    draw = random.Random(3)
    ways = [
        Sampling(max_tokens=40, temperature=0.0),
        Sampling(max_tokens=33, temperature=1.2, seed=5, top_k=3),
        Sampling(max_tokens=28, temperature=0.0, repetition_penalty=1.3, draft_tokens=2),
        Sampling(max_tokens=40, temperature=0.3, seed=9),
        Sampling(max_tokens=9, temperature=0.0, draft_tokens=0),
    ]
    requests = [(copying(draw), way) for way in ways]
    plain = Team(varied.folder, draft_tokens=0).generate(requests)
    looked = Team(
        varied.folder, draft_tokens=4, drafter=drafter, tensor_parallel=size, prefill_chunk=16
    ).generate(requests, stagger=3)
    for one, other in zip(plain, looked):
        assert other.tokens == one.tokens
    assert sum(out.drafted for out in looked) > sum(out.accepted for out in looked) > 0


def test_a_text_that_repeats_itself_is_drafted_whole(varied: Checkpoint) -> None:
    """Bans leave two tokens, which soon make a pattern: from then on every draft is kept."""
    banned = tuple((token, -100.0) for token in range(160) if token not in (5, 6))
    bias = Sampling(max_tokens=60, temperature=0.0, logit_bias=banned, frequency_penalty=2.0)
    team = Team(varied.folder, draft_tokens=4, drafter="lookup")
    (out,) = team.generate([([1, 2, 3], bias)])
    assert set(out.tokens) == {5, 6}
    assert len(out.kept) > 12
    assert set(out.kept[7:-1]) == {5}


def test_depths_that_change_leave_no_gap_in_what_is_remembered(varied: Checkpoint) -> None:
    """Iterations without drafts remember their tokens too."""
    prompt = copying(random.Random(8))
    how = Sampling(max_tokens=48, temperature=0.0)
    (plain,) = Team(varied.folder, draft_tokens=0).generate([(prompt, how)])
    team = Team(varied.folder, draft_tokens=4, drafter="lookup", auto_depth=True)
    runner = team.runners[0]
    step, calls = runner.step, 0

    def alternating() -> list:
        nonlocal calls
        calls += 1
        runner.limit_drafts(0 if calls // 3 % 2 else 4)
        return step()

    runner.step = alternating
    (out,) = team.generate([(prompt, how)])
    assert out.tokens == plain.tokens
    slot, count = 0, len(prompt) + len(out.tokens) - 5
    remembered = runner.executor.slots.history.tokens[slot, :count].tolist()
    assert remembered == [*prompt, *out.tokens][:count]
