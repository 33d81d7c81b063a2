"""The command `outrider`: generate, plan, doctor, serve, chat, job and bench.

    argv -- typer --> overrides of cluster.yaml --> Spec, Engine --> stdout: text or JSON

stderr takes the rest (console.py): progress, warnings, errors. What is slow to import (torch, Ray)
is imported inside a command, so that --help answers at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from outrider.actors import console
from outrider.actors.options import (
    EXIT_CODES,
    AsJson,
    Config,
    DraftBody,
    DraftTokens,
    Model,
    Sets,
    TensorParallel,
    config_file,
    overrides,
)

if TYPE_CHECKING:
    from outrider.actors.driver.messages import Completion, RequestStats
    from outrider.actors.engine import Engine
    from outrider.model.step import Sampling

MODELS = " [default: the model's, else"
"""The default of options for which a checkpoint's generation_config.json may have one."""
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    name="outrider",
    help="Serve Qwen3.5-class models with multi-token-prediction drafts, tensor-parallel on Ray.",
    epilog=EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are one line on stderr."""
    args = sys.argv[1:] if argv is None else argv
    return console.run(app, args or ["--help"], "outrider")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        print(f"outrider {metadata.version('outrider')}")
    except metadata.PackageNotFoundError:
        print("outrider, run from its sources without an installation")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(epilog=EXIT_CODES)
def generate(
    config: Config = None,
    model: Model = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt text; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(metavar="1,2,3", help="Prompt as token ids; repeatable.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to texts.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print a prompt before its text.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float | None, typer.Option(help=f"0: greedy. {MODELS} 0]")] = None,
    top_k: Annotated[
        int | None, typer.Option(help=f"Keep the k likeliest tokens; 0: all. {MODELS} 0]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Keep the likeliest up to this sum. {MODELS} 1]")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help=f"Drop below this share of the best. {MODELS} 0]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.  [default: drawn]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    draft_tokens: DraftTokens = None,
    draft_body: DraftBody = None,
    tensor_parallel: TensorParallel = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts: print their text, then a line of statistics.

    One prompt streams. Several run together, texts before ids. With --json: one object a prompt.
    """
    from outrider.actors.engine import Engine
    from outrider.model.step import Sampling

    prompts = _prompts(prompt or [], prompt_ids or [])
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    options = _options(sets, model, draft_tokens, draft_body, tensor_parallel)
    config = config_file(config)
    echoes = [_echo(one) if echo else "" for one in prompts]
    inputs = _chat_prompts(config, options, prompts) if chat else prompts
    with (
        _stdout_kept() as out,
        console.progress() as on_progress,
        Engine.from_config(config, options, on_progress=on_progress) as engine,
    ):
        if as_json:
            for completion in engine.generate(inputs, sampling):
                print(json.dumps(_as_dict(completion), ensure_ascii=False), file=out)
        elif len(inputs) == 1:
            _stream(engine, echoes[0], inputs[0], sampling, out)
        else:
            _print_all(engine, echoes, inputs, sampling, out)


@app.command(epilog=EXIT_CODES)
def plan(
    config: Config = None,
    model: Model = None,
    draft_tokens: DraftTokens = None,
    draft_body: DraftBody = None,
    tensor_parallel: TensorParallel = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Memory of a rank's device.  [default: its share of the host's]"),
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Show the bytes each rank will hold, before anything is loaded.

    Reads config.json alone: neither weights nor Ray.
    """
    from outrider.actors.cluster.reader import load_spec
    from outrider.model.config import ConfigError
    from outrider.model.plan import memory_plan

    options = _options(sets, model, draft_tokens, draft_body, tensor_parallel)
    spec = load_spec(config_file(config), options)
    model_dir, network = spec.open_model(check_weights=False)
    run = spec.run_config(network, model_dir, 0)
    memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
    if memory_bytes is None and spec.device != "cpu":
        raise ConfigError(f"device {spec.device}: give the memory of one with --memory-gib")
    layout = memory_plan(network, run)
    report = {
        "model": spec.model,
        "dtype": run.dtype,
        "tensor_parallel": run.tensor_parallel,
        "draft_tokens": run.draft_tokens,
        "draft_body": run.draft_body,
        "parts": dict(layout.parts),
        "weight_bytes": layout.weight_bytes,
        "kv_token_bytes": {"target": 0, "draft": 0} | layout.kv_token_bytes,
        "kv_page_bytes": layout.kv_page_bytes,
        "page_tokens": run.page_tokens,
        "slot_bytes": layout.slot_bytes,
        "num_slots": layout.num_slots,
        "snapshot_bytes": layout.snapshot_bytes,
        "num_snapshots": layout.num_snapshots,
        "max_model_len": run.max_model_len,
        "pages_that_fit": max(0, layout.pages_that_fit(spec.page_budget(memory_bytes))),
    }
    try:
        pages = spec.resolve_pages(network, model_dir, memory_bytes)
        report |= {"num_pages": pages, "total_bytes": layout.total_bytes(pages)}
    finally:  # the numbers say why it does not fit
        print(json.dumps(report) if as_json else _plan_table(report))


@app.command(epilog=EXIT_CODES)
def doctor(
    config: Config = None,
    model: Model = None,
    tensor_parallel: TensorParallel = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine for a run; exit 1 if something blocks it.

    Looks at devices, drivers, packages, CPUs, memory, Ray and checkpoint, and changes nothing.
    """
    from outrider.actors.cluster.doctor import examine, report
    from outrider.actors.cluster.reader import load_spec

    options = _options(sets, model, None, None, tensor_parallel)
    text, code = report(examine(load_spec(config_file(config), options)), as_json=as_json)
    print(text)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def serve(
    config: Config = None,
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    draft_tokens: DraftTokens = None,
    draft_body: DraftBody = None,
    tensor_parallel: TensorParallel = None,
    sets: Sets = None,
) -> None:
    """Serve the OpenAI API until Ctrl-C or SIGTERM.

    Requests under way may finish, for serve.drain_timeout_s. A second Ctrl-C ends them.
    """
    from outrider.actors.cluster.haproxy import prefer_haproxy
    from outrider.actors.cluster.reader import load_spec

    options = _options(sets, model, draft_tokens, draft_body, tensor_parallel)
    named = {"serve.host": host, "serve.port": port}
    options |= {key: value for key, value in named.items() if value is not None}
    config = config_file(config)
    spec = load_spec(config, options)
    instance = prefer_haproxy(spec) if spec.ray.address is None else None
    from outrider.actors.server import run_server

    run_server(config, options, instance)


