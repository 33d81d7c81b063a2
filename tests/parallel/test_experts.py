"""A mixture of experts: routing, and what ranks add up."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.parallel.experts import route
from outrider.parallel.operands import ExpertLayer
from outrider.parallel.ops import Ops

H, E, I, S = 12, 6, 8, 4


def layer(**changes: object) -> ExpertLayer:
    random = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    keys: dict = {
        "router": rand(E, H),
        "top_k": 3,
        "normalised": True,
        "first_expert": 0,
        "gate_up": rand(E, 2 * I, H),
        "down": rand(E, H, I),
        "shared_gate_up": rand(2 * S, H),
        "shared_down": rand(H, S),
        "shared_gate": rand(1, H),
    }
    return ExpertLayer(**{**keys, **changes})


def by_hand(x: Tensor, own: ExpertLayer) -> Tensor:
    """Row by row, expert by expert, in float64."""
    x, results = x.double(), []

    def mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up.double() @ row).chunk(2)
        return down.double() @ (F.silu(gate) * up)

    for row in x:
        chances = torch.softmax(own.router.double() @ row, 0)
        ids = chances.argsort(descending=True)[: own.top_k].tolist()
        whole = chances[ids].sum() if own.normalised else 1.0
        total = sum(chances[i] / whole * mlp(row, own.gate_up[i], own.down[i]) for i in ids)
        gate = torch.sigmoid(own.shared_gate[0].double() @ row)
        results.append(total + gate * mlp(row, own.shared_gate_up, own.shared_down))
    return torch.stack(results)


def rows(number: int) -> Tensor:
    return torch.randn(number, H, generator=torch.Generator().manual_seed(number))


def test_a_row_gets_the_weighted_sum_of_its_experts_and_the_shared_one() -> None:
    for normalised in (True, False):
        own, x = layer(normalised=normalised), rows(20)
        got = Ops().experts(x.view(4, 5, H), own)
        assert got.shape == (4, 5, H)
        torch.testing.assert_close(got.view(20, H).double(), by_hand(x, own), rtol=1e-5, atol=1e-5)


def test_equal_scores_go_to_the_smaller_ids() -> None:
    router = torch.zeros(E, H)
    router[4] = 1.0
    weights, ids = route(torch.ones(2, H), router, 3, normalised=False)
    assert ids.tolist() == [[4, 0, 1]] * 2
    assert torch.equal(weights[:, 1], weights[:, 2])


def test_ranks_with_columns_or_with_whole_experts_add_up_to_the_layer() -> None:
    own, x, half = layer(), rows(9), I // 2
    gate, up = own.gate_up.chunk(2, 1)
    shared_gate, shared_up = own.shared_gate_up.chunk(2)
    by_columns, by_experts = [], []
    for rank in range(2):
        columns, few = slice(rank * half, (rank + 1) * half), slice(rank * 2, rank * 2 + 2)
        shared = {
            "shared_gate_up": torch.cat((shared_gate[few], shared_up[few])),
            "shared_down": own.shared_down[:, few],
        }
        cut = {
            "gate_up": torch.cat((gate[:, columns], up[:, columns]), 1),
            "down": own.down[:, :, columns],
        }
        by_columns.append(Ops().experts(x, replace(own, **cut, **shared)))
        experts = slice(rank * 3, rank * 3 + 3)
        cut = {"gate_up": own.gate_up[experts], "down": own.down[experts]}
        by_experts.append(Ops().experts(x, replace(own, first_expert=3 * rank, **cut, **shared)))
    whole = Ops().experts(x, own)
    torch.testing.assert_close(sum(by_columns), whole)
    torch.testing.assert_close(sum(by_experts), whole)
