"""Tokens per second of the bundled checkpoint on this machine: `make bench`.

    two engines (TP2, CPU ranks), without and with drafts -> prompts one by one, greedy -> tok/s
    transformers' generate, same prompts and precision, best of 1 and 2 threads -> tok/s

The last line of stdout is one JSON object; progress goes to stderr. K = 0 is plain decoding by the
same code. Every engine's tokens are compared with those of transformers.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from transformers import Qwen3_5ForCausalLM

from outrider.actors.engine import Engine
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
"""How the titles of the engine's processes begin."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to generate: median speed over the repeats, and what came out."""

    tok_s: float
    outputs: list[list[int]] = field(repr=False)
    drafted: int = 0
    accepted: int = 0


def measure_engine(
    model: Path, config: Path | None, prompts: list[list[int]], most: int, max_tokens: int
) -> tuple[dict[int, Run], dict[str, float]]:
    """Speed of one engine for each K up to `most`, which requests ask for; and its idle CPU use."""
    overrides = {
        "model": str(model),
        "device": "cpu",
        "parallel.tensor_parallel": RANKS,
        "speculation.draft_tokens": most,
    }
    runs: dict[int, Run] = {}
    with Engine.from_config(config, overrides) as engine:
        for k in (k for k in DRAFT_TOKENS if min(k, 1) == min(most, 1)):
            sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, draft_tokens=k)
            engine.generate(prompts[0], sampling)  # first use of buffers and code paths
            counts = [0, 0]

            def generate(
                prompt: list[int], how: Sampling = sampling, counts: list[int] = counts
            ) -> list[int]:
                (completion,) = engine.generate(prompt, how)
                counts[0] += completion.stats.drafted
                counts[1] += completion.stats.accepted
                return list(completion.token_ids)

            tok_s, outputs = timed(generate, prompts)
            runs[k] = Run(tok_s=tok_s, outputs=outputs, drafted=counts[0], accepted=counts[1])
            print(f"TP{RANKS} K={k}: {runs[k]}", file=sys.stderr)
        idle = idle_cpu_percent()
    return runs, idle


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
    """Median tokens per second over the repeats, prefill included, and the last outputs."""
    speeds: list[float] = []
    outputs: list[list[int]] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        outputs = [generate(prompt) for prompt in prompts]
        speeds.append(sum(map(len, outputs)) / (time.perf_counter() - start))
    return round(statistics.median(speeds), 2), outputs


def idle_cpu_percent() -> dict[str, float]:
    """CPU use over IDLE_S in % of a core: this process and the actors, and Ray's own daemons."""
    before = cpu_seconds()
    start = time.perf_counter()
    time.sleep(IDLE_S)
    after, elapsed = cpu_seconds(), time.perf_counter() - start
    used = {"engine": 0.0, "ray_daemons": 0.0}
    for (pid, kind), seconds in after.items():
        used[kind] += 100 * (seconds - before.get((pid, kind), seconds)) / elapsed
    return {kind: round(percent, 2) for kind, percent in used.items()}


def cpu_seconds() -> dict[tuple[int, str], float]:
    """User + system seconds of this process and its descendants, by pid and owner."""
    this = psutil.Process()
    seconds = {}
    for process in (this, *this.children(recursive=True)):
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        is_actor = title.startswith(ACTORS)
        kind = "engine" if process == this or is_actor else "ray_daemons"
        seconds[process.pid, kind] = times.user + times.system
    return seconds


def report(runs: dict[int, Run], peers: dict[int, Run], idle: dict[str, float]) -> dict[str, Any]:
    """`runs` by K, `peers` by transformers' threads."""
    best = max(runs, key=lambda draft_tokens: runs[draft_tokens].tok_s)
    peer = max(peers.values(), key=lambda run: run.tok_s)
    engine = {}
    for draft_tokens, run in runs.items():
        facts = {key: value for key, value in asdict(run).items() if key != "outputs"}
        same = sum(ours == theirs for ours, theirs in zip(run.outputs, peer.outputs))
        engine[draft_tokens] = facts | {"prompts_equal_to_transformers": same}
    return {
        "ranks": RANKS,
        "best_draft_tokens": best,
        "tok_s": runs[best].tok_s,
        "tok_s_without_drafts": runs[0].tok_s,
        "tok_s_transformers": peer.tok_s,
        "times_transformers": round(runs[best].tok_s / peer.tok_s, 3),
        "times_without_drafts": round(runs[best].tok_s / runs[0].tok_s, 3),
        "engine_by_draft_tokens": engine,
        "transformers_by_threads": {threads: run.tok_s for threads, run in peers.items()},
        "idle_cpu_percent": idle,
        "num_prompts": len(peer.outputs),
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
    """Measure this engine at several K and transformers; JSON on the last line."""
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    runs: dict[int, Run] = {}
    idle: dict[str, float] = {}
    for most in (0, max(DRAFT_TOKENS)):
        found, idle = measure_engine(model, config, prompts, most, max_tokens)
        runs |= found
    peers = {}
    for threads in (1, RANKS):
        peers[threads] = measure_transformers(model, prompts, threads, max_tokens)
        print(f"transformers, {threads} threads: {peers[threads]}", file=sys.stderr)
    print(json.dumps({"max_tokens": max_tokens} | report(runs, peers, idle)))


if __name__ == "__main__":
    typer.run(main)
