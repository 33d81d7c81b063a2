"""Ranks as plain processes without Ray, one on each device: are the tokens right, and how fast.

    planted checkpoint -> a Runner in each process -> every batch size: exactness, counters, times

    python -m outrider.benchmarks.ranks CKPT --device cuda --size 2 --k 5 --batch 1,8,32
    ... --temperature 0.8 --top-p 0.95 --top-k 50, or --penalty 0.5 --logprobs 5

The checkpoint is one of benchmarks/planted.py: greedy requests, penalised ones, and sampled ones up
to planted.MAX_TEMPERATURE must answer with its chain. Above that, the same prompts and seeds twice
must give the same tokens. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace

from outrider.benchmarks import planted
from outrider.benchmarks.differences import find_differences, margin_of
from outrider.benchmarks.traffic import GREEDY, Settings, sampling_settings
from outrider.model.config import RunConfig, load_config
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.runner import Runner
from outrider.model.step import Join, Sampling
from outrider.model.warmup import warm_up
from outrider.parallel import group
from outrider.parallel.devices import claim_device, collective_kind, open_device

PROFILED_TOKENS = 128
DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of those events of a trace during which the device works."""


def generate(
    runner: Runner,
    prompts: Sequence[list[int]],
    num_tokens: int,
    settings: Settings = GREEDY,
    first_seed: int = 0,
) -> dict[str, Any]:
    """Run prompts together to their end; the i-th request has seed first_seed + i.

    Returns this rank's tokens and counters, and the times of the whole and of the part in which
    all requests decode. "passes" holds (drafts, accepted ones) of each verify pass of a request.
    """
    run = runner.run
    most_rows = max(map(len, prompts)) + num_tokens + overshoot_rows(run.draft_tokens)
    pages = pages_for(most_rows, run.page_tokens)
    how = Sampling(max_tokens=num_tokens, ignore_eos=True, **settings)
    joins = [
        Join(
            slot=i,
            request=i,
            tokens=prompt,
            pages=list(range(1 + i * pages, 1 + (i + 1) * pages)),
            sampling=replace(how, seed=first_seed + i),
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    passes: list[tuple[int, int]] = []
    first_token_times: list[float] = []
    tokens_before_decode = num_steps = 0
    started = time.perf_counter()
    runner.apply(joins)
    while runner.has_work:
        num_steps += 1
        for progress in runner.step():
            if not outputs[progress.request]:
                first_token_times.append(time.perf_counter())
            outputs[progress.request] += progress.tokens
            if progress.verified:
                passes.append((progress.drafted, progress.accepted))
        if len(first_token_times) == len(prompts) and not tokens_before_decode:
            tokens_before_decode, num_steps = sum(map(len, outputs)), 0
    ended = time.perf_counter()
    return {
        "outputs": outputs,
        "passes": passes,
        "drafted": sum(drafted for drafted, _ in passes),
        "accepted": sum(accepted for _, accepted in passes),
        "ttft_s": first_token_times[0] - started,
        "e2e_s": ended - started,
        "decode_s": ended - max(first_token_times),
        "decode_tokens": sum(map(len, outputs)) - tokens_before_decode,
        "decode_steps": num_steps,
    }


def top2_margin(runner: Runner, tokens: list[int]) -> float:
    """Logit of the likeliest token behind `tokens` less that of the second."""
    num_pages = pages_for(
        len(tokens) + 1 + overshoot_rows(runner.run.draft_tokens), runner.run.page_tokens
    )
    asked = Sampling(max_tokens=1, logprobs=2, draft_tokens=0)
    pages = list(range(1, 1 + num_pages))
    runner.apply([Join(slot=0, request=0, tokens=tokens, pages=pages, sampling=asked)])
    log_probs = []
    while runner.has_work:
        log_probs += [row for progress in runner.step() for row in progress.logprobs]
    return margin_of(log_probs[0])


def measure(
    runner: Runner,
    chain: planted.Chain,
    batch: int,
    prompt: int,
    new: int,
    repeats: int,
    settings: Settings = GREEDY,
) -> dict[str, Any]:
    """One batch size: were all tokens of all repeats right, and the medians of the times.

    prompt, new: tokens of each prompt and of each answer. The first of the repeats + 1 runs warms
    up and is not timed. "exact" is None where the chain does not tell the tokens; "repeated" says
    whether the prompts of the first run, asked again, got the same ones.
    """
    vocab, runs, compared, repeated = len(chain.next), [], [], True
    known = settings.get("temperature", 0.0) <= planted.MAX_TEMPERATURE
    for repeat in range(repeats + 1):
        generator = torch.Generator().manual_seed(100 * batch + repeat)
        prompts = torch.randint(0, vocab, (batch, prompt), generator=generator).tolist()
        first_token_s = generate(runner, prompts, 1, settings)["e2e_s"]
        result = generate(runner, prompts, new, settings)
        result["after_first_s"] = result["e2e_s"] - first_token_s
        if repeat == 0:
            again = generate(runner, prompts, new, settings)
            repeated = again["outputs"] == result["outputs"]
        for ids, output in zip(prompts, result["outputs"], strict=True):
            expected = planted.expected_counts(chain, ids[-1], new, runner.run.draft_tokens)
            compared.append((ids, output, expected.tokens))
        if repeat > 0:
            runs.append(result)
    rate = statistics.median(r["decode_tokens"] / r["decode_s"] for r in runs)
    differences = find_differences(compared if known else (), partial(top2_margin, runner))
    after_first_s = statistics.median(r["after_first_s"] for r in runs)
    return {
        "batch": batch,
        "sampling": settings,
        "exact": not differences if known else None,
        "repeated": repeated,
        "differences": [asdict(difference) for difference in differences],
        "tpot_ms": 1e3 * batch / rate,
        "tok_s": rate,
        "tok_s_after_first": batch * (new - 1) / after_first_s,
        "ttft_ms": 1e3 * statistics.median(r["ttft_s"] for r in runs),
        "e2e_ms": 1e3 * statistics.median(r["e2e_s"] for r in runs),
        "accepted": sum(r["accepted"] for r in runs) / max(1, sum(r["drafted"] for r in runs)),
        "ms_per_step": 1e3 * statistics.median(r["decode_s"] / r["decode_steps"] for r in runs),
    }


def run_rank(rank: int, port: int, options: dict[str, Any], queue: Any) -> None:
    """One rank's process: measure every batch size and put (rank, result) on the queue.

    options: those of the command line. port: of the store where the ranks meet.
    """
    torch.set_num_threads(1)
    kind, size = options["device"], options["size"]
    store = group.join_store("127.0.0.1", port)
    claim_device(kind, rank)
    collective = options["collective"] or collective_kind(kind)
    device = open_device(kind, rank, group.connect(store, rank, size, collective))
    folder = Path(options["checkpoint"])
    started = time.perf_counter()
    runner = Runner(run_config(folder, options), device)
    warm_up(runner)
    load_s = time.perf_counter() - started
    vocab = load_config(folder).vocab_size
    chain = planted.chain(vocab, options["accept"], options["seed"])
    shape = (options["prompt"], options["new"], options["repeats"], options["sampling"])
    rows = [measure(runner, chain, batch, *shape) for batch in options["batches"]]
    if rank == 0:
        for row in rows:
            print(row, flush=True)
    for batch in options["batches"] if options["profile"] else ():
        prompts = [[1] * options["prompt"]] * batch
        if rank == 0:
            file = Path(options["profile"])
            file = file.with_name(f"{file.stem}-{batch}{file.suffix}")
            profile(runner, prompts, file, options["sampling"])
        else:
            generate(runner, prompts, PROFILED_TOKENS, options["sampling"])
    queue.put((rank, {"load_s": load_s, "rows": rows}))
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)


def run_config(folder: Path, options: dict[str, Any]) -> RunConfig:
    """The options as a RunConfig that has the slots and pages of the largest batch."""
    max_slots, max_model_len = max(options["batches"]), options["prompt"] + options["new"]
    pages = pages_for(max_model_len + overshoot_rows(options["k"]), options["page_tokens"])
    return RunConfig(
        model_dir=str(folder),
        dtype=options["dtype"],
        tensor_parallel=options["size"],
        draft_tokens=options["k"],
        draft_body=options["draft_body"],
        draft_head=options["draft_head"],
        quantization=options["quantization"],
        expert_parallel=options["expert_parallel"],
        max_slots=max_slots,
        max_model_len=max_model_len,
        num_pages=2 + max_slots * pages,
        page_tokens=options["page_tokens"],
        prefill_chunk=options["chunk"],
    )


def profile(runner: Runner, prompts: list[list[int]], file: Path, settings: Settings) -> None:
    """Write a table of what each kernel adds to an iteration and to the prompts into `file`.

    The trace of the profiler is written beside it.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        generate(runner, prompts, PROFILED_TOKENS, settings)
    trace.export_chrome_trace(str(file.with_suffix(".trace.json")))
    events = json.loads(file.with_suffix(".trace.json").read_text())["traceEvents"]
    file.write_text(tables([e for e in events if e.get("cat") in DEVICE_WORK]))


def tables(events: list[dict[str, Any]]) -> str:
    """Events of one device in a Chrome trace -> a table of the iterations, and one of the prompts.

    Of the iterations those from a quarter on are taken, without the last.
    """
    events.sort(key=lambda e: e["ts"] + e["dur"])
    commits = [i for i, e in enumerate(events) if "_commit_kernel" in e["name"]]
    first = len(commits) // 4
    iterations = len(commits) - 2 - first
    decode = kernel_table(events[commits[first] : commits[-2] + 1], iterations, "iterations")
    return decode + "\n" + kernel_table(events[: commits[0]], 1, "stretch of prompts")


def kernel_table(events: list[dict[str, Any]], rounds: int, title: str) -> str:
    """Events in the order of their ends -> microseconds and calls a round of each kernel.

    Kernels may overlap. So a kernel counts for what it adds: from the latest end before it, or its
    own start if that is later, to its own end. The rest is idle time. The end of the first event
    is where the table begins.
    """
    end = begun = events[0]["ts"] + events[0]["dur"]
    idle_us, added, calls = 0.0, defaultdict[str, float](float), Counter[str]()
    for event in events[1:]:
        name, start = event["name"][:70], max(end, event["ts"])
        idle_us += start - end
        end = event["ts"] + event["dur"]
        added[name] += end - start
        calls[name] += 1
    total_us = end - begun
    lines = [
        f"{rounds} {title} of {total_us / rounds:.1f} us, device busy {1 - idle_us / total_us:.2%}"
    ]
    for name, us in sorted(added.items(), key=lambda item: -item[1]):
        lines.append(f"{us / rounds:8.1f} us {calls[name] / rounds:6.1f} calls  {name}")
    return "\n".join(lines) + "\n"


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
    quantization: str = "model",
    expert_parallel: bool = False,
    page_tokens: int = 64,
    accept: float = 0.8425,
    seed: int = 0,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    penalty: Annotated[float, typer.Option(help="Presence and frequency penalty.")] = 0.0,
    logprobs: Annotated[int | None, typer.Option(help="So many log probabilities.")] = None,
    collective: Annotated[str, typer.Option(help="Empty: the device's own.")] = "",
    profile: Annotated[str, typer.Option(help="Files for kernel tables, one a batch size.")] = "",
) -> None:
    """Time the ranks; JSON on the last line of stdout."""
    settings = sampling_settings(
        temperature=temperature, top_p=top_p, top_k=top_k, penalty=penalty, logprobs=logprobs
    )
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
        "quantization": quantization,
        "expert_parallel": expert_parallel,
        "page_tokens": page_tokens,
        "accept": accept,
        "seed": seed,
        "sampling": settings,
        "collective": collective,
        "profile": profile,
    }
    print(json.dumps({**options, **run_ranks(options)}))


def run_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks, each in a process of its own; -> what the first one measured."""
    context, size = multiprocessing.get_context("spawn"), options["size"]
    store, queue = group.host_store("127.0.0.1"), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, options, queue))
        for rank in range(size)
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
    return results[0]


if __name__ == "__main__":
    typer.run(main)
