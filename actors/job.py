"""A file of prompts answered by one engine, alone or through `ray job submit`.

    outrider job --input prompts.jsonl --output answers.jsonl
    ray job submit --working-dir . -- python -m outrider.actors.job --input ... --output ...
An input line is the body of /v1/completions or /v1/chat/completions with an `id`; its answer is
written as soon as it is there. A rerun skips the ids that the output answers and tries failed ones
again. Ctrl-C ends the engine at once; what was answered by then is on disk.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.actors import console
from outrider.actors.cluster.reader import load_spec
from outrider.actors.driver.assembly import limits_of, load_text
from outrider.actors.driver.messages import Completion
from outrider.actors.driver.scheduler import Limits
from outrider.actors.engine import Engine
from outrider.actors.errors import RequestError
from outrider.actors.http.bodies import ApiError, CompletionBody, Settings
from outrider.actors.http.chat_reply import ChatReply
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.parsing import parse
from outrider.actors.http.prompts import ReadPrompt, banned_tokens, chat_text, reply_of
from outrider.actors.http.responses import usage_of, with_reasoning
from outrider.actors.options import EXIT_CODES, Config, Model, Sets, config_file, overrides
from outrider.model.config import ConfigError
from outrider.model.reply_form import PLAIN
from outrider.model.text import Tokenizer

SOME_REFUSED = 3
REPORT_S = 5.0
"""Seconds between two lines on the progress of the file."""
SERVER_ONLY = {"stream": False, "n": 1, "best_of": 1, "echo": False}
"""Fields of a body that mean nothing for a line of a file, with the values that ask for nothing."""
RECORD_START = '{"id": "'
"""How every line of our output begins: what a killed run left of its last line begins so too."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class InputLine:
    """One line of the input, not looked into yet."""

    id: str
    fields: dict[str, Any]


@dataclass
class Counts:
    """What became of the lines so far."""

    answered: int = 0
    refused: int = 0
    tokens: int = 0
    """Of all answers."""


