"""Sampling in Triton equals its definition in plain torch, on one rank and on several.

Several ranks are processes whose buffers are shared memory, and kernels run interpreted there. On
GPUs tests/actors/test_gpu.py compares two ranks with one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import tests.parallel.conftest  # noqa: F401  (also in the processes: interpreted where no GPU is)
from outrider.model.sampling import SamplingMemory
from outrider.model.step import Join, Sampling
from outrider.parallel import sampling as defined
from outrider.parallel.device import Device
from outrider.parallel.group import Group, OneShotBuffers, alone
from outrider.parallel.kernels import matmul, noise, sampling, scan
from outrider.parallel.kernels.argmax import pair_of
from outrider.parallel.operands import PickRows, SamplingFeatures
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, rand, run_ranks

WIDE = 1500
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, seed=3, top_k=20, top_p=0.95),
    Sampling(temperature=1.5, seed=1 << 40, top_p=0.9),
    Sampling(temperature=1.0, seed=5, top_k=300),
    Sampling(temperature=1.0, seed=6, top_k=300, top_p=0.7, logprobs=3),
    Sampling(temperature=1.0, seed=7, min_p=0.02),
    Sampling(temperature=0.6, seed=8, top_p=1e-6, logprobs=0),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5, logprobs=20),
    Sampling(
        temperature=0.9, seed=2, top_k=40, min_tokens=9, logit_bias=((17, 4.0), (1499, -9.0)),
        max_tokens=20,
    ),
    Sampling(temperature=1.0, seed=9, top_p=0.9, allowed_ids=(3, 7, 33, 640, 1400), logprobs=2,
             banned_ids=(33,), min_tokens=9),
    Sampling(banned_ids=tuple(range(0, 1500, 2))),
]  # fmt: skip
EVERYTHING = SamplingFeatures(drawn=True, filtered=True, edited=True, logprobs=20)


ROWS = 8
"""Rows for which the ranks' buffers have places."""


def memory_of(settings: list[Sampling], width: int, group: Group | None = None) -> SamplingMemory:
    where = Device(torch_device=torch.device(DEVICE), ops=Ops(), tp=group or alone())
    memory = SamplingMemory(len(settings), 2, width, where)
    for slot, how in enumerate(settings):
        end_ids = [1, 2, 3, 4]
        memory.reset(
            Join(slot=slot, request=slot, tokens=[5, 9, 9, 40], pages=[], sampling=how,
                 end_ids=end_ids)
        )  # fmt: skip
    return memory


def rows_of(num_slots: int, num_rows: int, shift: int = 0) -> PickRows:
    generator = torch.Generator().manual_seed(4)
    count = max(1, num_rows - 1 + shift)
    return PickRows(
        slots=torch.randperm(num_slots, generator=generator).to(DEVICE),
        last=(torch.arange(num_slots) * 3 + 4).to(DEVICE),
        shift=shift,
        drafts=torch.randint(0, 50, (num_slots, count), generator=generator).to(DEVICE),
    )


def by_definition(
    logits: Tensor, rows: PickRows, memory: SamplingMemory, features: SamplingFeatures
) -> tuple[Tensor, ...]:
    ops = Ops()
    ops.head_logits = lambda *_: logits
    unused = torch.empty(0)
    return ops.pick_ids(unused, unused, None, 0, alone(), rows, memory.by_slot, features)


def test_noise_is_that_of_the_definition() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(seeds, positions, out, COUNT: tl.constexpr):
        row, ids = tl.program_id(0), tl.arange(0, COUNT)
        first, second = noise.row_keys(tl.load(seeds + row), tl.load(positions + row))
        tl.store(out + row * COUNT + ids, noise.noise(first, second, ids))

    seeds = torch.tensor([0, 3, 1 << 40, (1 << 63) - 1], device=DEVICE)
    positions = torch.tensor([0, 1, 262_143, 7], device=DEVICE)
    got = torch.empty(4, 4096, device=DEVICE)
    kernel[(4,)](seeds, positions, got, COUNT=4096)
    want = defined.gumbel(seeds, positions, torch.arange(4096, device=DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "spread"),
    [(torch.float32, 2, 1.0), (torch.bfloat16, 1, 1.0), (torch.bfloat16, 2, 5.0)],
)
def test_every_kind_of_row_is_picked_as_defined(dtype, num_rows, spread) -> None:
    """Flat rows need the search, peaked ones do not; rows share a launch with all other kinds."""
    memory, rows = memory_of(SETTINGS, WIDE), rows_of(len(SETTINGS), num_rows, shift=1)
    logits = rand(len(SETTINGS), num_rows, WIDE).mul(spread).to(dtype).to(DEVICE)
    got = sampling.pick_ids(logits, 0, None, rows, memory.by_slot, 20, exact=True)
    want = by_definition(logits.float(), rows, memory, EVERYTHING)
    assert torch.equal(got[0], want[0])
    reported = memory.by_slot.reported[rows.slots]
    assert torch.equal(got[1][reported], want[1][reported])
    torch.testing.assert_close(got[2][reported], want[2][reported], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [WIDE, 2100])
