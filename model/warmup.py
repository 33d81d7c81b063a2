"""What runs before the first request, so that no request waits for a first time.

    warm_up(runner): short requests, greedy, sampled and scored, for prompts and what follows them
                     a batch of padding alone for each shape of iteration that is captured

Where graphs are captured, a shape runs eagerly the first time and is captured the second time, so
everything runs twice. Nothing remains of it: a slot is reset when a request joins, and nobody reads
the padding slot.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from outrider.model import backlog
from outrider.model.plan import overshoot_rows, pages_for, powers_of_two
from outrider.model.prefill import MIN_CAPTURED_ROWS
from outrider.model.runner import Runner
from outrider.model.step import Join, Restore, Sampling, Save


def warm_up(runner: Runner) -> None:
    """Run everything that a request may need. No request may have joined before."""
    for _ in range(2 if runner.device.capabilities.graphs else 1):
        for width in runner.prefill_policy.widths or (MIN_CAPTURED_ROWS,):
            _answer(runner, width, Sampling())
        _answer(runner, 1, Sampling(temperature=1.0))
        edited = Sampling(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=1)
        _answer(runner, 1, edited)
        _answer(runner, MIN_CAPTURED_ROWS, Sampling(prompt_logprobs=1))
        if runner.run.num_snapshots:
            _reuse(runner)
        _run_captured_shapes(runner)


def _reuse(runner: Runner) -> None:
    """Save a state behind a prompt, then begin the same prompt and a longer one with it."""
    _answer(runner, 1, Sampling(), saves=[Save(rows=1, snapshot=0)])
    restore = Restore(snapshot=0, rows=1, copied_page=1, page=1)
    for prompt in (1, 2):
        _answer(runner, prompt, Sampling(), restore=restore)


def _answer(runner: Runner, prompt: int, sampling: Sampling, **more: Any) -> None:
    """Answer a request with a prompt of this many tokens, for a few iterations. more: of Join."""
    run = runner.run
    overshoot = overshoot_rows(run.draft_tokens)
    most = min(run.max_model_len, (run.num_pages - 1) * run.page_tokens - overshoot)
    prompt = min(prompt, most - 1)
    max_tokens = min(2 * run.draft_tokens + 2, most - prompt)
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    pages = range(1, 1 + pages_for(prompt + max_tokens + overshoot, run.page_tokens))
    tokens = [0] * prompt
    join = Join(slot=0, request=-1, tokens=tokens, pages=list(pages), sampling=sampling, **more)
    runner.apply([join])
    while runner.has_work:
        runner.step()


@torch.inference_mode()
def _run_captured_shapes(runner: Runner) -> None:
    """Run all shapes of iteration, those that may have grammars also in two pieces, and what the
    draft may have to catch up with.

    Without auto_depth it never has to: then depth 0 only runs where no request takes a draft.
    """
    drafter = runner.executor.drafter
    for batch in runner.packer.captured_batches():
        runner.run_iteration(batch)
        if batch.features.masked and runner.grammars.are_possible:
            runner.run_in_two(batch, lambda drafts: None)
        if drafter is not None and runner.run.auto_depth and batch.key[1:] == (0,):
            for width in powers_of_two(1, backlog.ROWS):
                drafter.catch_up(batch, width)