@app.command(add_help_option=False, context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure an engine: times, acceptance, exactness."""
    from outrider.benchmarks.latency import app as measure

    _pass_on(measure, context)


@app.command(name="job", add_help_option=False, context_settings=PASS_ON)
def answer_file(context: typer.Context) -> None:
    """Answer a file of prompts, or the rest of it."""
    from outrider.actors.job import app as job

    _pass_on(job, context)


@app.command(name="chat", add_help_option=False, context_settings=PASS_ON)
def chat_with_server(context: typer.Context) -> None:
    """Chat with a running server in a terminal."""
    from outrider.actors.chat import app as chat

    _pass_on(chat, context)


def _pass_on(other: typer.Typer, context: typer.Context) -> None:
    """Run a command that has its options in a module of its own, which is slow to import."""
    command = typer.main.get_command(other)
    code = command.main(context.args, prog_name=context.command_path, standalone_mode=False)
    raise typer.Exit(code or 0)


def _plan_table(report: Mapping[str, Any]) -> str:
    """The report of `plan` for people: a name and a number a line."""
    kv = report["kv_token_bytes"]
    rows = [
        *report["parts"].items(),
        ("all weights", report["weight_bytes"]),
        ("KV a token, target", kv["target"]),
        ("KV a token, draft", kv["draft"]),
        (f"KV a page of {report['page_tokens']} tokens", report["kv_page_bytes"]),
        ("state a slot", report["slot_bytes"]),
        ("saved state of a prompt's beginning", report["snapshot_bytes"]),
        ("pages that fit", report["pages_that_fit"]),
    ]
    if "num_pages" in report:
        what = (
            f"weights, {report['num_slots']} slots, {report['num_snapshots']} saved states, "
            f"{report['num_pages']} pages"
        )
        rows.append((what, report["total_bytes"]))
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{report['model']}: {report['dtype']}, {report['tensor_parallel']} ranks, "
        f"{report['draft_tokens']} drafts an iteration, draft body {report['draft_body']}",
        f"{'on each rank':{width}}  {'bytes':>15}",
        *(f"{name:{width}}  {number:>15,}" for name, number in rows),
    ]
    return "\n".join(lines)


def _options(
    sets: Sequence[str] | None,
    model: str | None,
    draft_tokens: str | None,
    draft_body: str | None,
    tensor_parallel: int | None,
) -> dict[str, Any]:
    """Overrides of cluster.yaml from the options that most commands have."""
    whole = draft_tokens is not None and draft_tokens.removeprefix("-").isdecimal()
    named = {
        "model": model,
        "speculation.draft_tokens": int(draft_tokens) if draft_tokens and whole else draft_tokens,
        "speculation.draft_body": draft_body,
        "parallel.tensor_parallel": tensor_parallel,
    }
    return overrides(sets, named)


def _prompts(texts: Sequence[str], ids: Sequence[str]) -> list[str | list[int]]:
    """The prompts of --prompt, then those of --prompt-ids.

    Raises ValueError for one that is empty, and for bytes on the command line that are no text.
    """
    prompts = [*texts, *map(_token_ids, ids)]
    if not prompts:
        raise ValueError("give --prompt TEXT or --prompt-ids 1,2,3")
    for number, one in enumerate(prompts, 1):
        if not one:
            raise ValueError(f"prompt {number} of {len(prompts)} is empty")
        try:
            str(one).encode()
        except UnicodeEncodeError as problem:
            raise ValueError(f"prompt {number} of {len(prompts)} is not UTF-8: {problem}") from None
    return prompts


def _token_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]; an empty text is an empty prompt. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f'--prompt-ids "{text}": expected token ids like 1,2,3')
    return [int(part) for part in parts]


def _chat_prompts(
    config: Path | None, options: Mapping[str, Any], prompts: Sequence[str | list[int]]
) -> list[str | list[int]]:
    """The prompts with each text as the token ids of a user's message; ids stay as they are."""
    from outrider.actors.cluster.reader import load_spec
    from outrider.actors.driver.assembly import load_text
    from outrider.model.config import ConfigError

    spec = load_spec(config, options)
    model_dir, _ = spec.open_model(check_weights=False)
    tokenizer = load_text(spec, model_dir)
    if tokenizer is None:
        raise ConfigError(f"{model_dir}: has no tokenizer, so no chat template; use --prompt-ids")
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": one}])
        if isinstance(one, str)
        else one
        for one in prompts
    ]


