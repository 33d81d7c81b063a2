"""Tokens per second of the bundled checkpoint on this machine: `make bench`.

    two engines of two CPU ranks, without and with drafts -> prompts one by one, greedy -> tok/s
    transformers' generate, same prompts and precision, with 1 and 2 threads -> tok/s

The tokens of each engine are compared with those of transformers; where they differ, the two
likeliest tokens' logits are told. K = 0 is plain decoding by the same code. The last line of stdout
is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from transformers import Qwen3_5ForCausalLM

from outrider.actors.engine import Engine
from outrider.benchmarks.differences import find_differences
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


def measure_engine(
    model: Path, config: Path | None, prompts: list[list[int]], draft_tokens: int, max_tokens: int
) -> tuple[dict[int, Run], dict[str, float]]:
    """One engine's Run for each K, which its requests ask for, and its CPU use when idle.

    draft_tokens: the engine's own K, the most that a request can ask for. At 0 the draft is not
    loaded, and K = 0 is the only one measured; otherwise the others are.
    """
    overrides = {
        "model": str(model),
        "device": "cpu",
        "parallel.tensor_parallel": RANKS,
        "speculation.draft_tokens": draft_tokens,
    }
    depths = [k for k in DRAFT_TOKENS if 0 < k <= draft_tokens] if draft_tokens else [0]
    runs: dict[int, Run] = {}
    with Engine.from_config(config, overrides) as engine:
        for k in depths:
            runs[k] = measure_depth(engine, prompts, k, max_tokens)
            print(f"TP{RANKS} K={k}: {runs[k]}", file=sys.stderr)
        idle = idle_cpu_percent()
    return runs, idle


def measure_depth(engine: Engine, prompts: list[list[int]], k: int, max_tokens: int) -> Run:
    """The Run of requests that ask for K drafts an iteration."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, draft_tokens=k)
    engine.generate(prompts[0], sampling)  # first use of buffers and code paths
    drafted = accepted = 0

    def generate(prompt: list[int]) -> list[int]:
        nonlocal drafted, accepted
        (completion,) = engine.generate(prompt, sampling)
        drafted += completion.stats.drafted
        accepted += completion.stats.accepted
        return list(completion.token_ids)

    tok_s, outputs = timed(generate, prompts)
    return Run(tok_s=tok_s, outputs=outputs, drafted=drafted, accepted=accepted)


def measure_transformers(
    model: Path, prompts: list[list[int]], threads: int, max_tokens: int
) -> Run:
    """transformers in float32 with its cache, greedy, exactly `max_tokens` tokens a prompt."""
    torch.set_num_threads(threads)
    network: Any = Qwen3_5ForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    generate(prompts[0])
    tok_s, outputs = timed(generate, prompts)
    return Run(tok_s=tok_s, outputs=outputs)


def timed(
    generate: Callable[[list[int]], list[int]], prompts: list[list[int]]
) -> tuple[float, list[list[int]]]:
    """Median tokens per second over the repeats, prefill included, and the last answers."""
    speeds: list[float] = []
    outputs: list[list[int]] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        outputs = [generate(prompt) for prompt in prompts]
        speeds.append(sum(map(len, outputs)) / (time.perf_counter() - start))
    return round(statistics.median(speeds), 2), outputs


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
    runs: dict[int, Run],
    transformers_runs: dict[int, Run],
    idle: dict[str, float],
    prompts: list[list[int]],
    top2_margin: Callable[[list[int]], float],
) -> dict[str, Any]:
    """The JSON object. runs: by K; transformers_runs: by number of threads."""
    best = max(runs, key=lambda k: runs[k].tok_s)
    reference = max(transformers_runs.values(), key=lambda run: run.tok_s)
    engine = {}
    for k, run in runs.items():
        fields = {key: value for key, value in asdict(run).items() if key != "outputs"}
        compared = list(zip(prompts, run.outputs, reference.outputs, strict=True))
        differences = find_differences(compared, top2_margin)
        engine[k] = fields | {
            "prompts_equal_to_transformers": len(compared) - len(differences),
            "differences": [asdict(difference) for difference in differences],
        }
    return {
        "ranks": RANKS,
        "best_draft_tokens": best,
        "tok_s": runs[best].tok_s,
        "tok_s_without_drafts": runs[0].tok_s,
        "tok_s_transformers": reference.tok_s,
        "times_transformers": round(runs[best].tok_s / reference.tok_s, 3),
        "times_without_drafts": round(runs[best].tok_s / runs[0].tok_s, 3),
        "engine_by_draft_tokens": engine,
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


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint with a tokenizer.")] = Path(
        "examples/tiny"
    ),
    config: Annotated[Path | None, typer.Option(help="Settings other than the defaults.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 128,
) -> None:
    """Time this engine at several K, and transformers; JSON on the last line of stdout."""
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    runs, _ = measure_engine(model, config, prompts, 0, max_tokens)
    with_drafts, idle = measure_engine(model, config, prompts, max(DRAFT_TOKENS), max_tokens)
    transformers_runs = {}
    for threads in (1, RANKS):
        run = transformers_runs[threads] = measure_transformers(model, prompts, threads, max_tokens)
        print(f"transformers, {threads} threads: {run}", file=sys.stderr)
    margin = partial(transformers_margin, model)
    result = report(runs | with_drafts, transformers_runs, idle, prompts, margin)
    print(json.dumps({"max_tokens": max_tokens} | result))


if __name__ == "__main__":
    typer.run(main)
