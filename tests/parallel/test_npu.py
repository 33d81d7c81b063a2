"""The NPU backend over a fake of torch_npu (tests/npu.py), one operation at a time, against Ops.

No NPU and no torch_npu are needed. Whole iterations: tests/model/test_npu_iterations.py; argument
names and shapes against the real package: test_npu_contract.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from outrider.model.step import Sampling
from outrider.parallel.backends import npu
from outrider.parallel.backends.npu import NpuOps
from outrider.parallel.device import DeviceError
from outrider.parallel.devices import claim_device
from outrider.parallel.formats import Fp8Matrix, Matrix, dequantised
from outrider.parallel.operands import ExpertLayer, GdnLayer
from outrider.parallel.ops import Ops
from tests.npu import FakeOps, FakeRuntime, open_fake
from tests.parallel import test_sampling
from tests.parallel.cases import attending_rows, written_rows
from tests.sampling import pick_by_hand

CPU = Ops()
BF16 = torch.bfloat16
VISIBLE = """
__version__ = __import__("torch").__version__
class npu:
    is_available = staticmethod(lambda: {count} > 0)
    device_count = staticmethod(lambda: {count})
    @classmethod
    def set_device(cls, index): cls.chosen = index
"""


def backend(*fused: torch.dtype) -> NpuOps:
    return NpuOps(torch.device("cpu"), FakeOps(), FakeRuntime(), frozenset(fused))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    atol = 2e-6 if got.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got, want, atol=atol, rtol=2**-7 if got.dtype == BF16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norms_and_gates_equal_the_definition(dtype: torch.dtype) -> None:
    ops = backend()
    x, y, z = (drawn(2, 3, 40, dtype=dtype, seed=i) for i in range(3))
    scale = 1.0 + drawn(40, dtype=dtype, seed=4).float() * 0.5  # a checkpoint's weight, plus one
    near(ops.rms_norm(x, scale, 1e-6), CPU.rms_norm(x, scale, 1e-6))
    for got, want in zip(
        ops.add_rms_norm(x, y, scale, 1e-6), CPU.add_rms_norm(x, y, scale, 1e-6), strict=True
    ):
        near(got, want)
    near(ops.swiglu(x), CPU.swiglu(x))
    for gate in ("silu", "sigmoid"):
        near(
            ops.gated_rms_norm(x, z, scale, 1e-6, gate),
            CPU.gated_rms_norm(x, z, scale, 1e-6, gate),
        )


def test_a_bfloat16_norm_does_not_round_one_plus_weight() -> None:
    """The weight 2^-8 is a bfloat16 number, 1 + 2^-8 is none."""
    x, scale = drawn(4, 64, dtype=BF16), torch.full((64,), 1.0 + 2**-8)
    want = CPU.rms_norm(x, scale, 1e-6)
    assert torch.equal(backend().rms_norm(x, scale, 1e-6), want)
    assert not torch.equal(CPU.rms_norm(x, scale.to(BF16).float(), 1e-6), want)


@pytest.mark.parametrize("n", [4, 0])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_keys_and_values_are_turned_and_land_in_their_pages(dtype: torch.dtype, n: int) -> None:
    batch, rows, m, d, width, page = 2, 3, 2, 32, 8, 128
    qk, v = drawn(batch, rows, n + m, d, dtype=dtype), drawn(batch, rows, m, d, dtype=dtype, seed=1)
    scale = (
        torch.cat(
            (drawn(1, d, seed=2).to(dtype).float().expand(n, -1), drawn(1, d, seed=3).expand(m, -1))
        )
        .to(dtype)
        .float()
        + 1.0
    )
    angle = drawn(batch, rows, 1, width // 2, seed=5)
    angle = torch.cat((angle, angle), -1)
    index = torch.tensor([[130, 131, 0], [5, 300, 0]])  # two padding rows, both in the null page
    where = written_rows(angle.cos(), angle.sin(), index)
    got, want = (torch.zeros(2, 3, page, m, d, dtype=dtype) for _ in range(2))
    q = backend().qk_norm_rope_write(qk, v, scale, 1e-6, *got, where)
    near(q, CPU.qk_norm_rope_write(qk, v, scale, 1e-6, *want, where))
    rows_of = [pages.flatten(1, 2) for pages in (got, want)]
    assert rows_of[0][:, 0].isnan().all()  # which of the two wins is not defined
    for pages in rows_of:
        pages[:, 0] = 0.0
    near(rows_of[0], rows_of[1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_fused_attention_sees_what_the_definition_sees(dtype: torch.dtype, rows: int) -> None:
    """Slots of different lengths, with pages in no order that are NaN beyond the lengths."""
    batch, n, m, d, page = 3, 4, 2, 32, 128
    length = torch.tensor([rows, 129, 250])
    table = torch.tensor([[5, 0], [2, 6], [4, 1]])
    k, v = (torch.full((7, page, m, d), float("nan"), dtype=dtype) for _ in range(2))
    for b in range(batch):
        for t in range(int(length[b])):
            for pages, seed in ((k, 7), (v, 8)):
                pages[table[b, t // page], t % page] = drawn(m, d, dtype=dtype, seed=seed * 999 + t)
    positions = length[:, None] - rows + torch.arange(rows)
    q, gate = drawn(batch, rows, n, d, dtype=dtype), drawn(batch, rows, n * d, dtype=dtype, seed=1)
    where = attending_rows(table, positions, length, (positions[:, -1] + 1).tolist())
    want = CPU.paged_attention(q, k, v, where, gate)
    near(backend(dtype).paged_attention(q, k, v, where, gate), want)


def test_float32_attention_is_the_definition() -> None:
    """Fused attention takes half precision only: float32 is plain torch, without host lists."""
    ops = backend(BF16)
    q, pages = drawn(1, 2, 4, 32), drawn(2, 2, 128, 2, 32)
    where = attending_rows(torch.tensor([[1]]), torch.tensor([[3, 4]]), torch.tensor([5]))
    arguments = (q, *pages, where, drawn(1, 2, 128))
    near(ops.paged_attention(*arguments), CPU.paged_attention(*arguments))
    assert ops._npu.calls == {}


def gdn_layer(coarse: bool, dtype: torch.dtype = BF16) -> GdnLayer:
    k, h, d, channels = 2, 4, 128, 2 * 2 * 128 + 4 * 128
    return GdnLayer(
        num_k_heads=k,
        num_v_heads=h,
        head_k_dim=d,
        head_v_dim=d,
        conv_weight=drawn(4, channels, dtype=dtype, seed=1),
        rate=-drawn(h, seed=2).exp(),
        dt_bias=drawn(h, seed=3),
        norm_weight=1 + 0.2 * drawn(d, seed=4),
        eps=1e-6,
        gate="silu",
        conv=drawn(3, 7, channels, dtype=dtype, seed=5),
        state=0.2 * drawn(3, h, d, d, seed=6),
        factors=torch.zeros(3, 4, k * d + h * d + h),
        coarse_state=coarse,
    )


def test_prompts_take_the_chunked_rule_where_the_state_may_be_coarse() -> None:
    """Prompts of different lengths. The other slot's state stays, and the memory stays float32."""
    mine, theirs, ops = gdn_layer(True), gdn_layer(True), backend()
    proj = drawn(2, 9, sum(mine.widths), dtype=BF16, seed=7)
    slots, counts = torch.tensor([2, 0]), torch.tensor([9, 4])
    got = ops.gdn_prefill(proj, mine, slots, counts)
    want = CPU.gdn_prefill(proj, theirs, slots, counts)
    assert ops._npu.calls["npu_chunk_gated_delta_rule"] == 1
    for b, count in enumerate(counts.tolist()):
        torch.testing.assert_close(got[b, :count], want[b, :count], atol=0.05, rtol=0.05)
    assert mine.state.dtype == torch.float32
    torch.testing.assert_close(mine.state, theirs.state, atol=0.02, rtol=0.02)
    assert torch.equal(mine.state[1], theirs.state[1])
    assert torch.equal(mine.conv[:, :3], theirs.conv[:, :3])


