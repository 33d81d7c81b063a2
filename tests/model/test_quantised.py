"""FP8 and Int4 answer as the plain weights do that they stand for, on any number of ranks.

The oracle is transformers' model, and a draft of plain torch, of the dequantised weights in
float32. Blocks and groups are small, so that cuts over ranks go through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model.config import ConfigError, RunConfig, load_config
from outrider.model.rules import rules
from outrider.model.step import Sampling
from outrider.model.weights import check_weights, settle
from tests import checkpoints, layouts
from tests.draft_reference import draft_hidden
from tests.model.test_mtp import ours
from tests.model.test_oracle import assert_same, logits_by
from tests.model.test_speculation import prompt_of
from tests.quantised import Quantised, fp8, fp8_at_load, gptq
from tests.ranks import Team

DENSE = checkpoints.config(tie_word_embeddings=False)
MIXTURE, NEXT = checkpoints.mixture_config(), checkpoints.next_config()
FORMS: dict[str, tuple[dict, Callable[[dict[str, torch.Tensor]], Quantised]]] = {
    "fp8, as released": (DENSE, partial(fp8, block=128)),
    "fp8": (DENSE, partial(fp8, block=20)),
    "fp8 mixture": (MIXTURE, partial(fp8, block=12)),
    "fp8 next": (NEXT, partial(fp8, block=20)),
    "fp8 at load": (DENSE, fp8_at_load),
    "fp8 mixture at load": (MIXTURE, fp8_at_load),
    "int4": (DENSE, partial(gptq, group=32)),
    "int4, everywhere": (DENSE, partial(gptq, group=20, excluded=())),
    "int4 mixture": (MIXTURE, partial(gptq, group=12)),
    "int4 next": (NEXT, partial(gptq, group=128)),
    "int4 next, packed": (NEXT, partial(gptq, group=20, excluded=())),
}
NUM_NEW = 12
PROMPTS = [prompt_of(n) for n in (9, 33)]


@dataclass(frozen=True)
class Case:
    """A quantised checkpoint, and what it must give."""

    folder: Path
    text: dict
    release: Quantised
    model: Any
    """transformers' model of the dequantised weights."""

    @property
    def settings(self) -> dict[str, str]:
        """What makes the engine round plain weights at load."""
        return {} if self.release.config else {"quantization": "fp8"}


@pytest.fixture(scope="module", params=list(FORMS))
def case(request, tmp_path_factory) -> Case:
    text, quantise = FORMS[request.param]
    release = quantise(layouts.released(text, checkpoints.varied_weights(text)))
    folder = tmp_path_factory.mktemp("quantised")
    checkpoints.write(folder, text, release.tensors, quantization=release.config, num_files=2)
    return Case(folder, text, release, checkpoints.transformers_model(text, release.dequantised))


@pytest.fixture(scope="module")
def answers(case: Case) -> list[list[int]]:
    """The greedy answer of transformers' model to each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_NEW):
                ids.append(int(case.model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize(
    ("size", "changes"),
    [(1, {}), (2, {"expert_parallel": True, "draft_body": "sharded"}), (4, {})],
)
def test_tokens_are_those_of_the_dequantised_weights(
    case: Case, answers: list[list[int]], size: int, changes: dict
) -> None:
    team = Team(case.folder, tensor_parallel=size, draft_tokens=3, **changes, **case.settings)
    how = Sampling(max_tokens=NUM_NEW)
    outs = team.generate([(prompt, how) for prompt in PROMPTS])
    for prompt, out, expected in zip(PROMPTS, outs, answers, strict=True):
        team.assert_same(prompt, out.tokens, expected)
        assert len(set(expected)) > NUM_NEW // 3
        assert out.drafted > 0


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 4])
def test_logits_and_drafts_are_those_of_the_dequantised_weights(case: Case, size: int) -> None:
    ids = torch.randint(0, 160, (41,), generator=torch.Generator().manual_seed(7))
    normed: list[torch.Tensor] = []
    hook = case.model.model.norm.register_forward_hook(
        lambda module, args, out: normed.append(out[0])
    )
    want = case.model(ids[None]).logits[0]
    hook.remove()
    team = Team(case.folder, tensor_parallel=size, prefill_chunk=64, **case.settings)
    assert_same(logits_by(team, ids.tolist(), [30, *[1] * 3, 8]), want)
    want = draft_hidden(case.text, case.release.dequantised, normed[0][:-1], ids[1:])
    got, _ = ours(
        case.folder,
        normed[0][:-1],
        ids[1:],
        [31, *[1] * 3, 6],
        tensor_parallel=size,
        draft_body="sharded",
        **case.settings,
    )
    assert (got - want).abs().max() < 2e-6 * want.abs().max()


def test_cuts_go_through_blocks(case: Case) -> None:
    """What the comparisons rest on: on four ranks shares begin inside a block of the files."""
    model = settle(load_config(case.folder), case.folder)
    run = RunConfig(model_dir="", tensor_parallel=4, **case.settings)
    inside = set()
    for rule in rules(model, run):
        for piece in rule.pieces if rule.form != "plain" else ():
            row_spans, (first_column, _) = rule.spans(piece, 1)
            starts = [(start, rule.base_block[0]) for start, _ in row_spans]
            starts.append((first_column, rule.base_block[1]))
            if any(start % block for start, block in starts):
                inside.add(piece.name.rpartition("_proj")[0].rpartition(".")[2])
    assert "down" in inside


def complaint(folder: Path) -> str:
    """What loading says of a folder before it reads a tensor."""
    with pytest.raises(ConfigError) as caught:
        check_weights(folder, settle(load_config(folder), folder), RunConfig(model_dir=str(folder)))
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 600
    return text


def test_an_expert_that_is_absent_is_named(tmp_path: Path) -> None:
    """Fused experts have no names: there the last one is cut off, or one is too many."""
    weights = checkpoints.random_weights(MIXTURE)
    single = {key: t for key, t in weights.items() if "layers.2.mlp.experts.3." not in key}
    fused = layouts.fuse_experts(weights)
    name = "model.layers.2.mlp.experts.down_proj"
    short = fused | {name: fused[name][:-1].contiguous()}
    long = fused | {name: torch.cat((fused[name], fused[name][:1]))}
    for tensors, words in (
        (single, [f"layers.2.mlp.experts.3.{kind}_proj" for kind in ("gate", "up", "down")]),
        (short, ["layers.2.mlp.experts.7.down_proj"]),
        (long, ["layers.2.mlp.experts.8.down_proj"]),
    ):
        folder = checkpoints.write(tmp_path / words[0], MIXTURE, tensors)
        text = complaint(folder)
        assert all(word in text for word in words), text
