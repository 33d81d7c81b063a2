"""The Triton kernels of Gated DeltaNet against model/gdn.py over CpuOps, pass after pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from model.cache import GdnStates, Rows
from model.gdn import GatedDeltaNet
from parallel.backends.cpu import CpuOps
from parallel.device import Device
from parallel.group import alone
from parallel.kernels.gdn import gdn_inputs, gdn_verify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference: of y in its dtype, of the float32 memory, and of the inputs."""
LAYERS, INDEX, SLOTS, TAPS, DK, DV = 2, 1, 5, 4, 12, 20
NAN = float("nan")


class Pair:
    """One layer twice: `layer` and `states` on the CPU, their copies in front of the kernels.

    The projections are the identity: the layer's input is the row [q | k | v | z | b | a].
    """

    def __init__(self, k: int, h: int, most: int, dtype: torch.dtype, gate: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.k, self.h, self.most, self.dtype = k, h, most, dtype
        self.c, self.taken = 2 * k * DK + h * DV, torch.zeros(SLOTS + 1, dtype=torch.int64)
        gdn = SimpleNamespace(
            num_k_heads=k, num_v_heads=h, head_k_dim=DK, head_v_dim=DV, conv_kernel=TAPS,
            key_dim=k * DK, value_dim=h * DV, gate=gate,
        )  # fmt: skip
        model = SimpleNamespace(gdn=gdn, gdn_layers=range(LAYERS), rms_norm_eps=1e-6)
        name = str(dtype).removeprefix("torch.")
        run = SimpleNamespace(max_slots=SLOTS, draft_tokens=most - 1, dtype=name)
        device = Device(torch_device=torch.device("cpu"), ops=CpuOps(), tp=alone())
        params = {f"in_proj_{part}.weight": torch.empty(0, 0) for part in ("qkv", "z", "b", "a")}
        params |= {"out_proj.weight": torch.empty(0, 0), "norm.weight": 1 + 0.2 * self.rand(DV)}
        params |= {"A_log": self.rand(h), "dt_bias": self.rand(h)}
        params["conv1d.weight"] = self.rand(self.c, 1, TAPS).to(dtype)
        self.states = GdnStates(model, run, device)
        self.layer = GatedDeltaNet(model, params, self.states, INDEX, device)
        self.layer.in_proj = self.layer.out_proj = lambda x: x
        self.states.state.normal_(generator=self.generator)
        self.states.conv.normal_(generator=self.generator)
        self.memory = [t.to(DEVICE, copy=True) for t in self.states.tensors()]
        self.arrivals = torch.zeros(2 * SLOTS * k, dtype=torch.int32, device=DEVICE)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def proj(self, batch: int, rows: int) -> Tensor:
        """Rows of a wider matrix, with gates from almost shut to wide open."""
        width = self.c + self.h * DV + 2 * self.h
        x = self.rand(batch, rows, width + 5)
        x[..., width - 2 * self.h :] *= 6.0
        return x.to(self.dtype)[..., :width]

    def on_cpu(self, proj: Tensor, slots: Tensor, waiting: int) -> Tensor:
        unused = torch.empty(0)
        rows = Rows(
            slots=slots, positions=unused, lengths=unused, block_table=unused, kv_index=unused,
            counts=unused, cos=unused, sin=unused, waiting=waiting,
        )  # fmt: skip
        return self.layer(proj, self.states.locate(rows))

    def in_kernels(self, proj: Tensor, slots: Tensor, waiting: int) -> tuple[Tensor, ...]:
        state, factors, conv = (t[INDEX] for t in self.memory)
        here = [slots.to(DEVICE), self.states.kept[slots].to(DEVICE)]
        layer, proj = self.layer, proj.to(DEVICE)
        weights = [t.to(DEVICE) for t in (layer.conv, layer.rate, layer.dt_bias, layer.norm)]
        inputs = gdn_inputs(proj, conv, *weights[:3], *here, self.k, self.h, DK, DV)
        z = proj[..., self.c : self.c + self.h * DV].unflatten(-1, (self.h, DV))
        y = gdn_verify(
            *inputs, z, state, factors, *here, waiting, weights[3], layer.eps, layer.gate,
            self.arrivals,
        )  # fmt: skip
        return y.cpu(), *(t.cpu() for t in inputs)

    def poison(self, slots: Tensor) -> None:
        """NaN in all that the kernels must not read: other slots, rows behind the kept ones."""
        state, factors, conv = self.memory
        unused = torch.ones(SLOTS + 1, dtype=torch.bool)
        unused[slots] = False
        for t in self.memory:
            t[:, unused.to(DEVICE)] = NAN
            t[1 - INDEX] = NAN
        for slot in slots.tolist():
            factors[INDEX, slot, int(self.states.kept[slot]) :] = NAN
            conv[INDEX, slot, int(self.states.kept[slot]) + TAPS - 1 :] = NAN

    def commit(self, slots: Tensor, kept: list[int]) -> None:
        self.states.commit(slots, torch.tensor(kept))

    def difference(self, slots: Tensor, rows: int) -> float:
        """Of the memory that a pass of `rows` leaves to the next."""
        state, factors, conv = (t[INDEX, slots.to(DEVICE)].cpu() for t in self.memory)
        window = TAPS - 1 + rows
        assert torch.equal(conv[:, :window], self.states.conv[INDEX, slots, :window])
        worst = (state - self.states.state[INDEX, slots]).abs().max()
        left = factors[:, :rows] - self.states.factors[INDEX, slots, :rows]
        return float(torch.maximum(worst, left.abs().max()))


CASES = [
    # B, R, k, h, dtype, gate
    (1, 1, 2, 2, torch.float32, "silu"),
    (1, 6, 1, 2, torch.float32, "sigmoid"),
    (3, 2, 1, 3, torch.float32, "silu"),
    (3, 6, 2, 2, torch.float32, "silu"),
    (3, 1, 2, 4, torch.float32, "silu"),
    (1, 17, 1, 1, torch.float32, "silu"),
    (3, 6, 1, 3, torch.bfloat16, "silu"),
    (1, 2, 2, 4, torch.bfloat16, "sigmoid"),
    (3, 1, 1, 1, torch.bfloat16, "silu"),
]


@pytest.mark.parametrize(("batch", "rows", "k", "h", "dtype", "gate"), CASES)
def test_passes_equal_the_definition(
    batch: int, rows: int, k: int, h: int, dtype: torch.dtype, gate: str
) -> None:
    """Ragged kept, slots out of order; nothing waits in the first pass."""
    pair = Pair(k, h, rows, dtype, gate)
    slots = torch.tensor([3, 0, 4])[:batch]
    for step in range(4):
        waiting = rows if step else 0
        proj = pair.proj(batch, rows)
        pair.poison(slots)
        want = pair.on_cpu(proj, slots, waiting)
        y, *_ = pair.in_kernels(proj, slots, waiting)
        assert y.dtype == dtype
        assert (y.float() - want.float()).abs().max() < TOLERANCE[dtype]
        assert pair.difference(slots, rows) < TOLERANCE[dtype]
        assert not pair.arrivals.any()
        pair.commit(slots, [1 + (step + 2 * b) % rows for b in range(batch)])