class JobRunner:
    """Turns one input line into its record of the output, through an engine."""

    def __init__(self, engine: Engine, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self._engine, self._limits, self._tokenizer = engine, limits, tokenizer

    def answer(self, line: InputLine) -> dict[str, Any]:
        """The record of the output; what this one line got wrong is its `error`."""
        try:
            body, prompt = self._read(line)
            grammar = prompt.grammar
            room = self._limits.room_for(len(prompt.ids))
            banned = self._banned(body)
            (sampling,) = body.samplings(
                room, self._limits.sampling_defaults, banned, grammar=grammar
            )
            (done,) = self._engine.generate(
                prompt.ids,
                sampling,
                stop=body.stops,
                include_stop=body.include_stop_str_in_output,
                show_special=not body.skip_special_tokens,
            )
        except (ApiError, RequestError, ConfigError) as problem:
            return {"id": line.id, "error": str(problem)}
        record: dict[str, Any] = {
            "id": line.id,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "usage": usage_of(len(done.prompt_ids), len(done.token_ids), [done.stats]),
        }
        if isinstance(body, ChatBody):
            record |= self._chat_record(body, prompt, done, record["usage"])
        if body.return_token_ids:
            record |= {"prompt_token_ids": done.prompt_ids, "token_ids": done.token_ids}
        if body.prompt_logprobs is not None:
            record["prompt_logprobs"] = done.prompt_logprobs
        return record | ({"logprobs": done.logprobs} if body.num_logprobs is not None else {})

    def _chat_record(
        self, body: ChatBody, prompt: ReadPrompt, done: Completion, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """What the record of a chat says otherwise: `text` is the content of its message."""
        reply = ChatReply(body, prompt.form, self._tokenizer)
        message = reply.message(done)
        text = message.pop("content") or ""
        finish = reply.finish_reason(done.finish_reason)
        usage = with_reasoning(usage, reply.num_reasoning_tokens)
        return {"text": text, **message, "finish_reason": finish, "usage": usage}

    def _read(self, line: InputLine) -> tuple[Settings, ReadPrompt]:
        """The line's settings and its prompt."""
        for name, neutral in SERVER_ONLY.items():
            if line.fields.get(name) not in (None, neutral):
                raise ApiError(400, f"{name}: not for a line of a file")
        data = json.dumps(line.fields).encode()
        if "messages" in line.fields:
            chat = parse(ChatBody, data)
            if self._tokenizer is None:
                raise ApiError(400, "messages: this checkpoint has no tokenizer")
            text = chat_text(self._tokenizer, chat)
            form, grammar = reply_of(self._tokenizer, chat, text)
            return chat, ReadPrompt(self._cut(chat, self._tokenizer.encode(text)), form, grammar)
        body = parse(CompletionBody, data)
        prompts = body.prompt
        if len(prompts) != 1:
            raise ApiError(400, f"prompt: {len(prompts)} prompts; a line has one")
        if isinstance(prompts[0], list):
            return body, ReadPrompt(self._cut(body, prompts[0]), PLAIN, body.grammar)
        if self._tokenizer is None:
            raise ApiError(400, "prompt: this checkpoint has no tokenizer: give token ids")
        ids = self._cut(body, self._tokenizer.encode(prompts[0]))
        return body, ReadPrompt(ids, PLAIN, body.grammar)

    def _cut(self, body: Settings, prompt: list[int]) -> list[int]:
        """What truncate_prompt_tokens leaves of a prompt."""
        if body.max_answer_tokens == 0:
            raise ApiError(400, "max_tokens = 0: not for a line of a file")
        kept = body.kept_prompt_tokens(self._limits.max_model_len)
        return prompt[-kept:] if kept else prompt

    def _banned(self, body: Settings) -> list[list[int]]:
        if not body.bad_words:
            return []
        if self._tokenizer is None:
            raise ApiError(400, "bad_words: this checkpoint has no tokenizer")
        return banned_tokens(self._tokenizer, body.bad_words)


def read_lines(path: Path) -> list[InputLine]:
    """The input. ConfigError names the line that is no JSON object with an id of its own."""
    lines: dict[str, InputLine] = {}
    for number, text in enumerate(_read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{path}:{number}: not JSON: {problem}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
            raise ConfigError(f'{path}:{number}: expected an object with a text under "id"')
        line = InputLine(fields.pop("id"), fields)
        if line.id in lines:
            raise ConfigError(f"{path}:{number}: the id {line.id!r} was there before")
        lines[line.id] = line
    return list(lines.values())


def prepare_output(path: Path) -> set[str]:
    """Make the output ready to be continued; returns the ids that it answers.

    Removed are records of errors, which are tried again, and a last line that a killed run cut off.
    A file with any other line is no output of a job: ConfigError, and the file stays as it is.
    """
    if not path.is_file():
        return set()
    kept: dict[str, str] = {}
    text = _read_text(path, errors="surrogateescape")
    *lines, rest = text.split("\n")
    if not _is_cut_off(rest):
        lines.append(rest)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            raise ConfigError(
                f"{path}:{number}: is no answer of a job, so nothing was written. --output names "
                "a new file, or the output of an earlier run, which is continued"
            )
        if "error" not in record:
            kept[record["id"]] = line
    rest = "".join(line + "\n" for line in kept.values())
    if rest != text:
        _replace(path.resolve(), rest.encode("utf-8", "surrogateescape"))
    return set(kept)


def _read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file without a byte order mark; its line breaks are left as they are."""
    try:
        return path.read_bytes().decode("utf-8-sig", errors)
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read: {problem}") from None


def _record(line: str) -> dict[str, Any] | None:
    """The record that a line of the output holds, None where it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    return record if any(isinstance(record.get(key), str) for key in ("text", "error")) else None


def _is_cut_off(rest: str) -> bool:
    """Whether what stands after the last line break is nothing, or the beginning of a record."""
    try:
        json.loads(rest)
    except (ValueError, RecursionError):
        return rest.startswith(RECORD_START) or RECORD_START.startswith(rest)
    return False


def _replace(path: Path, data: bytes) -> None:
    """New content for a file, all of it or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as beside:
        beside.write(data)
    shutil.copymode(path, beside.name)
    Path(beside.name).replace(path)


def work_through(
    lines: Sequence[InputLine],
    answer: Callable[[InputLine], dict[str, Any]],
    out: FileIO,
    *,
    pool: ThreadPoolExecutor,
    at_once: int,
) -> Counts:
    """Answer every line, `at_once` at a time; the thread that answers a line writes its record.

    So a Ctrl-C, which strikes the main thread, can neither lose nor halve a record.
    """
    counts, lock = Counts(), threading.Lock()
    started_s = told_s = time.monotonic()

    def answer_and_write(line: InputLine) -> None:
        record = answer(line)
        text = json.dumps(record, ensure_ascii=False) + "\n"
        with lock:
            _write(out, text)
            counts.answered += "error" not in record
            counts.refused += "error" in record
            counts.tokens += record.get("usage", {}).get("completion_tokens", 0)

    waiting, running = iter(lines), set[Future[None]]()
    while True:
        for line in itertools.islice(waiting, at_once - len(running)):
            running.add(pool.submit(answer_and_write, line))
        if not running:
            return counts
        done, running = concurrent.futures.wait(
            running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for one in done:
            one.result()
        now, made = time.monotonic(), counts.answered + counts.refused
        if now - told_s > REPORT_S or made == len(lines):
            told_s = now
            rate = counts.tokens / max(now - started_s, 1e-9)
            console.say(f"{made} of {len(lines)} lines, {counts.refused} refused, {rate:.0f} tok/s")


def _write(out: FileIO, text: str) -> None:
    """All of the text, or ConfigError. A lone surrogate is written as the \\udXXX of JSON."""
    data = text.encode("utf-8", "backslashreplace")
    try:
        while data:
            data = data[out.write(data) :]
    except OSError as problem:
        raise ConfigError(f"{out.name}: cannot be written: {problem.strerror}") from None


def run_job(config: Path | None, keys: dict[str, Any], source: Path, output: Path) -> Counts:
    """Answer the lines of `source` that `output` does not answer yet."""
    lines = read_lines(source)
    before = prepare_output(output)
    todo = [line for line in lines if line.id not in before]
    console.say(f"{len(lines)} lines, {len(lines) - len(todo)} answered before")
    if not todo:
        return Counts()
    limits = load_spec(config, keys).limits
    at_once = limits.max_slots + min(limits.max_slots, limits.max_queue)
    try:
        out = output.open("ab", buffering=0)
    except OSError as problem:
        raise ConfigError(f"{output}: cannot be written: {problem.strerror}") from None
    # Closed in reverse: the engine ends its requests, then their threads end, then the file closes.
    with (
        out,
        ThreadPoolExecutor(at_once) as pool,
        console.progress() as on_progress,
        Engine.from_config(config, keys, on_progress=on_progress) as engine,
    ):
        model_dir, model = engine.spec.open_model(check_weights=False)
        tokenizer = load_text(engine.spec, model_dir)
        runner = JobRunner(engine, limits_of(engine.spec, model, engine.run), tokenizer)
        return work_through(todo, runner.answer, out, pool=pool, at_once=at_once)


@app.command(
    epilog=f"{EXIT_CODES[:-1]}; {SOME_REFUSED} some lines were refused, the others answered."
)
def job(
    source: Annotated[Path, typer.Option("--input", help="JSON lines, each with an id.")],
    output: Annotated[Path, typer.Option(help="Answers; continued if it is there.")],
    config: Config = None,
    model: Model = None,
    sets: Sets = None,
) -> None:
    """Answer a file of prompts: each line is the body of a completion or a chat, with an id."""
    counts = run_job(config_file(config), overrides(sets, {"model": model}), source, output)
    if counts.refused:
        raise typer.Exit(SOME_REFUSED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit code."""
    return console.run(app, argv, "python -m outrider.actors.job")


if __name__ == "__main__":
    sys.exit(main())