@pytest.mark.parametrize(("coarse", "dtype"), [(False, BF16), (True, torch.float32)])
def test_a_float32_state_is_never_rounded(coarse: bool, dtype: torch.dtype) -> None:
    mine, theirs, ops = gdn_layer(coarse, dtype), gdn_layer(coarse, dtype), backend()
    proj = drawn(1, 5, sum(mine.widths), dtype=dtype, seed=7)
    slots, counts = torch.tensor([1]), torch.tensor([5])
    near(ops.gdn_prefill(proj, mine, slots, counts), CPU.gdn_prefill(proj, theirs, slots, counts))
    torch.testing.assert_close(mine.state, theirs.state, atol=1e-6, rtol=1e-5)
    assert "npu_chunk_gated_delta_rule" not in ops._npu.calls


@pytest.mark.parametrize("rows", [2, 3, 6, 16, 17, 64])
def test_blocks_solve_as_substitution_does(rows: int) -> None:
    """Entries up to 1, for which a power series of the matrix would lose all digits."""
    lower, right = drawn(3, rows, rows).clamp(-1, 1), drawn(3, rows, 8, seed=1)
    lower = lower.tril() * torch.tensor([0.1, 0.4, 1.0])[:, None, None] / rows**0.5
    lower[2] = torch.ones(rows, rows).tril()
    want = torch.linalg.solve_triangular(
        lower.double(), right.double(), upper=False, unitriangular=True
    )
    mine, cpu = (ops.solve_unit_lower(lower, right).double() for ops in (backend(), CPU))
    assert (mine - want).abs().max() < 4 * (cpu - want).abs().max() + 1e-6


