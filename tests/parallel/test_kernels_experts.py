"""A mixture of experts on kernels, against the definition: rows, cuts, formats, equal scores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.parallel import experts as definition
from outrider.parallel.backends.cuda import MAX_ARRIVALS, CudaOps
from outrider.parallel.formats import (
    Fp8Matrix,
    Int4Matrix,
    Matrix,
    StackedMatrix,
    dequantised,
    row_range,
)
from outrider.parallel.kernels import expert_routing, experts
from outrider.parallel.operands import ExpertLayer
from outrider.parallel.ops import Ops
from tests.parallel import cases
from tests.parallel.cases import DEVICE, DTYPES, rand

OPS = Ops()
close = partial(cases.close, float32=1e-5)
NUM_ROWS = [1, 2, 6, 17, 64, 130]
EMPTY = torch.empty


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that nobody has written holds NaN, or 1 where it is integers."""

    def empty(*shape, **how):
        made = EMPTY(*shape, **how)
        return made.fill_(float("nan") if made.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", empty)


def mixture(
    num: int = 11, hidden: int = 80, i: int = 24, s: int = 24, top_k: int = 3,
    dtype: torch.dtype = torch.float32, normalised: bool = True,
) -> ExpertLayer:  # fmt: skip
    def matrix(*shape: int, seed: int) -> Tensor:
        return (rand(*shape, seed=seed) * shape[-1] ** -0.5).to(dtype)

    return ExpertLayer(
        router=rand(num, hidden, seed=1, dtype=dtype) * 0.2, top_k=top_k, normalised=normalised,
        first_expert=0, gate_up=matrix(num, 2 * i, hidden, seed=2),
        down=matrix(num, hidden, i, seed=3), shared_gate_up=matrix(2 * s, hidden, seed=4),
        shared_down=matrix(hidden, s, seed=5),
        shared_gate=rand(1, hidden, seed=6, dtype=dtype) * 0.2,
    )  # fmt: skip


def on_device(layer: ExpertLayer) -> ExpertLayer:
    def moved(value):
        if isinstance(value, Tensor):
            return value.to(DEVICE)
        if isinstance(value, Fp8Matrix):
            return Fp8Matrix(value.values.to(DEVICE), value.scales.to(DEVICE))
        if isinstance(value, Int4Matrix):
            return Int4Matrix(value.codes.to(DEVICE), value.scales.to(DEVICE))
        return value

    return replace(layer, **{k: moved(getattr(layer, k)) for k in layer.__dataclass_fields__})


def run(x: Tensor, layer: ExpertLayer) -> Tensor:
    """The kernels' result; no counter is left set."""
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=DEVICE)
    got = experts.experts(x.to(DEVICE), on_device(layer), arrivals, OPS._mlp)
    assert not arrivals.any()
    return got


def routed(x: Tensor, layer: ExpertLayer, block_rows: int) -> expert_routing.Routing:
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=DEVICE)
    routing = expert_routing.route(x.to(DEVICE), on_device(layer), block_rows, arrivals)
    assert not arrivals.any()
    return expert_routing.Routing(*(t.cpu() for t in routing))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rows(dtype, num_rows) -> None:
    """Also rows that are a view of wider ones, which are NaN elsewhere."""
    layer = mixture(dtype=dtype, normalised=num_rows % 2 == 0)
    wide = torch.full((num_rows, 80 + 16), float("nan"), dtype=dtype)
    wide[:, 8:88] = rand(num_rows, 80, dtype=dtype)
    x = wide.to(DEVICE)[:, 8:88]
    close(run(x, layer), OPS.experts(x.cpu().contiguous(), layer))


def test_leading_dims_and_no_rows() -> None:
    layer, x = mixture(), rand(2, 3, 80)
    ops = CudaOps(torch.device(DEVICE))
    close(ops.experts(x.to(DEVICE), on_device(layer)), OPS.experts(x, layer))
    assert ops.experts(x[:0].to(DEVICE), on_device(layer)).shape == (0, 3, 80)


@pytest.mark.parametrize(("num_rows", "hidden"), [(2, 2312), (70, 200)])
def test_a_long_row(num_rows, hidden) -> None:
    """More of the router than a program loads before it waits; the last steps are short."""
    layer, x = mixture(num=5, hidden=hidden, i=8, s=8, top_k=2), rand(num_rows, hidden)
    close(run(x, layer), OPS.experts(x, layer), float32=2e-5)


