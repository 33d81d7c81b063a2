"""`outrider bench`: times engines as users run them, as the driver and as the client see it.

    configurations -> a fresh Engine for each -> batch sizes -> warm-up and rounds -> result rows

For a batch of B, each of B threads streams one request after the other. Server times are the
driver's, from the moment a request is submitted; client times are this process's. Where n tokens
arrive together, t after those before them, they count as n latencies of t / n. The last line of
stdout is one JSON object; progress goes to stderr. docs/benchmarks.md says what each number means.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from outrider.actors.cluster.reader import load_spec, parse_set
from outrider.actors.cluster.spec import Spec
from outrider.actors.engine import Engine
from outrider.actors.options import USER_ERROR, Config, Sets
from outrider.benchmarks import host, planted, report
from outrider.benchmarks.oracle import Answer, Oracle, counters, differences, repeats
from outrider.benchmarks.traffic import Protocol, Request, sampling_settings
from outrider.model.config import ConfigError
from outrider.model.step import MAX_DRAFT_TOKENS, Sampling
from outrider.parallel.device import DeviceError
from outrider.parallel.devices import claim_device

MAX_BATCH = 1024
CACHE = Path.home() / ".cache" / "outrider"
CHANGES: dict[str, dict[str, object]] = {
    "draft body sharded -> local": {"speculation.draft_body": "sharded"},
    "sync after each draft pass -> events": {"ablation.sync_each_draft": True},
    "projections merged and split -> direct": {"ablation.merge_then_split": True},
    "greedy probabilities -> none": {"ablation.greedy_probabilities": True},
}
"""The four changes in the order in which they were made -> the keys that undo each."""
MORE_CHANGES: dict[str, dict[str, object]] = {
    "graph off -> on": {"ablation.no_graph": True},
    "collective library -> peer memory": {},
    "logits gathered -> (value, id) pairs": {"ablation.gather_logits": True},
}
"""Changes that are undone one by one only; the collective's key depends on the device."""
OLD_COLLECTIVE = {"cuda": "nccl", "cpu": "gloo"}
"""The library that sums over ranks without peer memory (cuda) or shared memory (cpu)."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine to measure: its name in the report, its keys of cluster.yaml by dotted name."""

    name: str
    keys: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one request as the driver or the client saw it, in seconds."""

    e2e: float
    """From the submission to the last token."""
    ttft: float
    """From the submission to the first token."""
    tpot: float
    """Mean time of a token after the first piece; 0 where there is none."""
    itl: list[float] = field(repr=False)
    """Latency of each token after the first piece."""


def times_of(pieces: Sequence[tuple[float, int]]) -> Times:
    """pieces: (time since the submission, number of tokens) of each."""
    (first_s, first_tokens), (last_s, _) = pieces[0], pieces[-1]
    tokens_after = sum(count for _, count in pieces) - first_tokens
    itl = []
    for (before_s, _), (at_s, count) in itertools.pairwise(pieces):
        itl += [(at_s - before_s) / count] * count
    tpot = (last_s - first_s) / tokens_after if tokens_after else 0.0
    return Times(e2e=last_s, ttft=first_s, tpot=tpot, itl=itl)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 in milliseconds, of values in seconds; None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    named = {"mean": np.mean(values), "p50": p50, "p90": p90, "p99": p99}
    return {name: round(1e3 * float(value), 4) for name, value in named.items()}


def both_ends(answers: Sequence[Answer]) -> dict[str, Any]:
    """Percentiles over the answers: "server" as the driver, "client" as this process saw them."""
    ends = {}
    for end, column in (("server", 1), ("client", 0)):
        times = [times_of([(piece[column], piece[2]) for piece in a.pieces]) for a in answers]
        ends[end] = {
            "e2e_ms": percentiles([t.e2e for t in times]),
            "ttft_ms": percentiles([t.ttft for t in times]),
            "tpot_ms": percentiles([t.tpot for t in times if t.tpot]),
            "itl_ms": percentiles([latency for t in times for latency in t.itl]),
        }
    return ends


def decode_rate(answers: Sequence[Answer], batch: int) -> float | None:
    """Tokens a second during the times at which `batch` requests were past their first token.

    By the client's clock, over all such times of a round; None where there are none.
    """
    spans, arrivals = [], []
    for answer in answers:
        pieces = [(answer.started_s + at, count) for at, _, count in answer.pieces]
        spans.append((pieces[0][0], pieces[-1][0]))
        arrivals += pieces[1:]
    edges = sorted({edge for span in spans for edge in span})
    tokens = seconds = 0.0
    for start, end in itertools.pairwise(edges):
        if sum(first <= start and end <= last for first, last in spans) == batch:
            tokens += sum(count for at, count in arrivals if start < at <= end)
            seconds += end - start
    return round(tokens / seconds, 2) if seconds else None


def wave_rate(engine: Engine, requests: Sequence[Request]) -> tuple[float | None, list[list[int]]]:
    """Tokens a second of a batch given at once, without its first tokens: B (N - 1) / (T_N - T_1).

    T_n is the wall time of Engine.generate with n tokens for each prompt. Offline benchmarks of
    other engines report this rate. None where it cannot be told. -> the rate, and the tokens of
    each request in the first wave, which is not timed.
    """
    prompts, samplings = [prompt for prompt, _ in requests], [sampling for _, sampling in requests]
    new = samplings[0].max_tokens
    short = [msgspec.structs.replace(sampling, max_tokens=1) for sampling in samplings]

    def timed(samplings: list[Sampling]) -> float:
        started = time.perf_counter()
        engine.generate(prompts, samplings)
        return time.perf_counter() - started

    answers = [list(one.token_ids) for one in engine.generate(prompts, samplings)]
    seconds = float(np.median([timed(samplings) - timed(short) for _ in range(3)]))
    rate = round(len(prompts) * (new - 1) / seconds, 2) if new > 1 and seconds > 0 else None
    return rate, answers


def stream_request(engine: Engine, prompt: list[int], sampling: Sampling) -> Answer:
    """Stream one request to its end; its sampling has a seed."""
    assert sampling.seed is not None
    started, tokens, pieces, stats = time.perf_counter(), [], [], None
    for chunk in engine.stream(prompt, sampling):
        at_s = time.perf_counter() - started
        if chunk.token_ids:
            pieces.append((at_s, chunk.at_s, len(chunk.token_ids)))
        tokens += chunk.token_ids
        stats = chunk.stats or stats
    assert stats is not None
    return Answer(
        prompt=prompt,
        seed=sampling.seed,
        tokens=tokens,
        started_s=started,
        pieces=pieces,
        server=asdict(stats),
    )


def measure_batch(
    engine: Engine, batch: int, protocol: Protocol, oracle: Oracle, run_ahead: int
) -> dict[str, Any]:
    """Warm up and run the rounds of one batch size; -> its part of a result row.

    run_ahead: the capability of the engine's devices, on which the expected counters depend.
    """
    num_requests = math.ceil(protocol.requests / batch) * batch
    requests = protocol.traffic(oracle.vocab, num_requests)
    warmup_requests = protocol.traffic(oracle.vocab, max(protocol.warmup, batch), warm=True)
    answers: list[Answer] = []
    seconds, rates = 0.0, []
    with ThreadPoolExecutor(batch) as threads:

        def answer_all(requests: Sequence[Request]) -> list[Answer]:
            return list(threads.map(lambda request: stream_request(engine, *request), requests))

        answer_all(warmup_requests)
        for _ in range(protocol.rounds):
            started = time.perf_counter()
            round_answers = answer_all(requests)
            seconds += time.perf_counter() - started
            rates.append(decode_rate(round_answers, batch))
            answers += round_answers
    known = [rate for rate in rates if rate is not None]
    wave_tok_s, wave = wave_rate(engine, requests[:batch])
    waves = [(sampling.seed, tokens) for (_, sampling), tokens in zip(requests, wave)]
    return {
        "batch": batch,
        "requests": len(answers),
        **both_ends(answers),
        "tok_s": round(sum(len(a.tokens) for a in answers) / seconds, 2),
        "decode_tok_s": round(float(np.median(known)), 2) if known else None,
        "wave_tok_s": wave_tok_s,
        **counters(answers, engine.run.draft_tokens, oracle, protocol.new, run_ahead),
        "differences": differences(engine, answers, oracle, protocol.new),
        **repeats([*((a.seed, a.tokens) for a in answers), *waves]),
    }


def measure_engine(
    file: Path | None,
    configuration: Configuration,
    batches: Sequence[int],
    protocol: Protocol,
    oracle: Oracle,
) -> list[dict[str, Any]]:
    """Start a fresh engine and measure every batch size on it; -> a result row for each.

    file: of the settings that the configuration's keys do not change.
    """
    started = time.perf_counter()
    rows = []
    with Engine.from_config(file, configuration.keys) as engine:
        start_s = time.perf_counter() - started
        (first,) = replace(protocol, new=1).traffic(oracle.vocab, 1, warm=True)
        first_token_s = start_s + stream_request(engine, *first).pieces[0][0]
        stats, spec = engine.stats(), engine.spec
        run_ahead = stats["ranks"][0].get("run_ahead", 0)
        columns = {
            "configuration": configuration.name,
            "draft_tokens": engine.run.draft_tokens,
            "draft_body": engine.run.draft_body,
            "draft_head": engine.run.draft_head,
            "keys": configuration.keys,
            "device": spec.device,
            "dtype": engine.run.dtype,
            "tensor_parallel": engine.run.tensor_parallel,
            "sampling": protocol.sampling,
            "rank_cpus": [rank["cpus"] for rank in stats["ranks"]],
            "driver_cpus": stats["driver"]["cpus"],
            "start_s": round(start_s, 2),
            "start_to_first_token_s": round(first_token_s, 2),
        }
        for batch in batches:
            row = columns | measure_batch(engine, batch, protocol, oracle, run_ahead)
            rows.append(row)
            print_progress(report.one_line(row))
    return rows


def depths_of(k: str | None, spec: Spec, ablate: bool) -> list[int | str]:
    """Each K of the option --k, or else the one of the settings."""
    if k is None:
        return [spec.speculation.draft_tokens]
    depths: list[int | str] = [*parse_numbers(k, "--k", 0, MAX_DRAFT_TOKENS)]
    if ablate and len(depths) > 1:
        raise ValueError(f'--k "{k}": an ablation takes one K')
    return depths


def sweep(base: Mapping[str, object], depths: Sequence[int | str]) -> list[Configuration]:
    """An engine for each K."""
    return [
        Configuration(name=f"K = {depth}", keys={**base, "speculation.draft_tokens": depth})
        for depth in depths
    ]


def ablation(base: Mapping[str, object], device: str) -> tuple[list[Configuration], list[str]]:
    """The engines of an ablation, and the names of the changes that this device cannot undo.

    The first engine has none of the four changes, and each one after it has one more, in their
    order. The others have all changes but one; the engine without the last of the four is among
    the first already.
    """
    single_changes = CHANGES | MORE_CHANGES
    if device in OLD_COLLECTIVE:
        name = "collective library -> peer memory"
        single_changes[name] = {"parallel.collective": OLD_COLLECTIVE[device]}
    if device == "cpu":
        single_changes["graph off -> on"] = {}
    names = list(CHANGES)
    engines = []
    for num_made in range(len(names)):
        keys = dict(base)
        for name in names[num_made:]:
            keys |= CHANGES[name]
        label = f"cumulative: {names[num_made - 1]}" if num_made else "cumulative: before"
        engines.append(Configuration(name=label, keys=keys))
    engines.append(Configuration(name="all changes", keys=dict(base)))
    for name, old_keys in single_changes.items():
        if old_keys and name != names[-1]:
            engines.append(Configuration(name=f"without: {name}", keys={**base, **old_keys}))
    return engines, [name for name, old_keys in single_changes.items() if not old_keys]


def parse_numbers(text: str, option: str, least: int, most: int) -> list[int]:
    """The whole numbers of a text such as 1,2,4 or 0..8. ValueError names the option."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            found += range(int(first), int(last) + 1) if dots else [int(first)]
    except ValueError:
        found = []
    if not found or min(found) < least or max(found) > most:
        raise ValueError(
            f'{option} "{text}": expected numbers from {least} to {most}, 1,2,4 or 0..8'
        )
    return list(dict.fromkeys(found))


