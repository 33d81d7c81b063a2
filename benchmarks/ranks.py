"""Runners as plain processes, one a device, without Ray: correctness first, then time.

    planted checkpoint -> ranks meet -> every batch size: outputs against the chain, counters, TPOT

    python -m benchmarks.ranks CKPT --device cuda --size 2 --k 5 --batch 1,8,32 [--profile FILE]

The last line of stdout is one JSON object. Greedy; the checkpoint is one of benchmarks/planted.py.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import planted
from model.config import RunConfig, load_config
from model.plan import overshoot_rows, pages_for
from model.runner import Runner
from model.step import Join, Sampling
from parallel import group
from parallel.device import claim_device, collective_kind, open_device


def drive(runner: Runner, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Run prompts together; -> tokens, counters and times of this rank."""
    run = runner.run
    need = pages_for(
        len(prompts[0]) + num_tokens + overshoot_rows(run.draft_tokens), run.page_tokens
    )
    joins = [
        Join(
            slot=i,
            request=i,
            tokens=prompt,
            pages=list(range(1 + i * need, 1 + (i + 1) * need)),
            sampling=Sampling(max_tokens=num_tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    drafted = accepted = iterations = 0
    first: list[float] = []
    before = total = steps = 0
    started = time.perf_counter()
    runner.apply(joins)
    while runner.has_work:
        progress = runner.step()
        steps += 1
        for p in progress:
            if not outputs[p.request]:
                first.append(time.perf_counter())
            outputs[p.request] += p.tokens
            total += len(p.tokens)
            drafted, accepted = drafted + p.drafted, accepted + p.accepted
            iterations += p.verified
        if len(first) == len(prompts) and not before:
            before, steps = total, 0  # all decode from here on: the rest is what is timed
    ended = time.perf_counter()
    return {
        "outputs": outputs,
        "drafted": drafted,
        "accepted": accepted,
        "iterations": iterations,
        "ttft_s": first[0] - started,
        "e2e_s": ended - started,
        "decode_s": ended - max(first),
        "decode_tokens": total - before,
        "decode_steps": steps,
    }


def measure(
    runner: Runner, chain: planted.Chain, batch: int, prompt: int, new: int, repeats: int
) -> dict[str, Any]:
    """One batch size: exactness on every repeat, medians of the times."""
    vocab, runs, exact = len(chain.next), [], True
    for repeat in range(repeats + 1):
        generator = torch.Generator().manual_seed(100 * batch + repeat)
        prompts = torch.randint(0, vocab, (batch, prompt), generator=generator).tolist()
        result = drive(runner, prompts, new)
        for ids, output in zip(prompts, result["outputs"], strict=True):
            want = planted.expected_counts(chain, ids[-1], new, runner.run.draft_tokens)
            exact &= output == want.tokens
        if repeat:
            runs.append(result)
    rate = statistics.median(r["decode_tokens"] / r["decode_s"] for r in runs)
    return {
        "batch": batch,
        "exact": exact,
        "tpot_ms": 1e3 * batch / rate,
        "tok_s": rate,
        "ttft_ms": 1e3 * statistics.median(r["ttft_s"] for r in runs),
        "e2e_ms": 1e3 * statistics.median(r["e2e_s"] for r in runs),
        "accepted": sum(r["accepted"] for r in runs) / max(1, sum(r["drafted"] for r in runs)),
        "ms_per_step": 1e3 * statistics.median(r["decode_s"] / r["decode_steps"] for r in runs),
    }


def body(rank: int, port: int, options: dict[str, Any], queue: Any) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    device, size = options["device"], options["size"]
    store = group.join_store("127.0.0.1", port)
    claim_device(device, rank)
    kind = options["collective"] or collective_kind(device)
    device_of = open_device(device, rank, group.connect(store, rank, size, kind))
    folder, batches = Path(options["checkpoint"]), options["batches"]
    longest = options["prompt"] + options["new"]
    run = RunConfig(
        model_dir=str(folder),
        dtype=options["dtype"],
        tensor_parallel=size,
        draft_tokens=options["k"],
        draft_body=options["draft_body"],
        draft_head=options["draft_head"],
        max_slots=max(batches),
        max_model_len=longest,
        num_pages=2
        + max(batches) * pages_for(longest + overshoot_rows(options["k"]), options["page_tokens"]),
        page_tokens=options["page_tokens"],
        prefill_chunk=options["chunk"],
    )
    started = time.perf_counter()
    runner = Runner(run, device_of)
    runner.warm_up()
    load_s = time.perf_counter() - started
    vocab = load_config(folder).vocab_size
    chain = planted.chain(vocab, options["accept"], options["seed"])
    shape = (options["prompt"], options["new"], options["repeats"])
    rows = [measure(runner, chain, batch, *shape) for batch in batches]
    if rank == 0:
        for row in rows:
            print(row, flush=True)
    if options["profile"] and rank == 0:
        profile(runner, chain, options)
    elif options["profile"]:
        drive(runner, [[1] * options["prompt"]], 64)
    queue.put((rank, {"load_s": load_s, "rows": rows}))
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)


def profile(runner: Runner, chain: planted.Chain, options: dict[str, Any]) -> None:
    """Device time by kernel over one request, as a table in a file."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        drive(runner, [[1] * options["prompt"]], 64)
    table = trace.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=70
    )
    Path(options["profile"]).write_text(table)


def main(
    checkpoint: Path,
    device: str = "cpu",
    size: int = 2,
    k: int = 5,
    batch: str = "1",
    prompt: int = 2048,
    new: int = 256,
    repeats: int = 3,
    chunk: int = 2048,
    dtype: str = "bfloat16",
    draft_body: str = "local",
    draft_head: str = "model",
    page_tokens: int = 64,
    accept: float = 0.8425,
    seed: int = 0,
    collective: Annotated[str, typer.Option(help="Empty: the device's own.")] = "",
    profile: Annotated[str, typer.Option(help="File for a kernel table.")] = "",
) -> None:
    """Measure; JSON on the last line."""
    options = {
        "checkpoint": str(checkpoint),
        "device": device,
        "size": size,
        "k": k,
        "batches": [int(b) for b in batch.split(",")],
        "prompt": prompt,
        "new": new,
        "repeats": repeats,
        "chunk": chunk,
        "dtype": dtype,
        "draft_body": draft_body,
        "draft_head": draft_head,
        "page_tokens": page_tokens,
        "accept": accept,
        "seed": seed,
        "collective": collective,
        "profile": profile,
    }
    context = multiprocessing.get_context("spawn")
    store, queue = group.host_store("127.0.0.1"), context.Queue()
    ranks = [
        context.Process(target=body, args=(r, store.port, options, queue)) for r in range(size)
    ]
    for process in ranks:
        process.start()
    while queue.qsize() < size:
        time.sleep(0.1)
        if any(process.exitcode for process in ranks):
            for process in ranks:
                process.kill()
            raise SystemExit("a rank failed: its error stands above")
    results = dict(queue.get() for _ in ranks)
    for process in ranks:
        process.join(60)
    print(json.dumps({**options, **results[0]}))


if __name__ == "__main__":
    typer.run(main)
