"""Sums and choices over ranks in Triton, against all_reduce and choose_pair in plain torch.

Without a GPU each rank is a process, its buffers are shared memory, and kernels run interpreted.
On one GPU the ranks are streams of it: their kernels wait for each other there as they do on two.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

import tests.parallel.conftest  # noqa: F401  (also in the processes: interpreted where no GPU is)
from outrider.parallel.backends.cuda import CudaOps
from outrider.parallel.group import Group, OneShotBuffers, TwoShotBuffers
from outrider.parallel.kernels import matmul, one_shot, two_shot
from outrider.parallel.kernels.argmax import top_keys
from outrider.parallel.ops import Ops
from tests.parallel.cases import DEVICE, EPS, close, rand, run_ranks

ROWS, WORDS = 8, 64
SHAPES = [(1, 1, 128), (2, 3, 100), (8, 128)]
VOCABULARY = 5000
MANY = [(37, 128), (2, 9, 104), (4, 128)]
"""Of two_shot, whose programs have several tiles at the first and none at the last."""
PROGRAMS, ELEMENTS = 2, 48 * 128


def one_shot_buffers(received: list[Tensor], device: str) -> list[OneShotBuffers]:
    """The buffers of each rank around its packets (one_shot_memory)."""
    addresses, size = torch.tensor([t.data_ptr() for t in received], device=device), len(received)
    numbers = torch.zeros(size, ROWS, dtype=torch.int32, device=device)
    return [OneShotBuffers(received[r], addresses, numbers[r], r, size) for r in range(size)]


def one_shot_memory(size: int, device: str) -> list[Tensor]:
    """`received` of each rank; it must live until the other ranks have written to it."""
    shape = (2, size, ROWS, WORDS)
    return [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(size)]


def two_shot_buffers(memory: list[tuple[Tensor, ...]], device: str) -> list[TwoShotBuffers]:
    """The buffers of each rank around its parts, results and flags (two_shot_memory)."""
    lists = [[t.data_ptr() for t in each] for each in zip(*memory, strict=True)]
    addresses, size = torch.tensor(lists, device=device), len(memory)
    numbers = torch.zeros(size, PROGRAMS, dtype=torch.int32, device=device)
    return [TwoShotBuffers(*memory[r], addresses, numbers[r], r, size) for r in range(size)]


def two_shot_memory(size: int, device: str) -> list[tuple[Tensor, ...]]:
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return [
        (
            zeros(size, ELEMENTS // size),
            zeros(ELEMENTS),
            zeros(2, size, PROGRAMS, dtype=torch.int32),
        )
        for _ in range(size)
    ]


def many(rank: int, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """As few, for two_shot."""
    shape = MANY[call % len(MANY)]
    part = rand(*shape, seed=10 * call + rank, dtype=torch.bfloat16)
    return part, rand(*shape, seed=call, dtype=torch.bfloat16), rand(shape[-1], seed=call)


def summed_by(rank: int, size: int, total: Tensor) -> Tensor:
    """total [.., d] with zeros in place of the rows that other ranks sum."""
    flat = total.flatten(0, -2)
    owner = torch.arange(len(flat), device=total.device) // two_shot.rows_of(total.shape[-1]) % size
    return torch.where((owner == rank)[:, None], flat, 0.0)


def few(rank: int, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """part, residual and scale of one call; in one of them a part is infinite."""
    shape = SHAPES[call % len(SHAPES)]
    part = rand(*shape, seed=10 * call + rank, dtype=torch.bfloat16)
    if call == 2:
        part[3, 5] = float("inf")
    return part, rand(*shape, seed=call, dtype=torch.bfloat16), rand(shape[-1], seed=call)


def factors(rank: int, call: int) -> tuple[Tensor, Tensor]:
    """x and w of a product that is one rank's part."""
    shape = SHAPES[call % len(SHAPES)]
    x = rand(*shape[:-1], 72, seed=20 * call + rank, dtype=torch.bfloat16)
    return x, rand(shape[-1], 72, seed=rank, dtype=torch.bfloat16) / 8


