"""Which drafts are made: they follow from the text, wherever the draft body lives.

`offered` of a run: (request, rows its caches held) -> the drafts (tests/ranks.py: record_drafts).
"""

from __future__ import annotations

import pytest

from outrider.model.step import Sampling
from tests.ranks import Output, Team, record_drafts

K, NUM_NEW = 3, 24
PROMPTS = [[(37 * i + n) % 158 for i in range(n)] for n in (9, 33)]
HOW = Sampling(max_tokens=NUM_NEW, ignore_eos=True)
Offered = dict[tuple[int, int], list[int]]


def run(folder, prompts=PROMPTS, how: Sampling = HOW, **changes) -> tuple[list[Output], Offered]:
    team = Team(folder, **{"draft_tokens": K, **changes})
    offered = [record_drafts(runner) for runner in team.runners]
    outs = team.generate([(prompt, how) for prompt in prompts])
    assert all(other == offered[0] for other in offered)
    return outs, offered[0]


@pytest.fixture(scope="module")
def plain(varied) -> tuple[list[Output], Offered]:
    return run(varied.folder)


def test_some_drafts_are_kept_and_some_are_not(plain) -> None:
    """What the comparisons below rest on."""
    outs, offered = plain
    assert {kept for out in outs for kept in out.kept} == set(range(1, K + 2))
    assert len({tuple(drafts) for drafts in offered.values()}) > len(offered) // 2


@pytest.mark.parametrize(("tensor_parallel", "draft_body"), [(1, "local"), (2, "sharded")])
def test_drafts_follow_from_the_text_alone(varied, tensor_parallel: int, draft_body: str) -> None:
    """Offered while decoding, after whatever was kept: as if the text so far were the prompt."""
    keys = {"tensor_parallel": tensor_parallel, "draft_body": draft_body}
    outs, offered = run(varied.folder, **keys)
    texts = [prompt + out.tokens for prompt, out in zip(PROMPTS, outs)]
    where = [at for at in offered if at[1] < len(texts[at[0]]) - K]
    prompts = [texts[request][:length] for request, length in where]
    _, fresh = run(varied.folder, prompts, Sampling(max_tokens=K + 2, ignore_eos=True), **keys)
    for number, (at, prompt) in enumerate(zip(where, prompts, strict=True)):
        assert offered[at] == fresh[number, len(prompt)], at


def test_local_and_sharded_bodies_offer_the_same(varied, plain) -> None:
    for draft_body in ("local", "sharded"):
        assert run(varied.folder, tensor_parallel=2, draft_body=draft_body) == plain


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_rounded_draft_head_changes_drafts_and_no_token(
    varied, plain, tensor_parallel: int
) -> None:
    outs, offered = run(varied.folder, tensor_parallel=tensor_parallel, draft_head="fp8")
    want, exact = plain
    assert [out.tokens for out in outs] == [out.tokens for out in want]
    both = offered.keys() & exact.keys()
    changed = sum(offered[at] != exact[at] for at in both)
    assert 0 < changed < len(both) // 2
