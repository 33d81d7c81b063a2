"""Sums and choices over ranks in Triton, against all_reduce and choose_pair in plain torch.

Without a GPU each rank is a process, its inbox shared memory, and the kernels run interpreted. On
one GPU the ranks are streams of it: their kernels wait for each other there as they do on two.
"""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing

pytest.importorskip("triton")

from torch import Tensor

import tests.parallel.conftest  # noqa: F401  (also in the processes: interpreted where no GPU is)
from outrider.parallel.backends.cuda import CudaOps
from outrider.parallel.group import Group, Hall, Mail
from outrider.parallel.kernels import matmul, peer, two_shot
from outrider.parallel.kernels.rows import top_keys
from outrider.parallel.ops import Ops
from tests.parallel.test_kernels_rows import DEVICE, EPS, close, rand

ROWS, WORDS = 8, 64
SHAPES = [(1, 1, 128), (2, 3, 100), (8, 128)]
VOCABULARY = 5000
MANY = [(37, 128), (2, 9, 104), (4, 128)]
"""Of two_shot, whose programs take several turns at the first and none at the last."""
PROGRAMS, ROOM = 2, 48 * 128


def mails(inboxes: list[Tensor], device: str) -> list[Mail]:
    addresses = torch.tensor([t.data_ptr() for t in inboxes], device=device)
    turns = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in inboxes]
    return [Mail(inboxes[r], addresses, turns[r], r, len(inboxes)) for r in range(len(inboxes))]


def inboxes(size: int, device: str) -> list[Tensor]:
    shape = (2, size, ROWS, WORDS)
    return [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(size)]


def halls(places: list[tuple[Tensor, ...]], device: str) -> list[Hall]:
    """places: parts, room and flags of each rank."""
    addresses = [[t.data_ptr() for t in each] for each in zip(*places, strict=True)]
    peers, size = torch.tensor(addresses, device=device), len(places)
    turns = [torch.zeros(PROGRAMS, dtype=torch.int32, device=device) for _ in places]
    return [Hall(*places[r], peers, turns[r], r, size) for r in range(size)]


