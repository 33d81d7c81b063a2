"""speculation.pin_rows: every pass has the same shapes, and drafts change no bit of a result.

In float32 the tokens are the same without it; in bfloat16, where the two likeliest logits are often
equal or a rounding apart, they are not.
"""

from __future__ import annotations

from outrider.model.step import Sampling
from outrider.model.text import Tokenizer
from tests.ranks import Team
from tests.test_end_to_end import PROMPTS, TINY

K, NUM_NEW = 3, 24


def test_passes_have_all_rows_and_all_pages_with_and_without_drafts(varied) -> None:
    team = Team(varied.folder, draft_tokens=K, pin_rows=True)
    executor, shapes = team.runners[0].executor, set()
    iterate = executor.iterate

    def watched(batch, *args):
        targets, *rest = iterate(batch, *args)
        shapes.add((targets.shape[1], batch.num_pages))
        return targets, *rest

    executor.iterate = watched
    prompts = [[3, 1, 4, 1, 5], list(range(40))]
    on = team.generate([(p, Sampling(max_tokens=NUM_NEW)) for p in prompts])
    off = team.generate([(p, Sampling(max_tokens=NUM_NEW, draft_tokens=0)) for p in prompts])
    for prompt, drafted, plain in zip(prompts, on, off):
        team.assert_same(prompt, drafted.tokens, plain.tokens)
        assert drafted.drafted > 0 == plain.drafted
    assert shapes == {(K + 1, executor.slots.max_pages)}


def test_in_bfloat16_tokens_are_the_same_with_and_without_drafts() -> None:
    """This held-out prompt gave another token at position 17 while states were folded in groups."""
    keys = {"draft_tokens": 5, "tensor_parallel": 2, "page_tokens": 16, "prefill_chunk": 512}
    team = Team(TINY, dtype="bfloat16", pin_rows=True, **keys)
    prompt = Tokenizer(TINY).encode(PROMPTS[3])
    (on,) = team.generate([(prompt, Sampling(max_tokens=NUM_NEW, ignore_eos=True))])
    plain = Sampling(max_tokens=NUM_NEW, ignore_eos=True, draft_tokens=0)
    (off,) = team.generate([(prompt, plain)])
    team.assert_same(prompt, on.tokens, off.tokens)
    assert on.accepted > 5
    assert off.drafted == 0
