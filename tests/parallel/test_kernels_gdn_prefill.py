"""The kernels before a prompt's delta rule against the parts of Ops.gdn_prefill."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import gdn_prefill
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE
from tests.parallel.test_kernels_gdn_verify import SLOTS, TAPS, TOLERANCE, Pair

OPS = Ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "counts"), [(1, (1, 1)), (2, (2, 1)), (40, (40, 33)), (70, (3, 70))]
)
def test_inputs_and_window_chunk_after_chunk(dtype, rows, counts) -> None:
    """Two chunks of two slots; the second starts from the window that the first has stored."""
    pair = Pair(2, 6, 4, dtype, "silu")
    slots, count = torch.tensor([3, 1]), torch.tensor(counts)
    layer, where = pair.on_device(), (slots.to(DEVICE), count.to(DEVICE))
    real = torch.arange(rows) < count[:, None]
    near = TOLERANCE[dtype]
    for _ in range(2):
        proj = pair.proj(2, rows)
        qk, v, g, beta, window = OPS._prefill_inputs(proj, pair.layer, slots)
        out = torch.zeros(*v.shape)
        state = pair.layer.state.index_select(0, slots)
        OPS._prefill_end(out, proj, pair.layer, slots, count, window, state)
        got = gdn_prefill.chunk_inputs(proj.to(DEVICE), layer, *where)
        gdn_prefill.keep_window(proj.to(DEVICE), layer, *where)
        want = (*qk.unbind(2), v, g * real[..., None], beta * real[..., None])
        for mine, its in zip(want, got, strict=True):
            torch.testing.assert_close(its.cpu().float(), mine, rtol=near, atol=near)
        before = TAPS - 1
        assert torch.equal(layer.conv[where[0], :before].cpu(), pair.layer.conv[slots, :before])
    others = [s for s in range(SLOTS) if s not in slots.tolist()]
    assert torch.equal(layer.conv[others].cpu(), pair.layer.conv[others])
