"""How many drafts survive when requests are sampled: drawn with the target's noise, or likeliest.

    held-out prompts, several seeds -> a Runner on one CPU rank, without Ray -> accepted by position

    python -m outrider.benchmarks.acceptance --seeds 12

Both ways draft from the same heads and must give the same texts; only `ablation.argmax_drafts`
differs. The last line of stdout is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from outrider.benchmarks.ranks import generate
from outrider.benchmarks.traffic import Settings
from outrider.model.config import Ablation, RunConfig
from outrider.model.plan import overshoot_rows, pages_for
from outrider.model.runner import Runner
from outrider.model.text import Tokenizer
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone

SETTINGS: tuple[Settings, ...] = (
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.8},
    {"temperature": 1.0},
)
DRAFTERS = {"argmax": True, "coupled": False}
"""Name of a way to draft -> ablation.argmax_drafts."""


def held_out_prompts(model: Path) -> list[list[int]]:
    """Token ids of the texts in the checkpoint's held_out.txt, which lines of --- separate."""
    texts = (model / "held_out.txt").read_text("utf-8").removesuffix("\n").split("\n---\n")
    tokenizer = Tokenizer(model)
    return [tokenizer.encode(text) for text in texts]


def open_runner(
    model: Path, prompts: Sequence[list[int]], draft_tokens: int, max_tokens: int, argmax: bool
) -> Runner:
    """One CPU rank in float32, with a slot for each prompt. argmax: draft the likeliest tokens."""
    max_model_len = max(map(len, prompts)) + max_tokens
    pages = pages_for(max_model_len + overshoot_rows(draft_tokens), RunConfig.page_tokens)
    run = RunConfig(
        model_dir=str(model),
        draft_tokens=draft_tokens,
        max_slots=len(prompts),
        max_model_len=max_model_len,
        num_pages=1 + len(prompts) * pages,
        ablation=Ablation(argmax_drafts=argmax),
    )
    return Runner(run, open_device("cpu", 0, alone()))


def measure(
    runner: Runner, prompts: Sequence[list[int]], settings: Settings, seeds: int, max_tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """`seeds` answers to every prompt, each with a seed of its own -> what was accepted, and the
    texts."""
    passes: list[tuple[int, int]] = []
    texts: list[list[int]] = []
    for answer in range(seeds):
        result = generate(runner, prompts, max_tokens, settings, answer * len(prompts))
        passes += result["passes"]
        texts += result["outputs"]
    return {
        "tokens": sum(map(len, texts)),
        "passes": len(passes),
        "accepted_by_position": by_position(passes, runner.run.draft_tokens),
        "tokens_per_pass": round(1 + sum(accepted for _, accepted in passes) / len(passes), 3),
    }, texts


def by_position(passes: Sequence[tuple[int, int]], draft_tokens: int) -> list[float]:
    """passes: (drafts, accepted ones). -> For each position, the share of the passes that drafted
    so far in which the draft there, and all before it, were accepted."""
    shares = []
    for position in range(1, draft_tokens + 1):
        accepted = [kept >= position for drafts, kept in passes if drafts >= position]
        shares.append(round(sum(accepted) / max(1, len(accepted)), 4))
    return shares


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint with held_out.txt.")] = Path(
        "examples/tiny"
    ),
    k: Annotated[int, typer.Option(help="Drafts an iteration.", min=1)] = 3,
    seeds: Annotated[int, typer.Option(help="Answers to each prompt.", min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens an answer.", min=2)] = 128,
) -> None:
    """Measure how many drafts of sampled requests are accepted; JSON on the last line of stdout."""
    torch.set_num_threads(1)
    prompts = held_out_prompts(model)
    rows = []
    for settings in SETTINGS:
        row: dict[str, Any] = dict(settings)
        texts = []
        for name, argmax in DRAFTERS.items():
            runner = open_runner(model, prompts, k, max_tokens, argmax)
            row[name], answers = measure(runner, prompts, settings, seeds, max_tokens)
            texts.append(answers)
        row["same_texts"] = texts[0] == texts[1]
        print(row, file=sys.stderr)
        rows.append(row)
    protocol = {"model": str(model), "k": k, "prompts": len(prompts), "seeds": seeds}
    host = {"machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps({**protocol, "max_tokens": max_tokens, "rows": rows, "host": host}))


if __name__ == "__main__":
    typer.run(main)
