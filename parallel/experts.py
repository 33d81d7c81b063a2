"""A mixture of experts, defined in plain torch: who is asked, and what they add up to.

    x [N, H] -> route -> the weights and ids of each row's experts -> routed -> [N, H]
                                    x -> the shared expert, times its gate -> + -> this rank's part

Every rank routes all rows with the same bits. It then adds up what it holds: a share of the columns
of each expert, or all columns of a share of the experts. Either way the sum over ranks is the
layer's result. Letters: as ExpertLayer (parallel/operands.py), and N rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.parallel.formats import Matrix
from outrider.parallel.operands import ExpertLayer

Mlp = Callable[[Tensor, Matrix, Matrix], Tensor]
"""(x [N, H], gate_up [2i, H], down [H, i]) -> a swiglu MLP's result [N, H]."""


def mixture(x: Tensor, layer: ExpertLayer, mlp: Mlp) -> Tensor:
    """Ops.experts of rows x [N, H]."""
    weights, ids = route(x, layer.router, layer.top_k, layer.normalised)
    total = routed(x, weights, ids, layer, mlp)
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
            total.index_add_(0, row, y.float() * weights[row, place].unsqueeze(1))
    return total