@pytest.mark.parametrize(("num_rows", "size"), [(6, 2), (6, 3), (20, 2)])
def test_the_ranks_parts_add_up(num_rows, size) -> None:
    """Columns of all experts on each rank, or whole experts; the shared one is cut either way."""
    layer, x = mixture(num=12, i=24, s=12), rand(num_rows, 80)
    want = OPS.experts(x, layer)
    by_columns, by_experts = torch.zeros_like(want), torch.zeros_like(want)
    for rank in range(size):
        share = cut(layer, rank, size)
        by_columns += run(x, share).cpu()
        own = experts_from(layer, rank * 12 // size, (rank + 1) * 12 // size)
        own = replace(own, shared_gate_up=share.shared_gate_up, shared_down=share.shared_down)
        by_experts += run(x, own).cpu()
    close(by_columns, want)
    close(by_experts, want)


def experts_from(layer: ExpertLayer, start: int, stop: int) -> ExpertLayer:
    """Whole experts start..stop."""
    parts = {name: dequantised(getattr(layer, name), torch.float32) for name in ("gate_up", "down")}
    return replace(
        layer, first_expert=start, **{name: part[start:stop] for name, part in parts.items()}
    )


def cut(layer: ExpertLayer, rank: int, size: int) -> ExpertLayer:
    """The rank's columns of the routed and of the shared experts."""

    def rows(gate_up: Matrix) -> Tensor:
        halves = dequantised(gate_up, torch.float32).chunk(2, -2)
        return torch.cat([half.chunk(size, -2)[rank] for half in halves], -2)

    def columns(down: Matrix) -> Tensor:
        return dequantised(down, torch.float32).chunk(size, -1)[rank].contiguous()

    return replace(
        layer,
        gate_up=rows(layer.gate_up),
        down=columns(layer.down),
        shared_gate_up=rows(layer.shared_gate_up),
        shared_down=columns(layer.shared_down),
    )


def fp8(matrix: Matrix, block: tuple[int, int]) -> Fp8Matrix:
    """The matrix's numbers rounded to FP8, with a scale of its own for each block."""
    matrix = dequantised(matrix, torch.float32)
    *more, rows, columns = matrix.shape
    scales = rand(*more, rows // block[0], columns // block[1], seed=9).sigmoid()
    return Fp8Matrix(matrix.to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [5, 40])
@pytest.mark.parametrize(
    "blocks", [((16, 32), (32, 16)), ((48, 48), (48, 24)), ((8, 96), (96, 48))]
)
def test_fp8(dtype, num_rows, blocks) -> None:
    """Blocks that a step reads at once, in parts, or not at all since they are narrow."""
    plain, x = mixture(num=5, hidden=96, i=48, s=48, dtype=dtype), rand(num_rows, 96, dtype=dtype)
    up, down = blocks
    layer = replace(
        plain, gate_up=fp8(plain.gate_up, up), down=fp8(plain.down, down),
        shared_gate_up=fp8(plain.shared_gate_up, up), shared_down=fp8(plain.shared_down, down),
    )  # fmt: skip
    close(run(x, layer), OPS.experts(x, layer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_in_another_format(dtype) -> None:
    """Plain beside codes, codes beside plain numbers, and gate and up each in its own."""
    plain, x = mixture(num=5, hidden=96, i=48, s=48, dtype=dtype), rand(6, 96, dtype=dtype)
    coded = replace(plain, gate_up=fp8(plain.gate_up, (16, 32)), down=fp8(plain.down, (32, 16)))
    shared = fp8(plain.shared_gate_up, (48, 96))
    parts = (row_range(plain.shared_gate_up, 0, 48), row_range(shared, 48, 96))
    for layer in (
        coded,
        replace(plain, shared_gate_up=shared, shared_down=fp8(plain.shared_down, (96, 48))),
        replace(plain, shared_gate_up=StackedMatrix((parts[0], parts[1]))),
    ):
        close(run(x, layer), OPS.experts(x, layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "group"), [(6, 16), (6, 24), (40, 16)])
def test_int4(dtype, num_rows, group) -> None:
    """Codes and scales of their own everywhere; groups of 24 are too narrow for a step."""

    def matrix(*shape: int, group: int, seed: int) -> Int4Matrix:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=generator)
        scales = rand(*shape[:-1], shape[-1] // group, seed=seed).sigmoid() * 0.04
        return Int4Matrix(codes.to(torch.uint8), scales)

    plain, x = mixture(num=5, i=48, s=48, dtype=dtype), rand(num_rows, 80, dtype=dtype)
    layer = replace(
        plain, gate_up=matrix(5, 96, 80, group=16, seed=2),
        down=matrix(5, 80, 48, group=group, seed=3),
    )  # fmt: skip
    close(run(x, layer), OPS.experts(x, layer))
    layer = replace(
        layer, shared_gate_up=matrix(96, 80, group=16, seed=4),
        shared_down=matrix(80, 48, group=group, seed=5),
    )  # fmt: skip
    close(run(x, layer), OPS.experts(x, layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 6, 17, 130])
@pytest.mark.parametrize("normalised", [False, True])
def test_equal_scores_go_to_the_smaller_id(dtype, num_rows, normalised) -> None:
    """Sums of small integers are exact, so the scores are the definition's, and many are equal."""

    def integers(*shape: int, seed: int) -> Tensor:
        return rand(*shape, seed=seed).round().clamp(-1, 1).to(dtype)

    layer = mixture(num=37, hidden=48, top_k=10, dtype=dtype, normalised=normalised)
    layer = replace(layer, router=integers(37, 48, seed=1))
    x = integers(num_rows, 48, seed=0)
    x[0] = 0.0  # all scores are equal
    got = routed(x, layer, 16)
    weights, ids = definition.route(x, layer.router, 10, normalised)
    assert torch.equal(got.ids.long(), ids)
    close(got.weights, weights)
    close(got.gate, torch.sigmoid(x.float() @ layer.shared_gate.float().t()).squeeze(1))


def test_scores_that_are_no_numbers() -> None:
    """A row of NaN has experts all the same, which the others' results do not notice."""
    layer, x = mixture(), rand(4, 80)
    x[1] = float("nan")
    assert torch.equal(routed(x, layer, 8).ids[1], torch.tensor([0, 1, 2], dtype=torch.int32))
    got = run(x, layer).cpu()
    assert got[1].isnan().all()
    others = torch.tensor([0, 2, 3])
    close(got[others], OPS.experts(x[others], layer))


@pytest.mark.parametrize(("num_rows", "block_rows"), [(8, 8), (17, 8), (17, 16), (130, 16)])
def test_members_and_blocks(num_rows, block_rows) -> None:
    """Expert 3 has all rows, expert 5 none; of the experts only those from 2 to 8 are here."""
    layer, x = mixture(top_k=4), rand(num_rows, 80)
    x[:, 0], layer.router[:, 0] = 1.0, 0.0
    layer.router[3, 0], layer.router[5, 0] = 99.0, -99.0
    layer = experts_from(layer, 2, 9)
    got = routed(x, layer, block_rows)
    count, *entries = got.blocks.tolist()
    listed = [tuple(entries[3 * b : 3 * b + 3]) for b in range(count)]
    most = expert_routing.most_blocks(4 * num_rows, 7, block_rows)
    assert count <= most == len(entries) // 3
    members: dict[int, list[int]] = {}
    for local, first, number in listed:
        assert 0 < number <= block_rows
        assert first == len(members.setdefault(local, []))
        members[local] += got.members[local, first : first + number].tolist()
    _, ids = definition.route(x, layer.router, 4, True)
    for local in range(7):
        want = (ids == local + 2).flatten().nonzero().flatten().tolist()
        assert sorted(members.get(local, [])) == want
    assert len(members[1]) == num_rows
    assert 3 not in members
    close(run(x, layer), OPS.experts(x, layer))


def test_no_counts_make_more_blocks() -> None:
    """All ways to divide up to 9 pairs over three experts; one of them makes as many as that."""
    for pairs in range(1, 10):
        for rows in (2, 4):
            ways = [[a, b, pairs - a - b] for a in range(pairs + 1) for b in range(pairs + 1 - a)]
            blocks = [sum(-(-count // rows) for count in way) for way in ways]
            assert max(blocks) == expert_routing.most_blocks(pairs, 3, rows)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_others(dtype) -> None:
    """A row has the same bits beside any other rows, also NaN and infinity, and in each launch."""
    layer, x = mixture(dtype=dtype), rand(8, 80, dtype=dtype)
    other = rand(8, 80, seed=5, dtype=dtype)
    other[2], other[6] = float("nan"), float("inf")
    other[3] = x[3]
    first = run(x, layer)
    assert torch.equal(first, run(x, layer))
    assert torch.equal(first[3], run(other, layer)[3])
    assert torch.equal(first.flip(0), run(x.flip(0), layer))
