"""Log probabilities of prompts equal those of transformers, however a prompt is run.

prompts of some requests that ask and one that does not -> Team -> Output.prompt_logprobs
"""

from __future__ import annotations

import math

import pytest
import torch

from outrider.model.executor import SCORED_ROWS
from outrider.model.step import Sampling
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.model.test_speculation import prompt_of
from tests.ranks import Output, Team, serve

LENGTHS = (2 * SCORED_ROWS + 6, 1, 33, 2, 17)
TOPS = (2, 5, 0, 20, None)
"""Of each prompt how many likeliest tokens are asked for; None: nothing is."""
REQUESTS = [
    (
        prompt_of(length, seed=length),
        Sampling(max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=top),
    )
    for length, top in zip(LENGTHS, TOPS)
]


@pytest.fixture(scope="module")
def right(varied: Checkpoint) -> list[torch.Tensor]:
    """By prompt: the log probabilities of all tokens behind each of its tokens but the last."""
    model = varied.oracle()
    with torch.inference_mode():
        return [
            model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1) for prompt, _ in REQUESTS
        ]


def check(outs: list[Output], right: list[torch.Tensor]) -> None:
    for (prompt, how), out, rows in zip(REQUESTS, outs, right, strict=True):
        top = how.prompt_logprobs
        assert len(out.tokens) == how.max_tokens
        assert len(out.logprobs) == how.max_tokens
        assert len(out.prompt_logprobs) == (0 if top is None else len(prompt) - 1)
        for token, told, row in zip(prompt[1:], out.prompt_logprobs, rows):
            assert top is not None
            assert told[0][0] == token
            assert len(told) == 1 + top
            assert [value for _, value in told[1:]] == pytest.approx(
                row.topk(top).values.tolist(), abs=2e-5
            )
            for name, value in told:
                assert value == pytest.approx(float(row[name]), abs=2e-5)


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("prefill_chunk", [5, 16, 256])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_they_are_those_of_transformers(
    varied: Checkpoint,
    right: list[torch.Tensor],
    draft_tokens: int,
    prefill_chunk: int,
    tensor_parallel: int,
) -> None:
    """Rows are scored in several pieces in the longest chunks, and prompts run in a batch."""
    team = Team(
        varied.folder,
        draft_tokens=draft_tokens,
        prefill_chunk=prefill_chunk,
        tensor_parallel=tensor_parallel,
    )
    outs = team.generate(REQUESTS, stagger=1)
    check(outs, right)
    assert any(out.drafted for out in outs) == (draft_tokens > 0)


def test_they_are_the_same_from_captured_chunks(
    varied: Checkpoint, right: list[torch.Tensor]
) -> None:
    (runner,) = Team(varied.folder, draft_tokens=3, prefill_chunk=64).runners
    captured = record(runner)
    for _ in range(3):
        check(serve(runner, REQUESTS), right)
    assert any(key[0] == "prefill" for key in captured())


def test_asking_changes_no_token_and_nobody_else_pays(varied: Checkpoint) -> None:
    team = Team(varied.folder, draft_tokens=3)
    head, scored = team.runners[0].executor.head, []
    score = head.log_probs

    def counting(hidden: torch.Tensor, tokens: torch.Tensor, num_top: int):
        scored.append(len(hidden))
        return score(hidden, tokens, num_top)

    head.log_probs = counting  # type: ignore[method-assign]
    prompt = REQUESTS[0][0]
    plain, asked = (
        Sampling(max_tokens=8, ignore_eos=True, prompt_logprobs=top) for top in (None, 1)
    )
    (without,) = team.generate([(prompt, plain)])
    assert not scored
    (told,) = team.generate([(prompt, asked)])
    assert (without.tokens, without.kept) == (told.tokens, told.kept)
    assert sum(scored) == len(prompt) - 1
    assert max(scored) <= SCORED_ROWS
    assert math.isfinite(sum(row[0][1] for row in told.prompt_logprobs))


def test_a_count_out_of_range_is_refused() -> None:
    for count in (-1, 21):
        with pytest.raises(ValueError, match=r"prompt_logprobs = .*must lie in"):
            Sampling(prompt_logprobs=count)