def test_the_least_id_wins_among_equals_and_nan_rows_yield_a_real_id() -> None:
    ops = backend()
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [float("nan")] * 4])
    pairs = torch.stack([ops.top_pair(part, 2 * i) for i, part in enumerate(logits.split(2, 1))])
    assert ops.choose_pair(pairs)[:2].tolist() == [1, 0]
    assert 0 <= ops.choose_pair(pairs)[2] < 4
    many = drawn(5, 64).round()
    assert torch.equal(ops.top_pair(many, 7), CPU.top_pair(many, 7))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["flat", "ties", "equal", "ruled out"])
def test_tokens_are_picked_as_by_hand(kind: str, ranks: int, monkeypatch) -> None:
    """Greedy, drawn and filtered rows in one batch, by the arg max of this device."""
    monkeypatch.setattr(test_sampling, "open_device", lambda *args: open_fake(args[-1]))
    calls = []
    for name in ("top_pair", "choose_pair"):
        own = getattr(NpuOps, name)
        monkeypatch.setattr(
            NpuOps, name, lambda *args, name=name, own=own: calls.append(name) or own(*args)
        )
    filters = [{}, *test_sampling.FILTERS.values()]
    logits = test_sampling.rows_of(kind, len(filters))
    samplings = [Sampling(temperature=1.1, seed=s, **f) for s, f in enumerate(filters)]
    samplings[0] = Sampling()
    positions = list(range(len(filters)))
    tokens = test_sampling.pick(logits, samplings, positions, ranks)
    assert tokens == [pick_by_hand(*row) for row in zip(logits, samplings, positions)]
    assert sorted(calls) == sorted(["top_pair", "choose_pair"] * ranks)


def test_a_capture_leaves_no_trace_and_a_replay_reads_the_lists_as_they_are_now() -> None:
    device = open_fake(_alone())
    ops, page = device.ops, 128
    q, k, v = drawn(1, 1, 2, 32), drawn(2, page, 1, 32, seed=1), drawn(2, page, 1, 32, seed=2)
    table, at, gate = torch.tensor([[1]]), torch.tensor([[2]]), torch.zeros(1, 1, 64)
    length = torch.zeros(1, dtype=torch.int64)
    ends, count = [3], torch.zeros(1)
    where = attending_rows(table, at, length, ends)

    def work() -> torch.Tensor:
        count.add_(1)
        return ops.paged_attention(q, k, v, where, gate)

    assert device.capture is not None
    replay, out, _ = device.capture(work, None)
    assert count == 0
    for end in (3, 77, 128):
        ends[0], at[0, 0] = end, end - 1
        calls = dict(ops._npu.calls)
        replay()
        assert ops._npu.calls == calls
        now = attending_rows(table, at, length, [end])
        near(out, ops.paged_attention(q, k, v, now, gate))
    assert count == 3


