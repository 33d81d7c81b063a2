"""Tokens per second of the bundled checkpoint on this machine: `make bench`.

    two engines of two CPU ranks, without and with drafts -> prompts one by one -> tok/s
    transformers' generate, same prompts and precision, with 1 and 2 threads -> tok/s

Each engine answers the prompts greedily and sampled, in turns. Its greedy tokens are compared with
those of transformers (where they differ, the two likeliest tokens' logits are told), its sampled
ones with those of K = 0, which is plain decoding by the same code. The last line of stdout is one
JSON object; progress goes to stderr.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import torch
import typer
from transformers import Qwen3_5ForCausalLM

from outrider.actors.engine import Engine
from outrider.benchmarks.differences import find_differences
from outrider.benchmarks.traffic import GREEDY, Settings, sampling_settings
from outrider.model.step import Sampling
from outrider.model.text import Tokenizer

RANKS = 2
DRAFT_TOKENS = (0, 1, 2, 3, 4, 5, 8)
PROMPTS = (
    "To create a new project, run the following command:",
    "The default value of this option is",
    "If you want to write your own template tag,",
    "Returns a new instance of the class with",
)
REPEATS = 3
IDLE_S = 5.0
ACTORS = ("ray::RankActor", "ray::DriverActor")
"""Beginnings of the engine's process titles."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to generate: its median speed over the repeats, and its answers."""

    tok_s: float
    outputs: list[list[int]] = field(repr=False)
    """Token ids of each prompt's answer."""
    drafted: int = 0
    accepted: int = 0
    iterations: int = 0

    @property
    def accepted_share(self) -> float:
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_iteration(self) -> float:
        """An iteration brings one token more than the drafts that it keeps."""
        return 1 + self.accepted / max(1, self.iterations)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What an engine did at one K."""

    greedy: Run
    sampled: Run

    @property
    def sampled_tok_s_at_greedy_acceptance(self) -> float:
        """Speed of sampled requests if an iteration brought as many tokens as a greedy one."""
        return (
            self.sampled.tok_s
            * self.greedy.tokens_per_iteration
            / self.sampled.tokens_per_iteration
        )

    def line(self, k: int) -> str:
        """Both side by side."""
        greedy, sampled = self.greedy, self.sampled
        alike = self.sampled_tok_s_at_greedy_acceptance
        return (
            f"TP{RANKS} K={k}: greedy {greedy.tok_s:.1f} tok/s, "
            f"{greedy.accepted_share:.1%} accepted | "
            f"sampled {sampled.tok_s:.1f} tok/s, {sampled.accepted_share:.1%} accepted | "
            f"sampled at greedy's acceptance {alike:.1f} tok/s, {alike / greedy.tok_s:.3f} of it"
        )


def measure_engine(
    model: Path,
    config: Path | None,
    prompts: list[list[int]],
    draft_tokens: int,
    max_tokens: int,
    settings: Settings,
) -> tuple[dict[int, Runs], dict[str, float]]:
    """One engine's Runs for each K, which its requests ask for, and its CPU use when idle.

    draft_tokens: the engine's own K, the most that a request can ask for. At 0 the draft is not
    loaded, and K = 0 is the only one measured; otherwise the others are.
    """
    overrides = {
        "model": str(model),
        "device": "cpu",
        "parallel.tensor_parallel": RANKS,
        "speculation.draft_tokens": draft_tokens,
        "serve.generation_defaults": "neutral",
        "cache.prefix": False,  # a round repeats the prompts of the one before
    }
    depths = [k for k in DRAFT_TOKENS if 0 < k <= draft_tokens] if draft_tokens else [0]
    runs: dict[int, Runs] = {}
    with Engine.from_config(config, overrides) as engine:
        for k in depths:
            runs[k] = measure_depth(engine, prompts, k, max_tokens, settings)
            print(runs[k].line(k), file=sys.stderr)
        idle = idle_cpu_percent()
    return runs, idle


def measure_depth(
    engine: Engine, prompts: list[list[int]], k: int, max_tokens: int, settings: Settings
) -> Runs:
    """The Runs of requests that ask for K drafts an iteration, greedy and with these settings."""
    ways = [
        EngineWay(
            engine,
            prompts,
            Sampling(max_tokens=max_tokens, ignore_eos=True, **asked, draft_tokens=k),
        )
        for asked in (GREEDY, settings)
    ]
    for way in ways:
        engine.generate(prompts[0], way.sampling)  # first use of buffers and code paths
    results = timed([way.generate for way in ways], len(prompts))
    greedy, sampled = (
        Run(tok_s=tok_s, outputs=outputs, **way.counts)
        for way, (tok_s, outputs) in zip(ways, results)
    )
    return Runs(greedy=greedy, sampled=sampled)


class EngineWay:
    """An engine's answers to prompts; `counts` sums drafted, accepted and iterations."""

    def __init__(self, engine: Engine, prompts: list[list[int]], sampling: Sampling) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.counts = {"drafted": 0, "accepted": 0, "iterations": 0}

    def generate(self, index: int) -> list[int]:
        """The answer to the prompt of this index, which is also the seed of its draws."""
        sampling = msgspec.structs.replace(self.sampling, seed=index)
        (completion,) = self.engine.generate(self.prompts[index], sampling)
        for name in self.counts:
            self.counts[name] += getattr(completion.stats, name)
        return list(completion.token_ids)


