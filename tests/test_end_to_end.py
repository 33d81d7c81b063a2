"""The bundled checkpoint through two Ray ranks: text in, text out, drafts accepted.

Held-out prompts from examples/tiny/held_out.txt; plain decoding by transformers is the oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.actors.engine import Engine, Sampling

pytestmark = pytest.mark.ray
NUM_NEW = 48
TINY = Path(__file__).parents[1] / "examples" / "tiny"
PROMPTS = (TINY / "held_out.txt").read_text().removesuffix("\n").split("\n---\n")


def held_out(tiny: Engine, **how: object):
    settings = {"max_tokens": NUM_NEW, **how}
    return tiny.generate(PROMPTS, Sampling(**settings))  # pyright: ignore[reportArgumentType]


def test_the_folder_is_small_and_complete() -> None:
    files = [p for p in TINY.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 16e6
    names = {p.name for p in files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names


def test_so_many_drafts_are_accepted_on_held_out_text(tiny: Engine) -> None:
    """181 of 293: 0.62. Where the draft's keys and values are not refreshed it is 0.59."""
    answers = held_out(tiny, draft_tokens=3)
    drafted = sum(a.stats.drafted for a in answers)
    accepted = sum(a.stats.accepted for a in answers)
    assert drafted > 200
    assert accepted / drafted >= 0.605
    for answer in answers:
        words = answer.text.split()
        assert len(words) > 5
        assert sum(word.isascii() for word in words) / len(words) > 0.9


def test_text_is_that_of_transformers_with_and_without_drafts(tiny: Engine) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    answers = held_out(tiny)
    plain = held_out(tiny, draft_tokens=0)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert sum(a.stats.accepted for a in answers) > 0
    assert sum(a.stats.drafted for a in plain) == 0
    for answer in answers[:2]:
        ids = torch.tensor([answer.prompt_ids])
        with torch.inference_mode():
            out = oracle.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)
        assert answer.token_ids == out[0, ids.shape[1] :].tolist()


def test_seeded_text_is_the_same_alone_in_a_batch_and_without_drafts(tiny: Engine) -> None:
    how = Sampling(max_tokens=NUM_NEW, temperature=0.8, top_p=0.95, seed=7)
    alone = tiny.generate(PROMPTS[0], how)[0]
    batched = tiny.generate(PROMPTS, [how, *[Sampling(max_tokens=30)] * (len(PROMPTS) - 1)])[0]
    plain = tiny.generate(
        PROMPTS[0],
        Sampling(max_tokens=NUM_NEW, temperature=0.8, top_p=0.95, seed=7, draft_tokens=0),
    )[0]
    assert alone.token_ids == batched.token_ids == plain.token_ids
    assert alone.stats.drafted > 0
    assert alone.text != tiny.generate(PROMPTS[0], Sampling(max_tokens=NUM_NEW))[0].text


def test_a_stream_joins_to_the_answer(tiny: Engine) -> None:
    chunks = list(tiny.stream(PROMPTS[1], Sampling(max_tokens=NUM_NEW)))
    (answer,) = tiny.generate(PROMPTS[1], Sampling(max_tokens=NUM_NEW))
    assert "".join(c.text for c in chunks) == answer.text
    assert len(chunks) > 3
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.accepted > 0