def planted_model(size: str, device: str, accept: float, seed: int) -> Path:
    """The folder of a planted checkpoint in the user's cache; it is written on first use.

    An empty size is "tiny" on the CPU and "2b" elsewhere; a size such as "27b-fp8" has the form of
    an FP8 release. Another process writes it, since a process that draws weights on a device keeps
    memory there. Raises ConfigError for an unknown size and for a device that cannot be used.
    """
    size = size or ("tiny" if device == "cpu" else "2b")
    name = size.removesuffix("-fp8")
    quantization = "fp8" if name != size else None
    if name not in planted.SIZES:
        raise ConfigError(
            f"--size {size}: must be one of {', '.join(planted.SIZES)}, or one of them with -fp8"
        )
    folder = CACHE / f"planted-{size}-{accept:g}-{seed}"
    if not (folder / "planted.json").is_file():
        print_progress(f"writing a planted checkpoint of size {size} to {folder}")
        device_kind = "cuda" if device == "cuda" else "cpu"
        process = multiprocessing.get_context("spawn").Process(
            target=_write_planted, args=(folder, name, accept, seed, device_kind, quantization)
        )
        process.start()
        process.join()
        if process.exitcode == USER_ERROR:
            raise ConfigError(f"--device {device}: cannot be used, the reason stands above")
        if process.exitcode:
            raise RuntimeError(f"no checkpoint was written to {folder}: the error stands above")
    return folder


