"""RMS norms in Triton against the definition, alone and fused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.parallel.kernels import norms
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, DTYPES, EPS, close, on_device, rand
from tests.parallel.test_kernels_gdn_verify import DV, TOLERANCE, Pair

OPS = Ops()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96,), (1, 256), (5, 100), (2, 3, 64), (2, 3, 4, 32), (0, 8)])
def test_rms_norm(dtype, shape) -> None:
    x, scale = rand(*shape, dtype=dtype), rand(shape[-1], seed=1)
    close(norms.rms_norm(*on_device(x, scale), EPS), OPS.rms_norm(x, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_views_with_a_scale_a_head(dtype) -> None:
    """The heads are views of a wider projection, which is NaN elsewhere."""
    wide = torch.full((2, 3, 8 + 4 * 48 + 5), float("nan"), dtype=dtype)
    wide[..., 8 : 8 + 4 * 48] = rand(2, 3, 4 * 48, dtype=dtype)
    scale = rand(4, 48, seed=1)
    heads = wide[..., 8 : 8 + 4 * 48].unflatten(-1, (4, 48))
    got = norms.rms_norm(
        wide.to(DEVICE)[..., 8 : 8 + 4 * 48].unflatten(-1, (4, 48)), scale.to(DEVICE), EPS
    )
    close(got, OPS.rms_norm(heads, scale, EPS))
    flat = wide[:, :, 8:56]
    got = norms.rms_norm(wide.to(DEVICE)[:, :, 8:56], scale[0].to(DEVICE), EPS)
    close(got, OPS.rms_norm(flat, scale[0], EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 130), (2, 3, 64)])
def test_add_rms_norm(dtype, shape) -> None:
    """The sum is rounded before it is normed; the residual is a view of wider rows."""
    x, scale = rand(*shape, dtype=dtype), rand(shape[-1], seed=1)
    residual = rand(*shape[:-1], shape[-1] + 7, seed=2, dtype=dtype)[..., 7:]
    total = x + residual
    normed, added = norms.add_rms_norm(*on_device(x, residual, scale), EPS)
    close(added, total)
    if DEVICE == "cuda" or dtype == torch.float32:
        assert torch.equal(added.cpu(), total)
    close(normed, OPS.rms_norm(total, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 6)])
def test_embed_rms_norm(dtype, shape) -> None:
    table, scale = rand(11, 100, dtype=dtype), rand(100, seed=1)
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))
    want = OPS.embed_rms_norm(tokens, table, scale, EPS)
    got = norms.embed_rms_norm(*on_device(tokens, table, scale), EPS)
    close(got[0], want[0])
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mtp_input(dtype) -> None:
    """Token ids and hiddens are views of wider tensors."""
    table, scales = rand(11, 64, dtype=dtype), rand(2, 64, seed=1)
    tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))[:, :2]
    hidden = rand(3, 4, 64, seed=2, dtype=dtype)[:, :2]
    want = OPS.mtp_input(tokens, table, hidden, *scales, EPS)
    tokens, table, hidden, scales = on_device(tokens, table, hidden, scales)
    close(norms.mtp_input(tokens, table, hidden, *scales, EPS), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_rms_norm(dtype, gate) -> None:
    pair = Pair(2, 6, 4, dtype, gate)
    proj = pair.proj(2, 5)
    z = proj.split_with_sizes(pair.layer.widths, -1)[1].unflatten(-1, (6, DV))
    x = pair.rand(2, 5, 6, DV).to(dtype)
    want = OPS.gated_rms_norm(x, z, pair.layer.norm_weight, 1e-6, gate)
    there = proj.to(DEVICE).split_with_sizes(pair.layer.widths, -1)[1].unflatten(-1, (6, DV))
    weight = pair.layer.norm_weight.to(DEVICE)
    got = norms.gated_rms_norm(x.to(DEVICE), there, weight, 1e-6, gate)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=near, atol=near)