def test_masks_forbid_ids_as_defined(width: int) -> None:
    """Every other slot has a grammar: it allows half of the ids, or a single one. The masks of the
    other slots are stale, and so is all that drafts could read of them."""
    memory, rows = memory_of(SETTINGS, width), rows_of(len(SETTINGS), 2, shift=0)
    logits = rand(len(SETTINGS), 2, width).to(DEVICE)
    bits = rand(len(SETTINGS), 2, width).gt(0).numpy().astype("uint8")
    bits[2, 1], bits[2, 1, width - 1], bits[4, 0], bits[4, 0, 33] = 0, 1, 0, 1
    for slot in range(len(SETTINGS)):
        memory.set_masks(slot, np.packbits(bits[slot], axis=1, bitorder="little"))
    memory.by_slot.masked[::2] = True
    how = (rows, memory.by_slot)
    got, *_ = sampling.pick_ids(logits, 0, None, *how, 20, exact=True)
    want, *_ = by_definition(logits, rows, memory, replace(EVERYTHING, masked=True))
    plain, *_ = by_definition(logits, rows, memory, EVERYTHING)
    assert torch.equal(got, want)
    constrained = (rows.slots % 2 == 0).tolist()
    for index, slot in enumerate(rows.slots.tolist()):
        for row in range(2):
            assert not constrained[index] or bits[slot, row, int(got[index, row])]
        assert constrained[index] or torch.equal(got[index], plain[index])
    assert (got != plain).any()
    drafts, *_ = sampling.pick_ids(logits, 0, None, *how, None, exact=False)
    memory.by_slot.masked[:] = False
    free, *_ = sampling.pick_ids(logits, 0, None, *how, None, exact=False)
    assert torch.equal(drafts, free)


def constrain(memory: SamplingMemory) -> None:
    """Grammars that leave ids of one rank alone to some slots, drawn and filtered ones."""
    for slot, allowed in ((1, [3]), (2, [WIDE - 1, WIDE - 9]), (5, [7, 800, WIDE - 1])):
        bits = np.zeros((2, WIDE), dtype=np.uint8)
        bits[:, allowed] = 1
        memory.set_masks(slot, np.packbits(bits, axis=1, bitorder="little"))
        memory.by_slot.masked[slot] = True


def one_rank(rank: int, received: list[Tensor], queue: Any) -> None:
    """Pick the tokens of the rows of ranks_logits as one of len(received) ranks."""
    torch.set_num_threads(1)
    size, share = len(received), WIDE // len(received)
    addresses = torch.tensor([t.data_ptr() for t in received])
    sequence = torch.zeros(ROWS, dtype=torch.int32)
    buffers = OneShotBuffers(received[rank], addresses, sequence, rank, size)
    group = Group()
    group.rank, group.size = rank, size
    memory = memory_of(SETTINGS, WIDE, group)
    constrain(memory)
    rows = rows_of(len(SETTINGS), 2)
    logits = rand(len(SETTINGS), 2, WIDE)[..., rank * share : (rank + 1) * share].contiguous()
    how = (rank * share, buffers, rows, memory.by_slot)
    drafts = sampling.pick_ids(logits[:, :1], *how, None, exact=False)
    got = sampling.pick_ids(logits, *how, 20, exact=True)
    queue.put((rank, [part.tolist() for part in (*got, *drafts)]))


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels of ranks on one GPU would be loaded too late")
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_pick_as_one_does(size: int) -> None:
    """More rows than the buffers have places for, so that there are several launches."""
    received = [torch.zeros(2, size, ROWS, 128, dtype=torch.int64) for _ in range(size)]
    results = run_ranks(one_rank, [([t.share_memory_() for t in received],)] * size)
    ids, top_ids, top_values, drafts = (torch.tensor(part) for part in results[0])
    for rank in range(1, size):
        assert results[rank][0] == ids.tolist()
        assert results[rank][3] == drafts.tolist()
    memory, rows = memory_of(SETTINGS, WIDE), rows_of(len(SETTINGS), 2)
    constrain(memory)
    logits = rand(len(SETTINGS), 2, WIDE)
    want = by_definition(logits, rows, memory, replace(EVERYTHING, masked=True))
    assert torch.equal(ids, want[0])
    reported = memory.by_slot.reported[rows.slots]
    assert torch.equal(top_ids[reported], want[1][reported])
    torch.testing.assert_close(top_values[reported], want[2][reported], rtol=1e-5, atol=1e-5)
    # The kept set of a draft may be cut, and it has no mask, so only most drafts are the target's
    # own choice.
    assert (drafts[:, 0] == ids[:, 0]).sum() >= len(SETTINGS) - 3 - 3


