"""Operations that are more than one call of torch, against loops in float64."""

from __future__ import annotations

import pytest
import torch

from outrider.parallel.operands import GdnLayer
from outrider.parallel.ops import Ops
from tests.parallel.cases import attending_rows, commit_case, written_rows

OPS = Ops()


def gdn_inputs(rows: int, strong: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    b, k, h, dk, dv = 3, 2, 6, 8, 12
    qk = OPS.gdn_qk_norm(rand(b, rows, 2, k, dk))
    rate = torch.full((h,), -15.0 if strong else -0.4)
    g, beta = OPS.gdn_gates(
        rand(b, rows, h) + (8.0 if strong else 0.0), rand(b, rows, h), rate, torch.zeros(h)
    )
    return qk, rand(b, rows, h, dv), g, beta, rand(b, h, dk, dv)


def recurrent(qk, v, g, beta, state):
    """The delta rule in float64, row by row: decay the state, compute delta, add it, read."""
    qk, v, g, beta, state = (t.double() for t in (qk, v, g, beta, state))
    q, k = qk.unbind(2)
    q = q * q.shape[-1] ** -0.5
    repeat = v.shape[2] // k.shape[2]
    states, outs = [state], []
    for t in range(q.shape[1]):
        qt, kt = q[:, t].repeat_interleave(repeat, 1), k[:, t].repeat_interleave(repeat, 1)
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, kt)
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + kt.unsqueeze(-1) * delta.unsqueeze(-2)
        states.append(state)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, qt))
    return torch.stack(outs, 1), states


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 17, 64])
def test_rows_and_fold_equal_the_recurrence(rows: int, strong: bool) -> None:
    """Also with decays of e^-100 a row, where differences of running sums of g lose all digits."""
    inputs = gdn_inputs(rows, strong)
    want, states = recurrent(*inputs)
    qk, _, g, _, state = inputs
    k = qk[:, :, 1]
    out, delta = OPS.gdn_rows(*inputs)
    assert (out - want).abs().max() < 5e-6
    for kept in {0, 1, rows // 2, rows}:
        folded = OPS.gdn_fold(state, k, delta, g, torch.tensor([kept] * 3))
        assert (folded - states[kept]).abs().max() < 5e-6
    mixed = torch.tensor([0, rows, 1])
    folded = OPS.gdn_fold(state, k, delta, g, mixed)
    for b, kept in enumerate(mixed.tolist()):
        assert (folded[b] - states[kept][b]).abs().max() < 5e-6


def delta_net(groups: list[int], *, in_turn: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Passes of 9 rows over the same text, of which the first groups[i] are kept -> y of the kept
    rows, and the state after the last of them."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    k, h, dk, dv, taps, rows = 2, 4, 16, 24, 4, 9
    channels = 2 * k * dk + h * dv
    layer = GdnLayer(
        num_k_heads=k, num_v_heads=h, head_k_dim=dk, head_v_dim=dv,
        conv_weight=rand(taps, channels), rate=-rand(h).abs(), dt_bias=rand(h),
        norm_weight=rand(dv), eps=1e-6, gate="silu",
        conv=rand(1, taps - 1 + rows, channels), state=rand(1, h, dk, dv),
        factors=torch.zeros(1, rows, k * dk + h * dv + h), rows_in_turn=in_turn,
    )  # fmt: skip
    text = rand(1, sum(groups) + rows, channels + h * dv + 2 * h)
    slot, kept, at, ys = torch.tensor([0]), torch.tensor([0]), 0, []
    for group in groups:
        proj = text[:, at : at + rows].clone()
        proj[:, group:] += 1.0  # rejected rows: drafts that the text does not hold
        ys.append(OPS.gdn_verify(proj, layer, slot, kept, rows if at else 0)[:, :group])
        kept, at = torch.tensor([group]), at + group
    OPS.gdn_verify(text[:, :rows], layer, slot, kept, rows)
    return torch.cat(ys, 1), layer.state


@pytest.mark.parametrize("groups", [[9, 3], [4, 4, 4], [1, 9, 2]])
def test_delta_net_rows_in_turn_are_the_same_bits_in_whatever_pass(groups: list[int]) -> None:
    """What speculation.pin_rows promises on the CPU."""
    for got, want in zip(delta_net(groups, in_turn=True), delta_net([1] * 12, in_turn=True)):
        assert torch.equal(got, want)
    for got, want in zip(delta_net(groups, in_turn=False), delta_net([1] * 12, in_turn=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_attention_reads_only_its_own_keys() -> None:
    """Different lengths, several query heads a kv head, pages in no order, NaN everywhere else."""
    generator = torch.Generator().manual_seed(0)
    page, m, n, d = 4, 2, 6, 16
    lengths = [9, 1, 16]
    k_pages = torch.full((20, page, m, d), float("nan"))
    v_pages = k_pages.clone()
    table = torch.tensor([[7, 2, 11, 0], [5, 0, 0, 0], [3, 9, 1, 4]])
    rows = 3
    q = torch.randn(3, rows, n, d, generator=generator)
    positions = torch.stack([torch.arange(rows) + max(0, x - rows) for x in lengths])
    want = []
    for b, length in enumerate(lengths):
        k = torch.randn(length, m, d, generator=generator)
        v = torch.randn(length, m, d, generator=generator)
        index = torch.tensor([[int(table[b, t // page]) * page + t % page for t in range(length)]])
        k_pages.flatten(0, 1)[index[0]], v_pages.flatten(0, 1)[index[0]] = k, v
        for r in range(rows):
            seen = min(int(positions[b, r]) + 1, length)
            kk = k[:seen].repeat_interleave(n // m, 1).double()
            vv = v[:seen].repeat_interleave(n // m, 1).double()
            scores = torch.einsum("nd,tnd->nt", q[b, r].double(), kk) * d**-0.5
            want.append(torch.einsum("nt,tnd->nd", scores.softmax(-1), vv))
    gate = torch.randn(3, rows, n * d, generator=generator)
    seen = attending_rows(table, positions, torch.tensor(lengths))
    got = OPS.paged_attention(q, k_pages, v_pages, seen, gate)
    gated = torch.stack(want).view(3, rows, -1) * torch.sigmoid(gate.double())
    assert (got - gated).abs().max() < 1e-6


def test_conv_is_causal_and_its_last_tap_is_the_current_row() -> None:
    window = torch.randn(2, 3 + 5, 7, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    want = torch.zeros(2, 5, 7)
    for t in range(5):
        for j in range(4):
            want[:, t] += weight[j] * window[:, t + j]
    want = want * torch.sigmoid(want)
    assert (OPS.causal_conv(window, weight, 5) - want).abs().max() < 1e-6


def test_q_and_k_are_normed_by_head_and_rotated_by_position() -> None:
    """Against complex numbers. k and v are written where the index says, q is returned."""
    generator = torch.Generator().manual_seed(0)
    n, m, d, half = 3, 2, 12, 2
    qk = torch.randn(1, 4, n + m, d, generator=generator)
    v = torch.randn(1, 4, m, d, generator=generator)
    scale = torch.randn(n + m, d, generator=generator)
    angle = torch.randn(1, 4, 1, half, generator=generator)
    both = torch.cat((angle, angle), -1)
    pages = torch.zeros(2, 3, 4, m, d)  # k and v: 3 pages of 4
    index = torch.tensor([[9, 2, 4, 11]])
    turned_rows = written_rows(both.cos(), both.sin(), index)
    q = OPS.qk_norm_rope_write(qk, v, scale, 1e-6, *pages, turned_rows)
    normed = qk.double() / (qk.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    turned = torch.complex(normed[..., :half], normed[..., half : 2 * half])
    turned = turned * torch.exp(1j * angle.double())
    want = torch.cat((turned.real, turned.imag, normed[..., 2 * half :]), -1)
    assert (q - want[:, :, :n]).abs().max() < 1e-6
    rows = pages.flatten(1, 2)
    assert (rows[0, index[0]] - want[0, :, n:]).abs().max() < 1e-6
    assert torch.equal(rows[1, index[0]], v[0])
    assert rows.count_nonzero() == 2 * 4 * m * d


def test_the_best_pair_is_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, -1.0, 7.0, 7.0]])
    pairs = torch.stack(
        [OPS.top_pair(part, first) for part, first in zip(logits.split(2, 1), (0, 2))]
    )
    assert pairs.dtype == torch.int32
    assert OPS.choose_pair(pairs).tolist() == [1, 0, 2]


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_accept_keeps_the_agreeing_prefix_and_advances_the_slots(num_drafts: int) -> None:
    slots, drafts, targets, limits, hidden, memory = commit_case(num_drafts, batch=200)
    before = memory.length.clone()
    kept = OPS.accept_commit(slots, drafts, targets, limits, hidden, memory)
    for b, slot in enumerate(slots.tolist()):
        n = 0
        while n < limits[b] and drafts[b, n] == targets[b, n]:
            n += 1
        assert kept[b] == memory.kept[slot] == memory.fold[slot] == n + 1
        longer = 0 if slot == len(before) - 1 else before[slot] + n + 1  # the last is padding
        assert memory.length[slot] == longer
        assert memory.last[slot] == targets[b, n]
        assert torch.equal(memory.fresh[slot, : num_drafts + 1], targets[b])
        assert torch.equal(memory.hidden[slot, : num_drafts + 1], hidden[b])
    others = [s for s in range(len(memory.length)) if s not in slots.tolist()]
    assert torch.equal(memory.length[others], before[others])
