"""What runs before the first request, so that no request pays for a first time.

    warm_up(runner): short requests, greedy and sampled -> prompts, first tokens, iterations
                     then a batch of padding for each shape that is captured

With graphs the first run of a shape is eager and the second is captured, so everything runs twice.
It leaves nothing behind: the requests' slots are reset for the next one, padding belongs to nobody.
"""

from __future__ import annotations

import msgspec
import torch

from outrider.model import backlog
from outrider.model.plan import overshoot_rows, pages_for, powers_of_two
from outrider.model.prefill import MIN_CAPTURED_ROWS
from outrider.model.runner import Runner
from outrider.model.step import Join, Sampling


def warm_up(runner: Runner) -> None:
    """Run all that a request may need, on pages that nobody holds yet."""
    for _ in range(2 if runner.device.capabilities.graphs else 1):
        for width in runner.prefill_policy.widths or (MIN_CAPTURED_ROWS,):
            _answer(runner, width, Sampling())
        _answer(runner, 1, Sampling(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=1))
        _run_captured_shapes(runner)


def _answer(runner: Runner, prompt: int, sampling: Sampling) -> None:
    """A request whose prompt has so many tokens, and a few iterations."""
    run = runner.run
    prompt = min(prompt, run.max_model_len - 1)
    max_tokens = min(2 * run.draft_tokens + 2, run.max_model_len - prompt)
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    rows = prompt + max_tokens + overshoot_rows(run.draft_tokens)
    pages = range(1, min(1 + pages_for(rows, run.page_tokens), run.num_pages))
    tokens = [0] * prompt
    runner.apply([Join(slot=0, request=-1, tokens=tokens, pages=list(pages), sampling=sampling)])
    while runner.has_work:
        runner.step()


@torch.inference_mode()
def _run_captured_shapes(runner: Runner) -> None:
    drafter = runner.executor.drafter
    for batch in runner.packer.captured_batches():
        runner.run_iteration(batch)
        if drafter is not None and runner.run.auto_depth and batch.key[1:] == (0,):
            for width in powers_of_two(1, backlog.ROWS):
                drafter.catch_up(batch, width)