def mixture(dtype: torch.dtype, first: int, num: int) -> ExpertLayer:
    """Experts first..first + num of 7, of which each row has 3."""

    def matrix(*shape: int, seed: int) -> torch.Tensor:
        return (drawn(*shape, seed=seed) * shape[-1] ** -0.5).to(dtype)

    return ExpertLayer(
        router=drawn(7, 32, dtype=dtype, seed=1), top_k=3, normalised=True, first_expert=first,
        gate_up=matrix(7, 32, 32, seed=2)[first : first + num],
        down=matrix(7, 32, 16, seed=3)[first : first + num],
        shared_gate_up=matrix(16, 32, seed=4), shared_down=matrix(32, 8, seed=5),
        shared_gate=drawn(1, 32, dtype=dtype, seed=6),
    )  # fmt: skip


def in_codes(layer: ExpertLayer) -> ExpertLayer:
    def fp8(matrix: Matrix) -> Fp8Matrix:
        scales = drawn(*matrix.shape[:-2], matrix.shape[-2] // 8, matrix.shape[-1] // 16).sigmoid()
        return Fp8Matrix(dequantised(matrix, torch.float32).to(torch.float8_e4m3fn), scales)

    return replace(layer, gate_up=fp8(layer.gate_up), down=fp8(layer.down))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("first", "num"), [(0, 7), (2, 4), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_experts_equal_the_definition_in_graphs_too(
    dtype: torch.dtype, first: int, num: int, coded: bool
) -> None:
    """All experts and some of them, for other rows in each replay; 90 pairs are two copies."""
    device = open_fake(_alone(), dtypes=frozenset())
    ops, layer = device.ops, mixture(dtype, first, num)
    layer = in_codes(layer) if coded else layer
    x = drawn(2, 15, 32, dtype=dtype)
    near(ops.experts(x, layer), CPU.experts(x, layer))
    assert device.capture is not None
    replay, out, _ = device.capture(lambda: ops.experts(x, layer), None)
    for seed in (3, 4):
        x.copy_(drawn(2, 15, 32, dtype=dtype, seed=seed))
        replay()
        near(out, CPU.experts(x, layer))
    assert ops._npu.calls.get("npu_grouped_matmul", 0) == (0 if coded else 4)


def test_exhausted_streams_name_the_key_to_change() -> None:
    device = open_fake(_alone())

    def work() -> None:
        raise RuntimeError("rtStreamCreate failed, error code 207008")

    assert device.capture is not None
    with pytest.raises(RuntimeError, match=r"limits\.batch_buckets"):
        device.capture(work, None)


def test_a_device_that_cannot_be_used_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"pip install 'torch_npu==2\.13\.0'"):
        claim_device("npu", 0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that makes `import torch_npu` run some text, for one test."""

    def install(text: str) -> None:
        (tmp_path / "torch_npu.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    yield install
    sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libhccl.so: cannot open shared object file')", "CANN"),
        ("__version__ = '2.9.0.post1'", r"torch_npu 2\.9\.0\.post1 is built for torch 2\.9"),
        (VISIBLE.format(count=0), "sees no NPU"),
        (VISIBLE.format(count=2), "2 are visible"),
    ],
)
def test_a_package_or_host_that_does_not_fit_says_what_to_do(package, text, says) -> None:
    package(text)
    with pytest.raises(DeviceError, match=says):
        claim_device("npu", 2)


def test_a_rank_claims_the_npu_of_its_index(package) -> None:
    package(VISIBLE.format(count=2))
    claim_device("npu", 1)
    assert sys.modules["torch_npu"].npu.chosen == 1


def _alone():
    from outrider.parallel.group import alone

    return alone()