def _write_planted(
    folder: Path, size: str, accept: float, seed: int, device_kind: str, quantization: str | None
) -> None:
    """The process that writes a planted checkpoint."""
    try:
        claim_device(device_kind, 0)
    except DeviceError as error:
        print_progress(str(error))
        sys.exit(USER_ERROR)
    planted.write(folder, size, accept, seed, device_kind, quantization)


def print_progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    config: Config = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder.  [default: a planted one is made]")
    ] = None,
    size: Annotated[
        str, typer.Option(help="9b, or 27b-fp8, say.  [default: 2b on cuda and npu, tiny on cpu]")
    ] = "",
    accept: Annotated[float, typer.Option(help="Its share of tokens with a right draft.")] = 0.8425,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu.")] = None,
    k: Annotated[
        str | None, typer.Option(help="Drafts an iteration: 5, or 0..8, or 0,3,5.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at once: 1, or 1,2,4,8.")] = "1",
    draft_body: Annotated[str | None, typer.Option(help="local or sharded.")] = None,
    draft_head: Annotated[str | None, typer.Option(help="model or fp8.")] = None,
    ablate: Annotated[
        bool, typer.Option("--ablation", help="Undo each change, one by one and together.")
    ] = False,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 25,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the same requests.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the rounds.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and draws; one more a request.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest up to this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many of the likeliest; 0: all.")] = 0,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--report", help="Folder for tables and plots.")
    ] = None,
) -> None:
    """Time engines as users run them: a fresh one for each K, all batch sizes on it in turn.

    The last line of stdout is one JSON object; progress goes to stderr.
    """
    if out is not None:
        report.need_plots()
    batches = parse_numbers(batch, "--batch", 1, MAX_BATCH)
    protocol = Protocol(
        prompt=prompt,
        new=new,
        requests=requests,
        rounds=rounds,
        warmup=warmup,
        seed=seed,
        sampling=sampling_settings(temperature=temperature, top_p=top_p, top_k=top_k),
    )
    base = _common_keys(sets, batches, protocol, device, draft_body, draft_head)
    spec = load_spec(config, {**base, "model": str(model or "planted")})
    depths = depths_of(k, spec, ablate)
    folder = model or planted_model(size, spec.device, accept, 0)
    engines, skipped = sweep({**base, "model": str(folder)}, depths), list[str]()
    if ablate:
        engines, skipped = ablation(engines[0].keys, spec.device)
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        result = measure_all(config, engines, batches, protocol, Oracle(folder, protocol.sampling))
    result["not_applicable"] = skipped
    if out is not None:
        report.write(out, result)
        print_progress(f"tables and plots: {out}")
    print(json.dumps(result), file=stdout, flush=True)


