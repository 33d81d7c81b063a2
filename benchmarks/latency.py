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
from outrider.benchmarks.differences import find_differences, margin_of
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
class Protocol:
    """The requests that every engine answers."""

    prompt: int
    """Tokens of a prompt, which are random ids."""
    new: int
    """Tokens of an answer; no end of sequence stops it."""
    requests: int
    """Requests of a round, rounded up to a multiple of the batch size."""
    rounds: int
    warmup: int
    """Requests before the rounds, which are not counted."""
    seed: int
    """Of the random ids."""

    def prompts(self, vocab: int, count: int, *, warm: bool = False) -> list[list[int]]:
        """The first `count` prompts of the timed set, or with `warm` of the set that warms up."""
        random = np.random.default_rng([self.seed, warm])
        return [random.integers(0, vocab, self.prompt).tolist() for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine to measure: its name in the report, its keys of cluster.yaml by dotted name."""

    name: str
    keys: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request. Times are in seconds since the request was submitted."""

    prompt: list[int]
    tokens: list[int]
    started_s: float
    """Time of the submission on this process's clock."""
    pieces: list[tuple[float, float, int]]
    """For each streamed piece: client's time, driver's time, number of tokens."""
    server: dict[str, Any]
    """The driver's RequestStats."""


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


def wave_rate(engine: Engine, prompts: list[list[int]], new: int) -> float | None:
    """Tokens a second of a batch given at once, without its first tokens: B (N - 1) / (T_N - T_1).

    T_n is the wall time of Engine.generate with n tokens for each prompt. Offline benchmarks of
    other engines report this rate. None where it cannot be told.
    """

    def timed(tokens: int) -> float:
        started = time.perf_counter()
        engine.generate(prompts, Sampling(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - started

    timed(new)
    seconds = float(np.median([timed(new) - timed(1) for _ in range(3)]))
    return round(len(prompts) * (new - 1) / seconds, 2) if new > 1 and seconds > 0 else None


class Oracle:
    """The tokens and counters that a checkpoint must give, where they are known.

    `arguments` are those that a planted checkpoint was made with; None for any other checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.vocab = load_config(folder).vocab_size
        file = folder / "planted.json"
        self.arguments = json.loads(file.read_text()) if file.is_file() else None
        if self.arguments:
            accept, seed = self.arguments["accept"], self.arguments["seed"]
            self.chain = planted.chain(self.vocab, accept, seed)

    @cache  # noqa: B019 -- a process has one oracle
    def expected(
        self, last: int, new: int, draft_tokens: int, run_ahead: int
    ) -> planted.Expected | None:
        """What a request must give whose prompt ends in `last`; None where it is not known."""
        if not self.arguments:
            return None
        return planted.expected_counts(self.chain, last, new, draft_tokens, run_ahead)


def stream_request(engine: Engine, prompt: list[int], new: int) -> Answer:
    """Stream one greedy request to its end."""
    started, tokens, pieces, stats = time.perf_counter(), [], [], None
    for chunk in engine.stream(prompt, Sampling(max_tokens=new, ignore_eos=True)):
        at_s = time.perf_counter() - started
        if chunk.token_ids:
            pieces.append((at_s, chunk.at_s, len(chunk.token_ids)))
        tokens += chunk.token_ids
        stats = chunk.stats or stats
    assert stats is not None
    return Answer(
        prompt=prompt, tokens=tokens, started_s=started, pieces=pieces, server=asdict(stats)
    )


def measure_batch(
    engine: Engine, batch: int, protocol: Protocol, oracle: Oracle, run_ahead: int
) -> dict[str, Any]:
    """Warm up and run the rounds of one batch size; -> its part of a result row.

    run_ahead: the capability of the engine's devices, on which the expected counters depend.
    """
    num_requests = math.ceil(protocol.requests / batch) * batch
    prompts = protocol.prompts(oracle.vocab, num_requests)
    warmup_prompts = protocol.prompts(oracle.vocab, max(protocol.warmup, batch), warm=True)
    answers: list[Answer] = []
    seconds, rates = 0.0, []
    with ThreadPoolExecutor(batch) as threads:

        def answer_all(prompts: list[list[int]]) -> list[Answer]:
            return list(threads.map(lambda ids: stream_request(engine, ids, protocol.new), prompts))

        answer_all(warmup_prompts)
        for _ in range(protocol.rounds):
            started = time.perf_counter()
            round_answers = answer_all(prompts)
            seconds += time.perf_counter() - started
            rates.append(decode_rate(round_answers, batch))
            answers += round_answers
    known = [rate for rate in rates if rate is not None]
    return {
        "batch": batch,
        "requests": len(answers),
        **both_ends(answers),
        "tok_s": round(sum(len(a.tokens) for a in answers) / seconds, 2),
        "decode_tok_s": round(float(np.median(known)), 2) if known else None,
        "wave_tok_s": wave_rate(engine, prompts[:batch], protocol.new),
        **counters(answers, engine.run.draft_tokens, oracle, protocol.new, run_ahead),
        "differences": differences(engine, answers, oracle, protocol.new),
    }


def differences(
    engine: Engine, answers: Sequence[Answer], oracle: Oracle, new: int
) -> list[dict[str, Any]]:
    """Where answers are not what the oracle expects, with the engine's own top-2 margins there."""
    asked = Sampling(max_tokens=1, logprobs=2, draft_tokens=0, ignore_eos=True)

    def top2_margin(tokens: list[int]) -> float:
        (answer,) = engine.generate([tokens], asked)
        return margin_of(answer.logprobs[0])

    expected = [oracle.expected(a.prompt[-1], new, 0, 0) for a in answers]
    compared = [(a.prompt, a.tokens, e.tokens) for a, e in zip(answers, expected) if e is not None]
    return [asdict(difference) for difference in find_differences(compared, top2_margin)]


def counters(
    answers: Sequence[Answer], draft_tokens: int, oracle: Oracle, new: int, run_ahead: int
) -> dict[str, Any]:
    """Sums of the answers' counters, beside what the oracle expects where it knows."""
    total = {
        name: sum(a.server[name] for a in answers) for name in ("iterations", "drafted", "accepted")
    }
    iterations = max(1, total["iterations"])
    by_position = [
        sum(a.server["accepted_per_position"][position] for a in answers) / iterations
        for position in range(draft_tokens)
    ]
    tokens_after_first = sum(len(a.tokens) - 1 for a in answers)
    known: dict[str, Any] = {"exact": None, "expected_accepted": None, "expected_drafted": None}
    if oracle.arguments:
        expected = [oracle.expected(a.prompt[-1], new, draft_tokens, run_ahead) for a in answers]
        right = [one for one in expected if one is not None]
        known = {
            "exact": sum(a.tokens == one.tokens for a, one in zip(answers, right, strict=True)),
            "expected_accepted": sum(one.accepted for one in right),
            "expected_drafted": sum(one.drafted for one in right),
        }
    return {
        **total,
        "accepted_share": round(total["accepted"] / max(1, total["drafted"]), 4),
        "accepted_by_position": [round(share, 4) for share in by_position],
        "tokens_per_iteration": round(tokens_after_first / iterations, 3),
        **known,
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
        (prompt,) = protocol.prompts(oracle.vocab, 1, warm=True)
        first_token_s = start_s + stream_request(engine, prompt, 1).pieces[0][0]
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

    Another process writes it, since a process that draws weights on a device keeps memory there.
    Raises ConfigError for an unknown size and for a device that cannot be used.
    """
    if size not in planted.SIZES:
        raise ConfigError(f"--size {size}: must be one of {', '.join(planted.SIZES)}")
    folder = CACHE / f"planted-{size}-{accept:g}-{seed}"
    if not (folder / "planted.json").is_file():
        print_progress(f"writing a planted checkpoint of size {size} to {folder}")
        device_kind = "cuda" if device == "cuda" else "cpu"
        process = multiprocessing.get_context("spawn").Process(
            target=_write_planted, args=(folder, size, accept, seed, device_kind)
        )
        process.start()
        process.join()
        if process.exitcode == USER_ERROR:
            raise ConfigError(f"--device {device}: cannot be used, the reason stands above")
        if process.exitcode:
            raise RuntimeError(f"no checkpoint was written to {folder}: the error stands above")
    return folder


def _write_planted(folder: Path, size: str, accept: float, seed: int, device_kind: str) -> None:
    """The process that writes a planted checkpoint."""
    try:
        claim_device(device_kind, 0)
    except DeviceError as error:
        print_progress(str(error))
        sys.exit(USER_ERROR)
    planted.write(folder, size, accept, seed, device_kind)


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
        str, typer.Option(help="Size of a planted one.  [default: 2b on cuda and npu, tiny on cpu]")
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts' random ids.")] = 0,
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
        prompt=prompt, new=new, requests=requests, rounds=rounds, warmup=warmup, seed=seed
    )
    base = _common_keys(sets, batches, protocol, device, draft_body, draft_head)
    spec = load_spec(config, {**base, "model": str(model or "planted")})
    depths = parse_numbers(k, "--k", 0, MAX_DRAFT_TOKENS) if k else [spec.speculation.draft_tokens]
    if ablate and len(depths) > 1:
        raise ValueError(f'--k "{k}": an ablation takes one K')
    folder = model or planted_model(
        size or ("tiny" if spec.device == "cpu" else "2b"), spec.device, accept, 0
    )
    base["model"] = str(folder)
    engines = [
        Configuration(name=f"K = {depth}", keys={**base, "speculation.draft_tokens": depth})
        for depth in depths
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
    }
    given = {key: value for key, value in options.items() if value is not None}
    return needed | dict(map(parse_set, sets or [])) | given
