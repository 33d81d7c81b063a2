"""A mixture of experts, defined in plain torch: who is asked, and what they add up to.

    x [N, H] -> route -> the weights and ids of each row's experts -> routed -> [N, H]
                                    x -> the shared expert, times its gate -> + -> this rank's part

Every rank routes all rows with the same bits. It then adds up what it holds: a share of the columns
of each expert, or all columns of a share of the experts. Either way the sum over ranks is the
layer's result. `gathered` is `routed` for graphs. Letters: as ExpertLayer (parallel/operands.py),
and N rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.parallel.formats import Matrix, dequantised
from outrider.parallel.operands import ExpertLayer

Mlp = Callable[[Tensor, Matrix, Matrix], Tensor]
"""(x [N, H], gate_up [2i, H], down [H, i]) -> a swiglu MLP's result [N, H]."""
AddUp = Callable[[Tensor, Tensor, Tensor, ExpertLayer], Tensor]
"""(x [N, H], weights [N, top_k], ids [N, top_k], layer) -> as `routed`."""
PAIRS_AT_ONCE = 64
"""Rows' experts whose matrices are copied at a time."""


def mixture(x: Tensor, layer: ExpertLayer, mlp: Mlp, add_up: AddUp) -> Tensor:
    """Ops.experts of rows x [N, H]. add_up: `routed`, or what stands in for it."""
    weights, ids = route(x, layer.router, layer.top_k, layer.normalised)
    total = add_up(x, weights, ids, layer)
    shared = mlp(x, layer.shared_gate_up, layer.shared_down)
    gate = torch.sigmoid(x.float() @ layer.shared_gate.float().t())
    return (total + gate * shared.float()).to(x.dtype)


def route(x: Tensor, router: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The weights [N, top_k] float32 and ids [N, top_k] int64 of each row's experts.

    x [N, H], router [E, H]. A row's experts are those of its largest scores, which are float32; of
    equal ones the smaller id goes first. The softmax of the scores over all experts is the weight.
    """
    scores = x.float() @ router.float().t()
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(scores, -1).gather(-1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def routed(x: Tensor, weights: Tensor, ids: Tensor, layer: ExpertLayer, mlp: Mlp) -> Tensor:
    """The weighted sum [N, H] float32 of the results of those experts that this rank holds.

    x [N, H]; weights, ids [N, top_k] as `route` gives them. How many rows an expert has is looked
    at on the host, so this is not for graphs.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(layer.gate_up.shape[0]):
        row, place = (ids == layer.first_expert + expert).nonzero(as_tuple=True)
        if len(row):
            y = mlp(x[row], layer.gate_up[expert], layer.down[expert])
            total[row] += y.float() * weights[row, place].unsqueeze(1)  # no row is here twice
    return total


def on_rank(weights: Tensor, ids: Tensor, layer: ExpertLayer) -> tuple[Tensor, Tensor]:
    """weights, ids [N, top_k] -> the weights, and the experts counted on this rank. One that
    another rank holds becomes the first, with weight 0."""
    local = ids - layer.first_expert
    elsewhere = (local < 0) | (local >= layer.gate_up.shape[0])
    return weights.masked_fill(elsewhere, 0.0), local.masked_fill(elsewhere, 0)


def gathered(
    x: Tensor, weights: Tensor, ids: Tensor, layer: ExpertLayer, swiglu: Callable[[Tensor], Tensor]
) -> Tensor:
    """As `routed`, without looking at the host: copies the matrices of each row's experts, so it is
    for few rows. swiglu: [.., 2i] -> [.., i]."""
    weights, local = on_rank(weights, ids, layer)
    num_rows, top_k = ids.shape
    rows = x.unsqueeze(1).expand(-1, top_k, -1).reshape(num_rows * top_k, -1, 1)
    parts = []
    for some, expert in zip(
        rows.split(PAIRS_AT_ONCE), local.flatten().split(PAIRS_AT_ONCE), strict=True
    ):
        h = dequantised(layer.gate_up[expert], x.dtype) @ some  # [P, 2i, 1]
        h = swiglu(h.squeeze(-1)).unsqueeze(-1)
        parts.append((dequantised(layer.down[expert], x.dtype) @ h).squeeze(-1))
    y = torch.cat(parts).float() * weights.reshape(-1, 1)
    return y.view(num_rows, top_k, -1).sum(1)