@pytest.mark.parametrize("width", [40, 64, 2048, 2049])
def test_any_width_of_a_slice(width: int) -> None:
    settings = [how for how in SETTINGS if not how.logit_bias and how.logprobs is None]
    memory, rows = memory_of(settings, width), rows_of(len(settings), 2)
    logits = rand(len(settings), 2, width).to(DEVICE)
    got = sampling.pick_ids(logits, 0, None, rows, memory.by_slot, None, exact=True)
    features = SamplingFeatures(drawn=True, filtered=True, edited=True)
    assert torch.equal(got[0], by_definition(logits, rows, memory, features)[0])


def test_rows_that_are_ruled_out_nearly_or_wholly() -> None:
    settings = [Sampling(temperature=1.0, seed=1, **f) for f in ({"top_k": 9}, {"top_p": 0.5}, {})]
    memory, rows = memory_of(settings * 2, WIDE), rows_of(6, 1)
    logits = torch.full((6, 1, WIDE), float("-inf"), device=DEVICE)
    logits[:3, 0, 77] = 2.0
    (got,) = sampling.pick_ids(logits, 0, None, rows, memory.by_slot, None, exact=True)
    assert got[:3, 0].tolist() == [77] * 3
    assert ((got >= 0) & (got < WIDE)).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_pick_ids_that_exist(value: float, exact: bool) -> None:
    """In all ids of a row or in some; and they do not change the other rows."""
    memory, rows = memory_of(SETTINGS, WIDE), rows_of(len(SETTINGS), 2)
    logits = rand(len(SETTINGS), 2, WIDE)
    logits[::2, 0], logits[1::2, 0, 7:1400:11] = value, value
    got = sampling.pick_ids(logits.to(DEVICE), 0, None, rows, memory.by_slot, 20, exact=exact)
    assert ((got[0] >= 0) & (got[0] < WIDE)).all()
    if exact:
        want = by_definition(logits.to(DEVICE), rows, memory, EVERYTHING)
        assert torch.equal(got[0][:, 1], want[0][:, 1])


def test_ties_go_to_the_smaller_id() -> None:
    settings = [
        Sampling(),
        *(Sampling(temperature=1.0, seed=s, top_k=k) for s, k in ((1, 1), (2, 3), (3, 700))),
    ]
    memory, rows = memory_of(settings, WIDE), rows_of(4, 2)
    logits = torch.zeros(4, 2, WIDE, device=DEVICE)
    (got,) = sampling.pick_ids(logits, 0, None, rows, memory.by_slot, None, exact=True)
    features = SamplingFeatures(drawn=True, filtered=True)
    assert torch.equal(got, by_definition(logits, rows, memory, features)[0])
    limits = memory.by_slot.top_k[rows.slots]
    assert (got[limits > 0] < limits[limits > 0].unsqueeze(1)).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_the_head_draws_while_it_scores(num_rows: int, fp8: bool) -> None:
    """The head's own kernel and the one that reads stored logits pick the same ids."""
    if fp8 and DEVICE == "cpu":
        pytest.skip("the interpreter has no product of float8")
    settings = [Sampling(), Sampling(temperature=0.7, seed=9), Sampling(temperature=1.3, seed=1)]
    memory, width = memory_of(settings, 300), 300
    slots = (torch.arange(num_rows) % 3).to(DEVICE)
    rows = PickRows(slots=slots, last=torch.arange(num_rows, device=DEVICE), shift=2)
    x = rand(num_rows, 128, dtype=torch.bfloat16).to(DEVICE)
    w = rand(width, 128, seed=1, dtype=torch.bfloat16).to(DEVICE)
    scales = None
    if fp8:
        from outrider.parallel.vocab import quantise_rows

        w, scales = quantise_rows(w)
    logits = matmul.head_logits(x, w, scales)
    how = matmul.Sampled(0, 1, rows, memory.by_slot)
    fused = pair_of(matmul.head_keys(x, w, scales, how), 0)
    apart = pair_of(scan.noised_keys(logits, 0, rows, memory.by_slot), 0)
    assert torch.equal(fused, apart)
    if not fp8:
        close = torch.nn.functional.linear(x.float(), w.float())
        torch.testing.assert_close(logits.float(), close, rtol=0.02, atol=0.1)
    features = SamplingFeatures(drawn=True)
    (want,) = by_definition(logits.unsqueeze(1), rows, memory, features)
    assert torch.equal(fused[:, 1].long(), want[:, 0])