def logits(rank: int) -> Tensor:
    """Two rows that tie over the ranks, one that does not."""
    x = rand(3, VOCABULARY, seed=rank, dtype=torch.bfloat16)
    x[0, 7 + rank] = x[1, 4999 - rank] = 50.0
    return x


def inputs(rank: int, device: str) -> list[tuple[Tensor, ...]]:
    """The inputs of all calls in one shot, made before the first call: a copy to a GPU would wait
    for kernels that wait for other ranks."""
    made = [
        (*few(rank, call), logits(rank), *factors(rank, call)) for call in range(2 * len(SHAPES))
    ]
    return [tuple(t.to(device) for t in tensors) for tensors in made]


def more_inputs(rank: int, device: str) -> list[tuple[Tensor, ...]]:
    """The inputs of all calls in two shots."""
    made = [many(rank, call) for call in range(2 * len(MANY))]
    return [tuple(t.to(device) for t in tensors) for tensors in made]


def more_calls(buffers: TwoShotBuffers, given: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """One rank's calls in two shots; the other ranks make the same at the same time."""
    results = []
    for part, residual, scale in given:
        y, total = two_shot.sum_add_rms_norm(part, residual, scale, EPS, buffers)
        results += y.clone(), summed_by(buffers.rank, buffers.size, total)
    return results


def calls(
    ops: CudaOps, rank: int, buffers: OneShotBuffers, given: list[tuple[Tensor, ...]]
) -> list[Tensor]:
    """One rank's calls in one shot; the other ranks make the same at the same time.

    Every second sum is made as layers make it: its part is a product, which has sent it.
    """
    group, results = Group(), []
    group.one_shot = buffers
    for call, (part, residual, scale, best, x, w) in enumerate(given):
        results += one_shot.sum_add_rms_norm(part, residual, scale, EPS, buffers)
        assert matmul.can_send(x, w, buffers)
        product = ops.linear_part(x, w, group)
        assert product.sent
        results += ops.sum_add_rms_norm(product, residual, scale, EPS)
        if call % 2:
            keys = top_keys(best)
            results.append(one_shot.choose_over_ranks(keys, rank * VOCABULARY, buffers))
    return results


def prepare(rank: int, size: int, given: list[tuple[Tensor, ...]], device: str) -> list[Tensor]:
    """Run each kernel of a rank where it waits for no other: every packet already has number 1.

    Compiling and loading a kernel, and a stream's first memory, may wait for all of a device.
    """
    results = []
    for part, residual, scale, best, x, w in given:
        memory = [one_shot_memory(size, device) for _ in range(3)]
        one, two, other = (
            one_shot_buffers([t.fill_((1 << 32) | 1) for t in received], device)[rank]
            for received in memory
        )
        results += one_shot.sum_add_rms_norm(part, residual, scale, EPS, one)
        part = matmul.few_rows_sent(x, w, two)
        results += one_shot.sum_add_rms_norm(part, residual, scale, EPS, two, sent=True)
        results.append(one_shot.choose_over_ranks(top_keys(best), rank * VOCABULARY, other))
    return results


def prepare_more(rank: int, size: int, given: list[tuple[Tensor, ...]], device: str) -> None:
    """As prepare, for the kernel of two_shot: every flag already has number 1."""
    for each in given:
        memory = two_shot_memory(size, device)
        for _, _, flags in memory:
            flags.fill_(1)
        more_calls(two_shot_buffers(memory, device)[rank], [each])


def body(rank: int, shared: list[Tensor], more: list[tuple[Tensor, ...]], queue) -> None:
    torch.set_num_threads(1)
    prepare(rank, len(shared), inputs(rank, "cpu")[:2], "cpu")
    prepare_more(rank, len(shared), more_inputs(rank, "cpu")[:1], "cpu")
    ops = CudaOps(torch.device("cpu"))
    results = calls(ops, rank, one_shot_buffers(shared, "cpu")[rank], inputs(rank, "cpu"))
    results += more_calls(two_shot_buffers(more, "cpu")[rank], more_inputs(rank, "cpu"))
    queue.put((rank, [t.tolist() for t in results]))


def run(size: int) -> list[list[Tensor]]:
    """The results of every rank, as CPU tensors."""
    shared, more = one_shot_memory(size, DEVICE), two_shot_memory(size, DEVICE)
    if DEVICE == "cuda":
        return run_on_streams(shared, more)
    for tensor in (*shared, *(tensor for of_rank in more for tensor in of_rank)):
        tensor.share_memory_()
    results = run_ranks(body, [(shared, more)] * size)
    return [[torch.tensor(t) for t in of_rank] for of_rank in results]


def run_on_streams(shared: list[Tensor], more: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """As run, on one GPU, whose streams are the ranks."""
    size, results = len(shared), []
    one, two = one_shot_buffers(shared, DEVICE), two_shot_buffers(more, DEVICE)
    streams = [torch.cuda.Stream() for _ in shared]
    ops = [CudaOps(torch.device(DEVICE)) for _ in shared]
    given = [inputs(rank, DEVICE) for rank in range(size)]
    more_given = [more_inputs(rank, DEVICE) for rank in range(size)]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            prepare(rank, size, given[rank], DEVICE)
            prepare_more(rank, size, more_given[rank], DEVICE)
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            results.append(calls(ops[rank], rank, one[rank], given[rank]))
            results[-1] += more_calls(two[rank], more_given[rank])
    torch.cuda.synchronize()
    return [[t.cpu() for t in mine] for mine in results]


def test_a_part_says_whether_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the sums of two groups are pending at once."""
    ops, groups, completed = CudaOps(torch.device(DEVICE)), [Group(), Group()], []
    memory = [one_shot_memory(2, DEVICE) for _ in groups]
    for group, received in zip(groups, memory, strict=True):
        group.one_shot = one_shot_buffers(received, DEVICE)[0]
    monkeypatch.setattr(one_shot, "sum_add_rms_norm", lambda *_, sent: completed.append(sent))
    x, w = (t.to(DEVICE) for t in factors(0, 0))
    parts = [ops.linear_part(x, w, group) for group in groups]
    narrow = x[..., :70], w[:, :70].contiguous()  # not a multiple of 16 bytes: not sent
    parts.append(ops.linear_part(*narrow, groups[0]))
    for part in parts:
        ops.sum_add_rms_norm(part, part.values, w[:, 0].float(), EPS)
    assert completed == [True, True, False]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sum_and_choose_as_the_collectives_do(size: int) -> None:
    got = run(size)
    wide = [mine[-4 * len(MANY) :] for mine in got]
    got = [mine[: -4 * len(MANY)] for mine in got]
    check_many(wide, size)
    for rank, mine in enumerate(got):
        for a, b in zip(mine, got[0], strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"rank {rank} differs from rank 0"
    results, ops = iter(got[0]), Ops()
    for call in range(2 * len(SHAPES)):
        parts = [few(rank, call)[0] for rank in range(size)]
        _, residual, scale = few(0, call)
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        want = ops.add_rms_norm(total, residual, scale, EPS)
        finite = want[1].isfinite().all(-1)
        assert finite.all() or call == 2
        for expected in want:
            close(next(results).to(torch.bfloat16)[finite], expected[finite])
        parts = [ops.linear(*factors(rank, call)) for rank in range(size)]
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        for expected in ops.add_rms_norm(total, residual, scale, EPS):
            close(next(results).to(torch.bfloat16), expected)
        if call % 2:
            pairs = [ops.top_pair(logits(r), r * VOCABULARY) for r in range(size)]
            assert torch.equal(next(results), ops.choose_pair(torch.stack(pairs)))


def check_many(got: list[list[Tensor]], size: int) -> None:
    """Every rank has all norms, and of the residual stream the rows that it sums."""
    ops = Ops()
    for call in range(2 * len(MANY)):
        parts = [many(rank, call)[0] for rank in range(size)]
        _, residual, scale = many(0, call)
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        norm, stream = ops.add_rms_norm(total, residual, scale, EPS)
        for rank, mine in enumerate(got):
            close(mine[2 * call].to(torch.bfloat16), norm)
            close(mine[2 * call + 1].to(torch.bfloat16), summed_by(rank, size, stream))
