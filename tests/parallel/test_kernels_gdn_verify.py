"""The Triton kernels of the delta net's verify pass against Ops.gdn_verify, pass after pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.parallel.kernels import gdn_verify
from outrider.parallel.operands import GdnLayer
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2 if DEVICE == "cuda" else 6e-2}
"""Relative and absolute. Triton's interpreter truncates to bfloat16 where a GPU rounds."""
LAYERS, INDEX, SLOTS, PADDING, TAPS, DK, DV = 2, 1, 6, 5, 4, 20, 12
NAN = float("nan")


class Pair:
    """A layer twice: `layer` for Ops, and its copy `own` in the memory of several layers for the
    kernels. fold [SLOTS] is how many rows of each slot the next pass folds."""

    def __init__(self, k: int, h: int, most: int, dtype: torch.dtype, gate: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.dtype, self.fold = dtype, torch.zeros(SLOTS, dtype=torch.int64)
        self.channels = 2 * k * DK + h * DV
        self.layer = GdnLayer(
            num_k_heads=k,
            num_v_heads=h,
            head_k_dim=DK,
            head_v_dim=DV,
            conv_weight=self.rand(TAPS, self.channels).to(dtype),
            rate=-self.rand(h).exp(),
            dt_bias=self.rand(h),
            norm_weight=1 + 0.2 * self.rand(DV),
            eps=1e-6,
            gate=gate,
            conv=self.rand(SLOTS, TAPS - 1 + most, self.channels).to(dtype),
            state=self.rand(SLOTS, h, DK, DV),
            factors=torch.zeros(SLOTS, most, k * DK + h * DV + h),
        )
        memory = [self.layer.conv, self.layer.state, self.layer.factors]
        self.memory = [torch.stack([t] * LAYERS).to(DEVICE) for t in memory]
        conv, state, factors = (t[INDEX] for t in self.memory)
        self.own = replace(self.layer, conv=conv, state=state, factors=factors)
        self.arrivals = torch.zeros(3 * k, dtype=torch.int32, device=DEVICE)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def proj(self, batch: int, rows: int) -> Tensor:
        """A view of a wider matrix; the gates are near 0, near 1 and between."""
        x = self.rand(batch, rows, sum(self.layer.widths) + 5)
        x[..., self.channels + self.layer.num_v_heads * DV :] *= 6.0
        return x.to(self.dtype)[..., :-5]

    def on_cpu(self, proj: Tensor, slots: Tensor, max_fold: int) -> Tensor:
        return Ops().gdn_verify(proj, self.layer, slots, self.fold[slots], max_fold)

    def in_kernels(self, proj: Tensor, slots: Tensor, max_fold: int) -> Tensor:
        where = (slots.to(DEVICE), self.fold[slots].to(DEVICE), max_fold)
        return gdn_verify.gdn_verify(proj.to(DEVICE), self.on_device(), *where, self.arrivals).cpu()

    def on_device(self) -> GdnLayer:
        """`own` with its weights where the kernels run."""
        names = ("conv_weight", "rate", "dt_bias", "norm_weight")
        return replace(self.own, **{name: getattr(self.own, name).to(DEVICE) for name in names})

    def poison(self, slots: Tensor) -> None:
        """NaN in what must have no influence: other slots and layers, and rows not to be folded."""
        unused = torch.ones(SLOTS, dtype=torch.bool)
        unused[slots] = False
        for t in self.memory:
            t[:, unused.to(DEVICE)] = NAN
            t[1 - INDEX] = NAN
        for slot in slots.tolist():
            fold = int(self.fold[slot])
            self.own.factors[slot, fold:] = NAN
            self.own.conv[slot, fold + TAPS - 1 :] = NAN

    def check_memory(self, slots: Tensor, rows: int) -> None:
        """Compare what a pass of `rows` rows leaves in the memory."""
        own, want, here = self.own, self.layer, slots.to(DEVICE)
        self.check(own.state[here], want.state[slots])
        self.check(own.factors[here, :rows], want.factors[slots, :rows])
        window = slice(TAPS - 1 + rows)
        assert torch.equal(own.conv[here, window].cpu(), want.conv[slots, window])
        assert not self.arrivals.any()

    def check(self, got: Tensor, want: Tensor) -> None:
        near = TOLERANCE[self.dtype]
        torch.testing.assert_close(got.cpu(), want, rtol=near, atol=near)


CASES = [
    # B, R, k, h, dtype, gate
    (1, 1, 2, 2, torch.float32, "silu"),
    (1, 6, 1, 2, torch.float32, "sigmoid"),
    (3, 2, 1, 3, torch.float32, "silu"),
    (3, 6, 2, 2, torch.float32, "silu"),
    (3, 1, 1, 2, torch.float32, "silu"),
    (1, 17, 1, 1, torch.float32, "silu"),
    (1, 6, 1, 3, torch.bfloat16, "silu"),
    (1, 2, 2, 4, torch.bfloat16, "sigmoid"),
    (3, 1, 1, 1, torch.bfloat16, "silu"),
]


@pytest.mark.parametrize(("batch", "rows", "k", "h", "dtype", "gate"), CASES)
def test_passes_equal_the_definition(
    batch: int, rows: int, k: int, h: int, dtype: torch.dtype, gate: str
) -> None:
    """Slots in no order, of which none to all rows are folded; in a first pass there are none."""
    pair, slots = Pair(k, h, rows, dtype, gate), torch.tensor([3, 0, 4])[:batch]
    for step in range(3):
        max_fold = rows if step or batch > 1 else 0
        proj = pair.proj(batch, rows)
        pair.poison(slots)
        want = pair.on_cpu(proj, slots, max_fold)
        got = pair.in_kernels(proj, slots, max_fold)
        assert got.dtype == dtype
        pair.check(got, want)
        pair.check_memory(slots, rows)
        fold = [(rows - step + 5 * b) % (rows + 1) for b in range(batch)]
        pair.fold[slots] = torch.tensor(fold)


@pytest.mark.parametrize("shape", ["NARROW", "WIDE"])
def test_programs_of_either_width(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of fewer rows than the one before; a slot's memory has room for more than either."""
    monkeypatch.setattr(gdn_verify, "FEW_COLUMNS", 10**9 if shape == "NARROW" else 0)
    pair, slots = Pair(1, 1, 5, torch.float32, "silu"), torch.tensor([2])
    for rows, max_fold, fold in ((4, 0, 3), (2, 4, 1), (1, 4, 1)):
        proj = pair.proj(1, rows)
        pair.poison(slots)
        pair.check(pair.in_kernels(proj, slots, max_fold), pair.on_cpu(proj, slots, max_fold))
        pair.check_memory(slots, rows)
        pair.fold[slots] = fold


def test_padding_may_hold_nan_and_appear_twice() -> None:
    pair, slots = Pair(1, 1, 2, torch.float32, "silu"), torch.tensor([PADDING, 2, PADDING])
    pair.fold[slots] = torch.tensor([2, 1, 2])
    proj = pair.proj(3, 2)
    pair.poison(slots)
    for t in pair.memory:
        t[:, PADDING] = NAN
    proj[0] = NAN
    want = pair.on_cpu(proj, slots, 2)
    pair.check(pair.in_kernels(proj, slots, 2)[1], want[1])
    pair.check_memory(slots[1:2], 2)
