"""`outrider bench`: engines as users run them (Ray, driver, rank actors), timed at both ends.

    configurations -> a fresh Engine each -> batch sizes -> warm-up, rounds of one set -> rows

A thread streams a request and then takes the next, so a batch of B is a closed loop of B. Server
times are the driver's, from submit; client times this process's. A latency between tokens: a piece
of n tokens that comes t after the piece before counts as n latencies of t / n. The last line of
stdout is one JSON object, progress goes to stderr. docs/benchmarks.md says what each number means.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from outrider.actors.cluster.reader import load_spec, parse_set
from outrider.actors.engine import Engine
from outrider.actors.options import USER_ERROR, Config, Sets
from outrider.benchmarks import host, planted, report
from outrider.model.config import ConfigError, load_config
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
"""The four changes, in the order in which they are made, and the keys that undo each."""
MORE_CHANGES: dict[str, dict[str, object]] = {
    "graph off -> on": {"ablation.no_graph": True},
    "collective library -> peer memory": {},
    "logits gathered -> (value, id) pairs": {"ablation.gather_logits": True},
}
OLD_COLLECTIVE = {"cuda": "nccl", "cpu": "gloo"}
"""What sums between ranks where peer (cuda) or shared (cpu) memory does not."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is asked of each engine."""

    prompt: int
    """Tokens of a prompt, random ids."""
    new: int
    """Tokens of an answer; no end of sequence stops it."""
    requests: int
    """Of a round; a batch above takes one wave of its own size."""
    rounds: int
    warmup: int
    seed: int

    def prompts(self, vocab: int, count: int, *, warm: bool = False) -> list[list[int]]:
        """The first `count` prompts of the fixed set, or of the other one that warms up."""
        random = np.random.default_rng([self.seed, warm])
        return [random.integers(0, vocab, self.prompt).tolist() for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine: keys of cluster.yaml by dotted name."""

    name: str
    keys: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as it came back. Times in seconds from its submit."""

    prompt: list[int]
    tokens: list[int]
    started_s: float
    """On this process's clock."""
    pieces: list[tuple[float, float, int]]
    """(client time, driver's time, tokens), one a piece that was streamed."""
    server: dict[str, Any]
    """The driver's RequestStats."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one request at one end, in seconds."""

    e2e: float
    ttft: float
    tpot: float
    """Mean time a token after the first piece."""
    itl: list[float] = field(repr=False)


def times_of(stamps: Sequence[tuple[float, int]]) -> Times:
    """stamps: (time since submit, tokens) of each piece."""
    (first, head), (last, _) = stamps[0], stamps[-1]
    after = sum(count for _, count in stamps) - head
    itl = []
    for (before, _), (at, count) in itertools.pairwise(stamps):
        itl += [(at - before) / count] * count
    return Times(e2e=last, ttft=first, tpot=(last - first) / after if after else 0.0, itl=itl)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Seconds -> milliseconds: mean, p50, p90, p99; None without values."""
    if not values:
        return None
    marks = np.percentile(values, (50, 90, 99))
    named = {"mean": np.mean(values), **dict(zip(("p50", "p90", "p99"), marks))}
    return {name: round(1e3 * float(value), 4) for name, value in named.items()}


def both_ends(answers: Sequence[Answer]) -> dict[str, Any]:
    """Percentiles over the answers, as the driver saw them and as this process did."""
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
    """Tokens a second while `batch` requests decoded and none waited for its first token.

    By the client's clock, over all such stretches of a round; None where there is none.
    """
    spans, arrivals = [], []
    for answer in answers:
        stamps = [(answer.started_s + at, count) for at, _, count in answer.pieces]
        spans.append((stamps[0][0], stamps[-1][0]))
        arrivals += stamps[1:]
    edges = sorted({edge for span in spans for edge in span})
    tokens = seconds = 0.0
    for start, end in itertools.pairwise(edges):
        if sum(first <= start and end <= last for first, last in spans) == batch:
            tokens += sum(count for at, count in arrivals if start < at <= end)
            seconds += end - start
    return round(tokens / seconds, 2) if seconds else None


def wave_rate(engine: Engine, prompts: list[list[int]], new: int) -> float | None:
    """Tokens a second after the first ones, of a batch given at once: B (N - 1) / (T_N - T_1).

    T_n: wall time of generate with n tokens each. What offline benchmarks of other engines report.
    """

    def timed(tokens: int) -> float:
        started = time.perf_counter()
        engine.generate(prompts, Sampling(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - started

    timed(new)
    seconds = float(np.median([timed(new) - timed(1) for _ in range(3)]))
    return round(len(prompts) * (new - 1) / seconds, 2) if new > 1 and seconds > 0 else None


class Oracle:
    """What a checkpoint must answer; a planted one says so in planted.json, others do not."""

    def __init__(self, folder: Path) -> None:
        self.vocab = load_config(folder).vocab_size
        made = folder / "planted.json"
        self.made = json.loads(made.read_text()) if made.is_file() else None
        if self.made:
            self.chain = planted.chain(self.vocab, self.made["accept"], self.made["seed"])

    @cache  # noqa: B019 -- one oracle a run
    def expected(
        self, last: int, new: int, draft_tokens: int, run_ahead: int
    ) -> planted.Expected | None:
        if not self.made:
            return None
        return planted.expected_counts(self.chain, last, new, draft_tokens, run_ahead)


def ask(engine: Engine, prompt: list[int], new: int) -> Answer:
    """Stream one greedy request to its end."""
    started, tokens, pieces, stats = time.perf_counter(), [], [], None
    for chunk in engine.stream(prompt, Sampling(max_tokens=new, ignore_eos=True)):
        at = time.perf_counter() - started
        if chunk.token_ids:
            pieces.append((at, chunk.at_s, len(chunk.token_ids)))
        tokens += chunk.token_ids
        stats = chunk.stats or stats
    assert stats is not None
    return Answer(
        prompt=prompt, tokens=tokens, started_s=started, pieces=pieces, server=asdict(stats)
    )


def measure(
    engine: Engine, batch: int, protocol: Protocol, oracle: Oracle, run_ahead: int
) -> dict[str, Any]:
    """One batch size: warm-up, then the rounds; -> a row."""
    count = -(-max(protocol.requests, batch) // batch) * batch
    prompts = protocol.prompts(oracle.vocab, count)
    warm = protocol.prompts(oracle.vocab, max(protocol.warmup, batch), warm=True)
    answers: list[Answer] = []
    seconds, rates = 0.0, []
    with ThreadPoolExecutor(batch) as threads:
        list(threads.map(lambda prompt: ask(engine, prompt, protocol.new), warm))
        for _ in range(protocol.rounds):
            started = time.perf_counter()
            got = list(threads.map(lambda prompt: ask(engine, prompt, protocol.new), prompts))
            seconds += time.perf_counter() - started
            rates.append(decode_rate(got, batch))
            answers += got
    known = [rate for rate in rates if rate is not None]
    return {
        "batch": batch,
        "requests": len(answers),
        **both_ends(answers),
        "tok_s": round(sum(len(a.tokens) for a in answers) / seconds, 2),
        "decode_tok_s": round(float(np.median(known)), 2) if known else None,
        "wave_tok_s": wave_rate(engine, prompts[:batch], protocol.new),
        **acceptance(answers, engine.run.draft_tokens, oracle, protocol.new, run_ahead),
    }


def acceptance(
    answers: Sequence[Answer], draft_tokens: int, oracle: Oracle, new: int, run_ahead: int
) -> dict[str, Any]:
    """Counters over the answers, and how they compare with what a planted checkpoint must give."""
    total = {
        name: sum(a.server[name] for a in answers) for name in ("iterations", "drafted", "accepted")
    }
    per = [sum(a.server["accepted_per_position"][i] for a in answers) for i in range(draft_tokens)]
    iterations = max(1, total["iterations"])
    wanted = [oracle.expected(a.prompt[-1], new, draft_tokens, run_ahead) for a in answers]
    checks: dict[str, Any] = {"exact": None, "expected_accepted": None, "expected_drafted": None}
    sure = [one for one in wanted if one is not None]
    if sure:
        exact = sum(a.tokens == one.tokens for a, one in zip(answers, sure, strict=True))
        checks = {
            "exact": exact,
            "expected_accepted": sum(one.accepted for one in sure),
            "expected_drafted": sum(one.drafted for one in sure),
        }
    return {
        **total,
        "accepted_share": round(total["accepted"] / max(1, total["drafted"]), 4),
        "accepted_by_position": [round(count / iterations, 4) for count in per],
        "tokens_per_iteration": round(
            (sum(len(a.tokens) for a in answers) - len(answers)) / iterations, 3
        ),
        **checks,
    }


def run(
    file: Path | None,
    configuration: Configuration,
    batches: Sequence[int],
    protocol: Protocol,
    oracle: Oracle,
) -> list[dict[str, Any]]:
    """A fresh engine from start to end; a row a batch size."""
    began = time.perf_counter()
    rows = []
    with Engine.from_config(file, configuration.keys) as engine:
        ready_s = time.perf_counter() - began
        (prompt,) = protocol.prompts(oracle.vocab, 1, warm=True)
        first_s = ready_s + ask(engine, prompt, 1).pieces[0][0]
        stats, spec = engine.stats(), engine.spec
        about = {
            "configuration": configuration.name,
            "draft_tokens": engine.run.draft_tokens,
            "draft_body": engine.run.draft_body,
            "draft_head": engine.run.draft_head,
            "keys": configuration.keys,
            "device": spec.device,
            "dtype": engine.run.dtype,
            "tensor_parallel": engine.run.tensor_parallel,
            "rank_cpus": [rank["cpus"] for rank in stats["ranks"]],
            "driver_cpus": stats["driver"]["cpus"],
            "start_s": round(ready_s, 2),
            "start_to_first_token_s": round(first_s, 2),
        }
        for batch in batches:
            row = about | measure(
                engine, batch, protocol, oracle, stats["ranks"][0].get("run_ahead", 0)
            )
            rows.append(row)
            say(report.one_line(row))
    return rows


def ablation(base: Mapping[str, object], device: str) -> tuple[list[Configuration], list[str]]:
    """Engines of the cumulative and the leave-one-out table, and what this device cannot undo."""
    more = dict(MORE_CHANGES)
    if device in OLD_COLLECTIVE:
        more["collective library -> peer memory"] = {"parallel.collective": OLD_COLLECTIVE[device]}
    if device == "cpu":
        del more["graph off -> on"]
    skipped = [name for name in MORE_CHANGES if not more.get(name)]
    names = list(CHANGES)
    made = []
    for done in range(len(names)):
        old: dict[str, object] = {}
        for name in names[done:]:
            old |= CHANGES[name]
        label = f"cumulative: {names[done - 1]}" if done else "cumulative: before"
        made.append(Configuration(name=label, keys={**base, **old}))
    made.append(Configuration(name="all changes", keys=dict(base)))
    for name, old in (CHANGES | more).items():
        if name != names[-1] and old:  # without the last one: the last cumulative engine but one
            made.append(Configuration(name=f"without: {name}", keys={**base, **old}))
    return made, skipped


def numbers(text: str, option: str, least: int, most: int) -> list[int]:
    """Text such as 1,2,4 or 0..8 -> whole numbers. ValueError names the option."""
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
    """A planted checkpoint in the user's cache, written on first use by a process that ends."""
    if size not in planted.SIZES:
        raise ConfigError(f"--size {size}: must be one of {', '.join(planted.SIZES)}")
    folder = CACHE / f"planted-{size}-{accept:g}-{seed}"
    if not (folder / "planted.json").is_file():
        say(f"writing a planted checkpoint of size {size} to {folder}")
        where = "cuda" if device == "cuda" else "cpu"
        context = multiprocessing.get_context("spawn")  # a device context would stay with us
        process = context.Process(target=_write, args=(folder, size, accept, seed, where))
        process.start()
        process.join()
        if process.exitcode == USER_ERROR:
            raise ConfigError(f"--device {device}: cannot be used, the reason stands above")
        if process.exitcode:
            raise RuntimeError(f"no checkpoint was written to {folder}: the error stands above")
    return folder


def _write(folder: Path, size: str, accept: float, seed: int, where: str) -> None:
    try:
        claim_device(where, 0)
    except DeviceError as error:
        say(str(error))
        sys.exit(USER_ERROR)
    planted.write(folder, size, accept, seed, where)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    config: Config = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder.  [default: a planted one is made]")
    ] = None,
    size: Annotated[
        str, typer.Option(help="Of the planted one.  [default: 2b on cuda and npu, tiny on cpu]")
    ] = "",
    accept: Annotated[float, typer.Option(help="Its share of right drafts.")] = 0.8425,
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
    requests: Annotated[int, typer.Option(min=1, help="Of a round.")] = 20,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the rounds.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the request set.")] = 0,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--report", help="Folder for tables and plots.")
    ] = None,
) -> None:
    """Time an engine as users run it: a fresh one for each K, all batch sizes on it in turn.

    JSON on the last line of stdout; progress on stderr.
    """
    if out is not None:
        report.need_plots()
    batches = numbers(batch, "--batch", 1, MAX_BATCH)
    protocol = Protocol(
        prompt=prompt, new=new, requests=requests, rounds=rounds, warmup=warmup, seed=seed
    )
    base = _base(sets, batches, protocol, device, draft_body, draft_head)
    spec = load_spec(config, {**base, "model": str(model or "planted")})
    ks = numbers(k, "--k", 0, MAX_DRAFT_TOKENS) if k else [spec.speculation.draft_tokens]
    if ablate and len(ks) > 1:
        raise ValueError(f'--k "{k}": an ablation takes one K')
    folder = model or planted_model(
        size or ("tiny" if spec.device == "cpu" else "2b"), spec.device, accept, 0
    )
    base["model"] = str(folder)
    engines = [
        Configuration(name=f"K = {one}", keys={**base, "speculation.draft_tokens": one})
        for one in ks
    ]
    skipped: list[str] = []
    if ablate:
        engines, skipped = ablation(engines[0].keys, spec.device)
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        result = measure_all(config, engines, batches, protocol, Oracle(folder))
    result["not_applicable"] = skipped
    if out is not None:
        report.write(out, result)
        say(f"tables and plots: {out}")
    print(json.dumps(result), file=stdout, flush=True)


def measure_all(
    file: Path | None,
    engines: Sequence[Configuration],
    batches: Sequence[int],
    protocol: Protocol,
    oracle: Oracle,
) -> dict[str, Any]:
    """One engine after the other; -> all that the JSON line holds."""
    return {
        "command": host.command(),
        "host": host.describe(),
        "protocol": asdict(protocol) | {"batches": list(batches), "planted": oracle.made},
        "rows": [row for one in engines for row in run(file, one, batches, protocol, oracle)],
    }


def _base(
    sets: Sequence[str] | None,
    batches: Sequence[int],
    protocol: Protocol,
    device: str | None,
    draft_body: str | None,
    draft_head: str | None,
) -> dict[str, object]:
    """Keys that every engine of this run has; --set wins over what the protocol needs."""
    named = {
        "device": device,
        "speculation.draft_body": draft_body,
        "speculation.draft_head": draft_head,
    }
    needed = {
        "limits.max_slots": max(batches),
        "limits.max_model_len": protocol.prompt + protocol.new,
    }
    given = {key: value for key, value in named.items() if value is not None}
    return needed | dict(map(parse_set, sets or [])) | given
