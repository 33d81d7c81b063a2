"""The draft equals a reference put together from transformers' parts; wrong wirings do not."""

from __future__ import annotations

import pytest
import torch

from outrider.model.step import Join, Sampling
from tests import checkpoints
from tests.ranks import Team

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    text = checkpoints.config(tie_word_embeddings=False)
    weights = checkpoints.random_weights(text, seed=5)
    folder = checkpoints.write(tmp_path_factory.mktemp("mtp"), text, weights)
    ids = torch.randint(0, 160, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    model = checkpoints.transformers_model(text, weights)
    captured = {}
    model.model.norm.register_forward_hook(
        lambda module, args, out: captured.update(raw=args[0][0], normed=out[0])
    )
    with torch.inference_mode():
        model(ids[None, :-1])
    return text, weights, folder, ids, captured["raw"], captured["normed"], model


def reference(
    text, weights, model, hidden, tokens, *, positions=None, swapped=False, table="model"
):
    """m [T, H] by transformers' decoder layer and norms (reference: Qwen3.5 MTP, vLLM's wiring)."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    def norm(name: str) -> Qwen3_5RMSNorm:
        module = Qwen3_5RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])
        module.weight.data = weights[f"mtp.{name}.weight"]
        return module

    layer = Qwen3_5DecoderLayer(model.config, text["layer_types"].index("full_attention"))
    prefix = "mtp.layers.0."
    layer.load_state_dict({n[len(prefix) :]: t for n, t in weights.items() if n.startswith(prefix)})
    e = norm("pre_fc_norm_embedding")(weights[f"{table}.embed_tokens.weight"][tokens])
    n = norm("pre_fc_norm_hidden")(hidden)
    y = torch.cat((n, e) if swapped else (e, n), -1) @ weights["mtp.fc.weight"].t()
    at = torch.arange(len(tokens)) if positions is None else positions
    embeddings = model.model.rotary_emb(y[None], at[None, None].expand(3, 1, -1))
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
    out = layer(y[None], position_embeddings=embeddings, attention_mask=mask)
    out = out[0] if isinstance(out, tuple) else out
    return norm("norm")(out.view(len(tokens), -1))


def ours(folder, hidden, tokens, chunks, **changes):
    """m [T, H] of every token, and the token [T] that the draft's head makes of each."""

    def work(runner):
        it = runner.executor
        with torch.inference_mode():
            join = Join(
                slot=0, request=0, tokens=[1], pages=list(range(1, 30)), sampling=Sampling()
            )
            it.slots.reset(join)
            outs, start = [], 0
            for count in chunks:
                rows = it.slots.rows(
                    torch.tensor([0]),
                    torch.tensor([start]),
                    torch.tensor([count]),
                    count,
                    it.slots.table_of(torch.tensor([0]), 29),
                )
                part = slice(start, start + count)
                outs.append(it.drafter.draft(hidden[None, part], tokens[None, part], rows)[0])
                start += count
            m = torch.cat(outs)
            return m, it.drafter.head.greedy(m)

    results = Team(folder, prefill_chunk=64, **changes).each(work)
    assert all(torch.equal(r[0], results[0][0]) for r in results)
    assert all(torch.equal(r[1], results[0][1]) for r in results)
    return results[0]


@torch.inference_mode()
def test_draft_equals_reference_in_one_pass_and_in_rows(case) -> None:
    text, weights, folder, ids, _, normed, model = case
    want = reference(text, weights, model, normed, ids[1:])
    for chunks in ([NUM_TOKENS], [30, *[1] * 30], [5] * 12):
        error = (ours(folder, normed, ids[1:], chunks)[0] - want).abs().max()
        assert error < 1e-6 * want.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("draft_body", ["local", "sharded"])
def test_both_homes_of_the_body_compute_the_same(case, draft_body: str) -> None:
    text, weights, folder, ids, _, normed, model = case
    want = reference(text, weights, model, normed, ids[1:])
    got, _ = ours(folder, normed, ids[1:], [NUM_TOKENS], tensor_parallel=2, draft_body=draft_body)
    assert (got - want).abs().max() < 1e-6 * want.abs().max()


@torch.inference_mode()
def test_a_shift_of_all_positions_changes_nothing(case) -> None:
    text, weights, _, ids, _, normed, model = case
    want = reference(text, weights, model, normed, ids[1:])
    shifted = reference(
        text, weights, model, normed, ids[1:], positions=torch.arange(NUM_TOKENS) + 1
    )
    assert (shifted - want).abs().max() < 2e-5


@torch.inference_mode()
def test_wrong_wirings_are_far_off(case) -> None:
    """What other engines got wrong: pre-norm hidden, hidden before embedding, mixed positions."""
    text, weights, folder, ids, raw, normed, model = case
    got, _ = ours(folder, normed, ids[1:], [NUM_TOKENS])
    right = (got - reference(text, weights, model, normed, ids[1:])).abs().max()
    mixed = torch.arange(NUM_TOKENS) + (torch.arange(NUM_TOKENS) >= 30)
    wrong = {
        "pre-norm hidden": reference(text, weights, model, raw, ids[1:]),
        "hidden first": reference(text, weights, model, normed, ids[1:], swapped=True),
        "token not shifted": reference(text, weights, model, normed, ids[:-1]),
        "mixed positions": reference(text, weights, model, normed, ids[1:], positions=mixed),
    }
    for name, m in wrong.items():
        error = (got - m).abs().max()
        assert error > 10 * right, f"{name}: {error:.1e} against {right:.1e}"
        assert error > 1e-3, f"{name}: {error:.1e}"


@torch.inference_mode()
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_with_tables_of_its_own_uses_them(case, tmp_path, tied, tensor_parallel) -> None:
    """The same target; the draft looks tokens up in, and scores them by, other rows."""
    text, weights, _, ids, _, normed, model = case
    own = checkpoints.config(tie_word_embeddings=tied, mtp_use_dedicated_embeddings=True)
    weights = weights | {
        name: tensor
        for name, tensor in checkpoints.random_weights(own, seed=6).items()
        if name in ("mtp.embed_tokens.weight", "mtp.lm_head.weight")
    }
    head = weights["mtp.embed_tokens.weight" if tied else "mtp.lm_head.weight"]
    if tied:
        del weights["lm_head.weight"]
    folder = checkpoints.write(tmp_path, own, weights)
    m, drafts = ours(folder, normed, ids[1:], [NUM_TOKENS], tensor_parallel=tensor_parallel)
    want = reference(text, weights, model, normed, ids[1:], table="mtp")
    assert (m - want).abs().max() < 1e-6 * want.abs().max()
    assert drafts.tolist() == (want @ head.t()).argmax(-1).tolist()