def places(size: int, device: str) -> list[tuple[Tensor, ...]]:
    half, whole = (
        {"dtype": torch.bfloat16, "device": device},
        {"dtype": torch.int32, "device": device},
    )
    return [
        (
            torch.zeros(size, ROOM // size, **half),
            torch.zeros(ROOM, **half),
            torch.zeros(2, size, PROGRAMS, **whole),
        )
        for _ in range(size)
    ]


def many(rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """case() of two_shot."""
    shape = MANY[turn % len(MANY)]
    part = rand(*shape, seed=10 * turn + rank, dtype=torch.bfloat16)
    return part, rand(*shape, seed=turn, dtype=torch.bfloat16), rand(shape[-1], seed=turn)


def owned(total: Tensor, rank: int, size: int) -> Tensor:
    """The rows [.., d] that `rank` keeps, the others zero."""
    flat = total.flatten(0, -2)
    owner = torch.arange(len(flat), device=total.device) // two_shot.rows_of(total.shape[-1]) % size
    return torch.where((owner == rank)[:, None], flat, 0.0)


def case(rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """part, residual and scale of one call; a NaN and an infinity must come through as well."""
    shape = SHAPES[turn % len(SHAPES)]
    part = rand(*shape, seed=10 * turn + rank, dtype=torch.bfloat16)
    if turn == 2:
        part[3, 5] = float("inf")
    return part, rand(*shape, seed=turn, dtype=torch.bfloat16), rand(shape[-1], seed=turn)


def factors(rank: int, turn: int) -> tuple[Tensor, Tensor]:
    """x and w of a product that is one rank's part."""
    shape = SHAPES[turn % len(SHAPES)]
    x = rand(*shape[:-1], 72, seed=20 * turn + rank, dtype=torch.bfloat16)
    return x, rand(shape[-1], 72, seed=rank, dtype=torch.bfloat16) / 8


def logits(rank: int) -> Tensor:
    """Two rows that tie over the ranks, one that does not."""
    x = rand(3, VOCABULARY, seed=rank, dtype=torch.bfloat16)
    x[0, 7 + rank] = x[1, 4999 - rank] = 50.0
    return x


def inputs(rank: int, device: str) -> list[tuple[Tensor, ...]]:
    """Of every call, there before the first: a copy to a GPU would wait for what waits for it."""
    turns = range(2 * len(SHAPES))
    moved = [(*case(rank, turn), logits(rank), *factors(rank, turn)) for turn in turns]
    return [tuple(t.to(device) for t in tensors) for tensors in moved]


def more_inputs(rank: int, device: str) -> list[tuple[Tensor, ...]]:
    moved = [many(rank, turn) for turn in range(2 * len(MANY))]
    return [tuple(t.to(device) for t in tensors) for tensors in moved]


def more_calls(hall: Hall, given: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What one rank does in the second part."""
    results = []
    for part, residual, scale in given:
        y, total = two_shot.sum_add_rms_norm(part, residual, scale, EPS, hall)
        results += y.clone(), owned(total, hall.rank, hall.size)
    return results


def calls(ops: CudaOps, rank: int, mail: Mail, given: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What one rank does; the other ranks do the same at the same time.

    The second sum of a turn is as layers take it: its part is a product, which has sent it.
    """
    group, results = Group(), []
    group.mail = mail
    for turn, (part, residual, scale, best, x, w) in enumerate(given):
        results += peer.sum_add_rms_norm(part, residual, scale, EPS, mail)
        assert matmul.can_send(x, w, mail)
        product = ops.linear_part(x, w, group)
        assert product.sent
        results += ops.sum_add_rms_norm(product, residual, scale, EPS)
        if turn % 2:
            results.append(peer.choose_over_ranks(top_keys(best), rank * VOCABULARY, mail))
    return results


def prepare(rank: int, size: int, given: list[tuple[Tensor, ...]], device: str) -> list[Tensor]:
    """Run each kernel of a rank where nobody is waited for: every word shows turn 1 already.

    Compiling and loading a kernel, and a stream's first memory, may wait for all of a device.
    """
    results = []
    for part, residual, scale, best, x, w in given:
        boxes = [inboxes(size, device) for _ in range(3)]  # alive until they are written to
        one, two, other = (
            mails([b.fill_((1 << 32) | 1) for b in own], device)[rank] for own in boxes
        )
        results += peer.sum_add_rms_norm(part, residual, scale, EPS, one)
        part = matmul.few_rows_sent(x, w, two)
        results += peer.sum_add_rms_norm(part, residual, scale, EPS, two, sent=True)
        results.append(peer.choose_over_ranks(top_keys(best), rank * VOCABULARY, other))
    return results


def prepare_more(rank: int, size: int, given: list[tuple[Tensor, ...]], device: str) -> None:
    for each in given:
        there = places(size, device)
        for _, _, flags in there:
            flags.fill_(1)
        more_calls(halls(there, device)[rank], [each])


def body(rank: int, shared: list[Tensor], rooms: list[tuple[Tensor, ...]], queue) -> None:
    torch.set_num_threads(1)
    prepare(rank, len(shared), inputs(rank, "cpu")[:2], "cpu")
    prepare_more(rank, len(shared), more_inputs(rank, "cpu")[:1], "cpu")
    ops = CudaOps(torch.device("cpu"))
    results = calls(ops, rank, mails(shared, "cpu")[rank], inputs(rank, "cpu"))
    results += more_calls(halls(rooms, "cpu")[rank], more_inputs(rank, "cpu"))
    queue.put((rank, [t.tolist() for t in results]))


def run(size: int) -> list[list[Tensor]]:
    """The results of every rank, as CPU tensors."""
    rooms = places(size, DEVICE)
    if DEVICE == "cuda":
        made, meets = mails(inboxes(size, DEVICE), DEVICE), halls(rooms, DEVICE)
        streams = [torch.cuda.Stream() for _ in made]
        ops = [CudaOps(torch.device(DEVICE)) for _ in made]
        given = [inputs(rank, DEVICE) for rank in range(size)]
        more = [more_inputs(rank, DEVICE) for rank in range(size)]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                prepare(rank, size, given[rank], DEVICE)
                prepare_more(rank, size, more[rank], DEVICE)
        results = []
        torch.cuda.synchronize()
        for rank, (mail, stream) in enumerate(zip(made, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(calls(ops[rank], rank, mail, given[rank]))
                results[-1] += more_calls(meets[rank], more[rank])
        torch.cuda.synchronize()
        return [[t.cpu() for t in mine] for mine in results]
    context = torch.multiprocessing.get_context("spawn")
    shared, queue = [t.share_memory_() for t in inboxes(size, DEVICE)], context.Queue()
    rooms = [tuple(t.share_memory_() for t in of_rank) for of_rank in rooms]
    ranks = [context.Process(target=body, args=(r, shared, rooms, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    try:
        results = dict(queue.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
    return [[torch.tensor(t) for t in results[rank]] for rank in range(size)]


def test_a_part_says_whether_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the sums of two groups are pending at once."""
    ops, groups, completed = CudaOps(torch.device(DEVICE)), [Group(), Group()], []
    boxes = [inboxes(2, DEVICE) for _ in groups]  # alive until they are written to
    for group, own in zip(groups, boxes, strict=True):
        group.mail = mails(own, DEVICE)[0]
    monkeypatch.setattr(peer, "sum_add_rms_norm", lambda *_, sent: completed.append(sent))
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
    for turn in range(2 * len(SHAPES)):
        parts = [case(rank, turn)[0] for rank in range(size)]
        _, residual, scale = case(0, turn)
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        want = ops.add_rms_norm(total, residual, scale, EPS)
        finite = want[1].isfinite().all(-1)
        assert finite.all() or turn == 2
        for expected in want:
            close(next(results).to(torch.bfloat16)[finite], expected[finite])
        parts = [ops.linear(*factors(rank, turn)) for rank in range(size)]
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        for expected in ops.add_rms_norm(total, residual, scale, EPS):
            close(next(results).to(torch.bfloat16), expected)
        if turn % 2:
            pairs = [ops.top_pair(logits(r), r * VOCABULARY) for r in range(size)]
            assert torch.equal(next(results), ops.choose_pair(torch.stack(pairs)))


def check_many(got: list[list[Tensor]], size: int) -> None:
    """Every rank has all norms, and its own rows of the stream."""
    ops = Ops()
    for turn in range(2 * len(MANY)):
        parts = [many(rank, turn)[0] for rank in range(size)]
        _, residual, scale = many(0, turn)
        total = torch.stack(parts).float().sum(0).to(torch.bfloat16)
        norm, stream = ops.add_rms_norm(total, residual, scale, EPS)
        for rank, mine in enumerate(got):
            close(mine[2 * turn].to(torch.bfloat16), norm)
            close(mine[2 * turn + 1].to(torch.bfloat16), owned(stream, rank, size))