def measure_all(
    file: Path | None,
    engines: Sequence[Configuration],
    batches: Sequence[int],
    protocol: Protocol,
    oracle: Oracle,
) -> dict[str, Any]:
    """Measure one engine after the other; -> the object of the JSON line."""
    rows = [row for one in engines for row in measure_engine(file, one, batches, protocol, oracle)]
    return {
        "command": host.command(),
        "host": host.describe(),
        "protocol": asdict(protocol) | {"batches": list(batches), "planted": oracle.arguments},
        "rows": rows,
    }


def _common_keys(
    sets: Sequence[str] | None,
    batches: Sequence[int],
    protocol: Protocol,
    device: str | None,
    draft_body: str | None,
    draft_head: str | None,
) -> dict[str, object]:
    """The keys of cluster.yaml that all engines of this run share, by dotted name.

    What the protocol needs gives way to --set, and --set to an option of its own.
    """
    options = {
        "device": device,
        "speculation.draft_body": draft_body,
        "speculation.draft_head": draft_head,
    }
    needed = {
        "limits.max_slots": max(batches),
        "limits.max_model_len": protocol.prompt + protocol.new,
        "serve.generation_defaults": "neutral",
        "cache.prefix": False,  # a round repeats the prompts of the one before
    }
    given = {key: value for key, value in options.items() if value is not None}
    return needed | dict(map(parse_set, sets or [])) | given