def measure_transformers(
    model: Path, prompts: list[list[int]], threads: int, max_tokens: int
) -> Run:
    """transformers in float32 with its cache, greedy, exactly `max_tokens` tokens a prompt."""
    torch.set_num_threads(threads)
    network: Any = Qwen3_5ForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(index: int) -> list[int]:
        ids = torch.tensor([prompts[index]])
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, ids.shape[1] :].tolist()

    generate(0)
    ((tok_s, outputs),) = timed([generate], len(prompts))
    return Run(tok_s=tok_s, outputs=outputs)


def timed(
    ways: Sequence[Callable[[int], list[int]]], num_prompts: int
) -> list[tuple[float, list[list[int]]]]:
    """For each way to answer the prompts, by their index: its median tokens per second over the
    repeats, prefill included, and its last answers.

    The ways take turns, so that what slows the machine for a while slows all of them.
    """
    speeds: list[list[float]] = [[] for _ in ways]
    outputs: list[list[list[int]]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for i, generate in enumerate(ways):
            start = time.perf_counter()
            outputs[i] = [generate(index) for index in range(num_prompts)]
            speeds[i].append(sum(map(len, outputs[i])) / (time.perf_counter() - start))
    medians = [round(statistics.median(of_way), 2) for of_way in speeds]
    return list(zip(medians, outputs, strict=True))


def idle_cpu_percent() -> dict[str, float]:
    """CPU use over IDLE_S in % of one core: "engine" is this process and its actors,
    "ray_daemons" the rest of Ray."""
    before = cpu_seconds()
    start = time.perf_counter()
    time.sleep(IDLE_S)
    after, elapsed = cpu_seconds(), time.perf_counter() - start
    used = {"engine": 0.0, "ray_daemons": 0.0}
    for (pid, kind), seconds in after.items():
        used[kind] += 100 * (seconds - before.get((pid, kind), seconds)) / elapsed
    return {kind: round(percent, 2) for kind, percent in used.items()}


def cpu_seconds() -> dict[tuple[int, str], float]:
    """User and system seconds of this process and its descendants, by pid and kind.

    The kinds are those of idle_cpu_percent.
    """
    this_process = psutil.Process()
    seconds = {}
    for process in (this_process, *this_process.children(recursive=True)):
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        is_ours = process == this_process or title.startswith(ACTORS)
        kind = "engine" if is_ours else "ray_daemons"
        seconds[process.pid, kind] = times.user + times.system
    return seconds


def transformers_margin(model: Path, tokens: list[int]) -> float:
    """Logit of the likeliest token behind `tokens` less that of the second."""
    network: Any = Qwen3_5ForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        first, second = network(torch.tensor([tokens])).logits[0, -1].topk(2).values
    return float(first - second)


def report(
    runs: dict[int, Runs],
    settings: Settings,
    transformers_runs: dict[int, Run],
    idle: dict[str, float],
    prompts: list[list[int]],
    top2_margin: Callable[[list[int]], float],
) -> dict[str, Any]:
    """The JSON object. runs: by K; settings: of the sampled requests; transformers_runs: by number
    of threads."""
    best = max(runs, key=lambda k: runs[k].greedy.tok_s)
    reference = max(transformers_runs.values(), key=lambda run: run.tok_s)
    greedy, sampled = {}, {}
    for k, both in runs.items():
        compared = list(zip(prompts, both.greedy.outputs, reference.outputs, strict=True))
        differences = find_differences(compared, top2_margin)
        greedy[k] = numbers(both.greedy) | {
            "prompts_equal_to_transformers": len(compared) - len(differences),
            "differences": [asdict(difference) for difference in differences],
        }
        plain = runs[0].sampled.outputs
        equal = [text == other for text, other in zip(both.sampled.outputs, plain, strict=True)]
        alike = both.sampled_tok_s_at_greedy_acceptance
        sampled[k] = numbers(both.sampled) | {
            "prompts_equal_to_plain_decoding": sum(equal),
            "tok_s_at_greedy_acceptance": round(alike, 2),
            "share_of_greedy_at_its_acceptance": round(alike / both.greedy.tok_s, 3),
        }
    return {
        "ranks": RANKS,
        "best_draft_tokens": best,
        "tok_s": runs[best].greedy.tok_s,
        "tok_s_without_drafts": runs[0].greedy.tok_s,
        "tok_s_transformers": reference.tok_s,
        "times_transformers": round(runs[best].greedy.tok_s / reference.tok_s, 3),
        "times_without_drafts": round(runs[best].greedy.tok_s / runs[0].greedy.tok_s, 3),
        "engine_by_draft_tokens": greedy,
        "sampling": settings,
        "sampled_by_draft_tokens": sampled,
        "transformers_by_threads": {
            threads: run.tok_s for threads, run in transformers_runs.items()
        },
        "idle_cpu_percent": idle,
        "num_prompts": len(reference.outputs),
        "host": {
            "machine": platform.machine(),
            "cpus": len(psutil.Process().cpu_affinity() or ()),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def numbers(run: Run) -> dict[str, Any]:
    """A Run as it stands in the JSON object: all but its answers."""
    fields = {key: value for key, value in asdict(run).items() if key != "outputs"}
    return fields | {"accepted_share": round(run.accepted_share, 4)}


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint with a tokenizer.")] = Path(
        "examples/tiny"
    ),
    config: Annotated[Path | None, typer.Option(help="Settings other than the defaults.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the sampled requests.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the sampled requests.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of the sampled requests; 0: all tokens.")] = 0,
) -> None:
    """Time this engine at several K, and transformers; JSON on the last line of stdout."""
    settings = sampling_settings(temperature=temperature, top_p=top_p, top_k=top_k)
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    runs, _ = measure_engine(model, config, prompts, 0, max_tokens, settings)
    with_drafts, idle = measure_engine(
        model, config, prompts, max(DRAFT_TOKENS), max_tokens, settings
    )
    transformers_runs = {}
    for threads in (1, RANKS):
        run = transformers_runs[threads] = measure_transformers(model, prompts, threads, max_tokens)
        print(f"transformers, {threads} threads: {run}", file=sys.stderr)
    margin = partial(transformers_margin, model)
    result = report(runs | with_drafts, settings, transformers_runs, idle, prompts, margin)
    print(json.dumps({"max_tokens": max_tokens} | result))


if __name__ == "__main__":
    typer.run(main)