@contextlib.contextmanager
def _stdout_kept() -> Iterator[TextIO]:
    """Yields stdout for the answers; whatever else prints meanwhile, such as Ray, gets stderr."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield out


def _stream(
    engine: Engine, echo: str, prompt: str | list[int], sampling: Sampling, out: TextIO
) -> None:
    """Print one answer as it comes."""
    started_s, token_ids, texts, stats = time.perf_counter(), [], [], None
    print(echo, end="", file=out, flush=True)
    for chunk in engine.stream(prompt, sampling):
        console.check_interrupt()
        print(chunk.text, end="", file=out, flush=True)
        texts.append(chunk.text)
        token_ids += chunk.token_ids
        stats = chunk.stats or stats
    print("" if any(texts) else _as_text(token_ids), file=out)
    if stats is not None:
        print(_statistics([stats], len(token_ids), time.perf_counter() - started_s), file=out)


def _print_all(
    engine: Engine,
    echoes: Sequence[str],
    prompts: Sequence[str | list[int]],
    sampling: Sampling,
    out: TextIO,
) -> None:
    """Print the answers of prompts that ran together, each under a heading."""
    started_s = time.perf_counter()
    completions = engine.generate(prompts, sampling)
    console.check_interrupt()
    elapsed_s = time.perf_counter() - started_s
    for number, (echo, one) in enumerate(zip(echoes, completions, strict=True), 1):
        print(f"--- prompt {number} of {len(completions)} ({one.finish_reason})", file=out)
        print(f"{echo}{one.text or _as_text(one.token_ids)}", file=out)
    tokens = sum(len(one.token_ids) for one in completions)
    print(_statistics([one.stats for one in completions], tokens, elapsed_s), file=out)


def _echo(prompt: str | list[int]) -> str:
    """What --echo prints before the answer; token ids end in a comma, since more follow."""
    return prompt if isinstance(prompt, str) else f"{_as_text(prompt)},"


def _as_text(token_ids: Sequence[int]) -> str:
    """Token ids as 1,2,3: how prompts and answers without a tokenizer are written."""
    return ",".join(map(str, token_ids))


def _as_dict(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    return {
        "prompt_ids": list(completion.prompt_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stats": {
            "iterations": stats.iterations,
            "drafter": stats.drafter,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accepted_per_position": list(stats.accepted_per_position),
            "ttft_s": stats.ttft_s,
            "tpot_s": stats.tpot_s,
        },
    }


def _statistics(stats: Sequence[RequestStats], tokens: int, elapsed_s: float) -> str:
    """One line of statistics over one or more requests.

    Tokens an iteration leave out the first token of each request, which its prefill yields.
    """
    iterations = sum(one.iterations for one in stats)
    drafted, accepted = (sum(getattr(one, n) for one in stats) for n in ("drafted", "accepted"))
    positions = itertools.zip_longest(*(one.accepted_per_position for one in stats), fillvalue=0)
    by_position = "/".join(f"{100 * sum(p) / max(1, iterations):.0f}" for p in positions)
    ttft_ms = 1000 * sum(one.ttft_s for one in stats) / len(stats)
    parts = [
        f"drafted {drafted}",
        f"accepted {accepted} ({100 * accepted / max(1, drafted):.0f} %)",
        f"by position {by_position} %" if by_position and drafted else "",
        f"{(tokens - len(stats)) / max(1, iterations):.2f} tokens/iteration",
        f"{tokens / elapsed_s:.0f} tok/s",
        f"ttft {ttft_ms:.0f} ms",
    ]
    return "[" + " | ".join(part for part in parts if part) + "]"


if __name__ == "__main__":
    sys.exit(main())
