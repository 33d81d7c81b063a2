"""JobRunner inference over a file, for `ray job submit` or alone: JSON lines in, JSON lines out.

    ray job submit --working-dir . -- python -m outrider.actors.job --config cluster.yaml \\
        --input prompts.jsonl --output out.jsonl
A line is the body of /v1/completions or /v1/chat/completions with an `id`. Each answer is written
when it is there; a rerun skips the ids that the output already answers and tries failed ones again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider.actors.cluster.reader import parse_set
from outrider.actors.driver.assembly import limits_of
from outrider.actors.driver.scheduler import Limits
from outrider.actors.engine import Engine
from outrider.actors.errors import EngineDeadError, RequestError
from outrider.actors.http.bodies import ApiError, ChatBody, CompletionBody, Settings, parse
from outrider.actors.http.responses import usage_of
from outrider.actors.options import EXIT_CODES, FAILED, INTERRUPTED, USER_ERROR, config_file
from outrider.model.config import ConfigError
from outrider.model.text import Tokenizer

SOME_REFUSED = 3
REPORT_S = 5.0
SERVER_ONLY = {"stream", "stream_options", "n", "echo"}
"""Fields of a body that mean nothing for a line of a file."""


@dataclass(frozen=True)
class InputLine:
    """One line of the input, not looked into yet."""

    id: str
    fields: dict[str, Any]


class JobRunner:
    """An engine, and how a line becomes an answer."""

    def __init__(self, engine: Engine, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self._engine, self._limits, self._tokenizer = engine, limits, tokenizer

    def answer(self, line: InputLine) -> dict[str, Any]:
        """The record of the output; what this one line got wrong is its `error`."""
        try:
            body, prompt = self._read(line)
            room = self._limits.room_for(len(prompt))
            (sampling,) = body.samplings(room)
            (done,) = self._engine.generate(prompt, sampling, stop=body.stops)
        except (ApiError, RequestError, ConfigError) as problem:
            return {"id": line.id, "error": str(problem)}
        record: dict[str, Any] = {
            "id": line.id,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "usage": usage_of(len(done.prompt_ids), len(done.token_ids), [done.stats]),
        }
        if body.return_token_ids:
            record |= {"prompt_token_ids": done.prompt_ids, "token_ids": done.token_ids}
        return record | ({"logprobs": done.logprobs} if body.top is not None else {})

    def _read(self, line: InputLine) -> tuple[Settings, list[int]]:
        foreign = sorted(SERVER_ONLY & line.fields.keys())
        if foreign:
            raise ApiError(400, f"{foreign[0]}: not for a line of a file")
        data = json.dumps(line.fields).encode()
        if "messages" in line.fields:
            chat = parse(ChatBody, data)
            if self._tokenizer is None:
                raise ApiError(400, "messages: this checkpoint has no tokenizer")
            said = [message.plain() for message in chat.messages]
            values = chat.chat_template_kwargs or {}
            return chat, self._tokenizer.apply_chat_template(said, **values)
        body = parse(CompletionBody, data)
        prompts = body.prompts()
        if len(prompts) != 1:
            raise ApiError(400, f"prompt: {len(prompts)} prompts; a line has one")
        if isinstance(prompts[0], list):
            return body, prompts[0]
        if self._tokenizer is None:
            raise ApiError(400, "prompt: this checkpoint has no tokenizer: give token ids")
        return body, self._tokenizer.encode(prompts[0])


def read_lines(path: Path) -> list[InputLine]:
    """The input. ConfigError that names the line which is no JSON object with an id of its own."""
    lines: dict[str, InputLine] = {}
    try:
        texts = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read: {problem}") from None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except ValueError as problem:
            raise ConfigError(f"{path}:{number}: not JSON: {problem}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
            raise ConfigError(f'{path}:{number}: expected an object with a text under "id"')
        line = InputLine(fields.pop("id"), fields)
        if line.id in lines:
            raise ConfigError(f"{path}:{number}: the id {line.id!r} was there before")
        lines[line.id] = line
    return list(lines.values())


def answered(path: Path) -> set[str]:
    """Ids that the output answers. Leaves only those lines in it: no errors, no half line."""
    if not path.exists():
        return set()
    kept: dict[str, str] = {}
    for text in path.read_text("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue  # cut off when an earlier run was killed
        if "error" not in record:
            kept[record["id"]] = text
    beside = path.with_name(path.name + ".part")
    beside.write_text("".join(text + "\n" for text in kept.values()), "utf-8")
    beside.replace(path)
    return set(kept)


def work_through(
    lines: Sequence[InputLine], answer: Any, out: TextIO, *, at_once: int, say: Any
) -> tuple[int, int]:
    """Answer every line, `at_once` at a time, written as they come -> (answered, refused)."""
    counts = [0, 0]
    tokens, started_s, told_s = 0, time.monotonic(), time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        for done in _as_they_come(pool, lines, answer, at_once):
            record = done.result()
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            counts["error" in record] += 1
            tokens += record.get("usage", {}).get("completion_tokens", 0)
            now = time.monotonic()
            if now - told_s > REPORT_S or sum(counts) == len(lines):
                told_s = now
                rate = tokens / max(now - started_s, 1e-9)
                say(f"{sum(counts)} of {len(lines)} lines, {counts[1]} refused, {rate:.0f} tok/s")
    return counts[0], counts[1]


def _as_they_come(
    pool: ThreadPoolExecutor, lines: Iterable[InputLine], answer: Any, at_once: int
) -> Iterator[Future[dict[str, Any]]]:
    """Never more than at_once under way, so that an end in between loses no more than those."""
    waiting, running = iter(lines), set()
    while True:
        while len(running) < at_once and (line := next(waiting, None)) is not None:
            running.add(pool.submit(answer, line))
        if not running:
            return
        done, running = concurrent.futures.wait(
            running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        yield from done


def run(args: argparse.Namespace, say: Any) -> int:
    lines = read_lines(args.input)
    before = answered(args.output)
    todo = [line for line in lines if line.id not in before]
    say(f"{len(lines)} lines, {len(lines) - len(todo)} answered before")
    if not todo:
        return 0
    overrides = dict(map(parse_set, args.sets))
    with Engine.from_config(config_file(args.config), overrides) as engine:
        model_dir, model = engine.spec.open_model(check_weights=False)
        tokenizer = Tokenizer(model_dir) if Tokenizer.exists(model_dir) else None
        batch = JobRunner(engine, limits_of(engine.spec, model, engine.run), tokenizer)
        at_once = 2 * engine.run.max_slots
        with args.output.open("a", encoding="utf-8") as out:
            _, refused = work_through(todo, batch.answer, out, at_once=at_once, say=say)
    return SOME_REFUSED if refused else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.actors.job",
        description="Answer a file of prompts.",
        epilog=f"{EXIT_CODES[:-1]}; {SOME_REFUSED} some lines were refused, the others answered.",
    )
    parser.add_argument(
        "--config", type=Path, help="configuration [./cluster.yaml if there is one]"
    )
    parser.add_argument("--input", type=Path, required=True, help="JSON lines, each with an id")
    parser.add_argument(
        "--output", type=Path, required=True, help="answers; continued if it exists"
    )
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY.SUB=VALUE")

    def say(text: str) -> None:
        sys.stderr.write(" ".join(text.split()) + "\n")
        sys.stderr.flush()

    try:
        return run(parser.parse_args(argv), say)
    except KeyboardInterrupt:
        return INTERRUPTED
    except EngineDeadError as error:
        say(f"error: {error}")
        return FAILED
    except ValueError as error:
        say(f"error: {error}")
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
