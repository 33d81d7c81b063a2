"""Faults that are injected into real rank processes, again and again, under traffic of all kinds.

    python -m tests.chaos --faults 200 --seed 0     make chaos: a fault, a recovery, the next
    python -m tests.chaos --minutes 30              make soak: traffic with a fault now and then
One engine lives through all of it. Each answer is compared with the one that the same request got
before the first fault: tokens, text, log probabilities, end and counts of drafts. A fault is a
signal, or the memory of a rank overwritten; a moment is when it strikes. The report is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from outrider.actors.driver.messages import Completion
from outrider.actors.engine import Engine, Grammar, Sampling
from outrider.model.text import Tokenizer
from tests.memory import overwrite_weights

TINY = Path(__file__).parents[1] / "examples" / "tiny"
SLOTS, CLIENTS = 4, 6
LIMITS: dict[str, Any] = {
    "max_slots": SLOTS, "max_model_len": 1024, "prefill_chunk": 64, "draft_tokens": 3,
    "prefill_s": 3.0, "decode_s": 2.0, "loading_s": 30.0, "warmup_s": 30.0,
    "max_losses": 1_000_000,
}  # fmt: skip
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "crashed": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "terminated": signal.SIGTERM,
}
FAULTS = (*SIGNALS, "memory overwritten")
MOMENTS = ("idle", "prompt", "answer", "starting", "loading", "coming back")
"""What the ranks do when a fault strikes. An answer is drafted and verified in turn; the instant is
random. "coming back" is right after a recovery, while requests are computed anew."""
RECOVERY_LIMIT_S = 90.0
TEXTS = (
    "To create a new project,",
    "By default, the server",
    "If you want to write your own template tag,",
    "class Parser:\n    def __init__(self",
    "The function returns",
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy": ({"max_tokens": 80}, ()),
    "seeded": ({"max_tokens": 70, "temperature": 0.9, "top_p": 0.95}, ()),
    "penalties": (
        {"max_tokens": 60, "temperature": 0.8, "presence_penalty": 0.7,
         "frequency_penalty": 0.5, "repetition_penalty": 1.2}, ()),
    "log probabilities": ({"max_tokens": 50, "logprobs": 3, "prompt_logprobs": 1}, ()),
    "stop strings": ({"max_tokens": 80, "temperature": 0.7}, ("the ", "self.")),
    "grammar": ({"max_tokens": 40, "temperature": 0.8, "grammar": Grammar("json_schema", SCHEMA)},
                ()),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and the answer that it got undisturbed."""

    kind: str
    prompt: list[int]
    sampling: Sampling
    stop: tuple[str, ...]
    right: Completion | None = None


@dataclasses.dataclass
class Tally:
    """What became of the requests."""

    answered: Counter[str] = dataclasses.field(default_factory=Counter)
    """By kind."""
    lost: list[str] = dataclasses.field(default_factory=list)
    duplicated: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    longest_pause_s: float = 0.0
    """Between two chunks of a stream."""


def pool(tokenizer: Tokenizer, rng: random.Random) -> list[Asked]:
    """Requests of every kind: short prompts and long ones."""
    asked = []
    for kind, (how, stop) in KINDS.items():
        for text in rng.sample(TEXTS, 3):
            words = tokenizer.encode(text * rng.choice((1, 1, 12)))[:500]
            sampling = Sampling(seed=rng.randrange(2**31), **how)
            asked.append(Asked(kind, words, sampling, stop))
    return asked


class Clients:
    """Threads that ask, stream and compare, until they are told to end; they can pause."""

    def __init__(self, engine: Engine, asked: Sequence[Asked], seed: int) -> None:
        self.engine, self.asked, self.tally = engine, asked, Tally()
        self._run, self._end = threading.Event(), threading.Event()
        self._busy = threading.Semaphore(CLIENTS)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._body, args=(random.Random(seed * 1000 + number),))
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing of theirs is under way."""
        self._run.clear()
        for _ in range(CLIENTS):
            self._busy.acquire()
        yield
        self._busy.release(CLIENTS)
        self._run.set()

    def start(self) -> None:
        self._run.set()

    def close(self) -> None:
        self._end.set()
        self._run.set()
        for thread in self._threads:
            thread.join()

    def ask(self, one: Asked) -> None:
        """Stream an answer and compare it."""
        right = one.right
        assert right is not None
        tokens, text, logprobs, prompt_logprobs = [], "", [], []
        last_s, pause_s, last = time.monotonic(), 0.0, None
        problem: str | None = None
        try:
            for last in self.engine.stream(one.prompt, one.sampling, stop=one.stop):
                now = time.monotonic()
                pause_s, last_s = max(pause_s, now - last_s), now
                tokens += last.token_ids
                text += last.text
                logprobs += last.logprobs
                prompt_logprobs += last.prompt_logprobs
        except (RuntimeError, ValueError) as error:  # any of ours: the request is lost
            problem = f"{one.kind}: {type(error).__name__}: {error}"
        with self._lock:
            self.tally.longest_pause_s = max(self.tally.longest_pause_s, pause_s)
            if problem is not None or last is None or last.stats is None:
                self.tally.lost.append(problem or f"{one.kind}: no end")
                return
            self.tally.answered[one.kind] += 1
            if len(tokens) > len(right.token_ids):
                self.tally.duplicated.append(f"{one.kind}: {len(tokens)} tokens")
            elif tokens != right.token_ids or text != right.text:
                self.tally.wrong.append(f"{one.kind}: {text!r} instead of {right.text!r}")
            elif (last.finish_reason, counts(last.stats)) != (
                right.finish_reason, counts(right.stats)
            ):  # fmt: skip
                self.tally.wrong.append(f"{one.kind}: {last.finish_reason} {last.stats}")
            elif not (
                is_close(logprobs, right.logprobs)
                and is_close(prompt_logprobs, right.prompt_logprobs)
            ):
                self.tally.wrong.append(f"{one.kind}: log probabilities")

    def _body(self, rng: random.Random) -> None:
        while not self._end.is_set():
            self._run.wait()
            with self._busy:
                if self._run.is_set() and not self._end.is_set():
                    self.ask(rng.choice(self.asked))


def counts(stats: Any) -> tuple[Any, ...]:
    return stats.iterations, stats.drafted, stats.accepted, stats.accepted_per_position


def is_close(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """The same ids with the same log probabilities, but for rounding."""
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected):
        if (one is None) != (other is None):
            return False
        for (token, value), (right, number) in zip(one or [], other or [], strict=True):
            if token != right or abs(value - number) > 1e-3:
                return False
    return True


class Injector:
    """Strikes ranks of one engine."""

    def __init__(self, engine: Engine, clients: Clients, rng: random.Random) -> None:
        self.engine, self.clients, self.rng = engine, clients, rng
        self.struck: Counter[str] = Counter()
        """By fault and moment."""
        self.in_flight = 0
        """Requests in slots when faults struck, summed over the faults."""
        self.recovery_s: list[float] = []
        driver = psutil.Process(engine.stats()["driver"]["pid"])
        self._raylet = driver.parent()
        mine = {rank["pid"] for rank in engine.stats()["ranks"]}
        self._others: set[int] = set()
        self._others = {rank.pid for rank in self._ranks()} - mine
        """Ranks of other engines on the same cluster."""

    @property
    def num_faults(self) -> int:
        return sum(self.struck.values())

    def strike(self, fault: str, moment: str) -> None:
        """One fault at one moment, after which requests are answered again; at some moments a
        first fault makes the ranks start."""
        before = self.engine.stats()["recoveries"]
        if moment == "idle":
            with self.clients.paused():
                self._hit(fault, moment)
                self.clients.ask(self.rng.choice(self.clients.asked))  # a stopped rank is found
        elif moment == "prompt":
            with self.clients.paused():
                longest = max(self.clients.asked, key=lambda one: len(one.prompt))
                asking = threading.Thread(target=self.clients.ask, args=(longest,))
                asking.start()
                time.sleep(self.rng.uniform(0.005, 0.1))
                self._hit(fault, moment)
                asking.join()
        elif moment == "answer":
            self._hit(fault, moment)
        else:
            self._hit("killed", "answer")
            if moment == "coming back":
                self._until_recovered(before + 1)
                before += 1
                time.sleep(self.rng.uniform(0.0, 0.05))
            else:
                self._until_ranks_are("load" if moment == "loading" else "prepare")
                time.sleep(self.rng.uniform(0.0, 0.3))
            self._hit(fault, moment)
        self._until_recovered(before + 1)
        self._until_tokens(20)

    def _hit(self, fault: str, moment: str) -> None:
        """Strike one of the two ranks that live."""
        self.in_flight += self.engine.stats()["active"]
        ranks = self._ranks()
        while len(ranks) < 2:
            ranks = self._ranks()
        victim = self.rng.choice(ranks)
        if fault in SIGNALS or moment in ("starting", "loading"):
            fault = fault if fault in SIGNALS else "killed"
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(SIGNALS[fault])
        else:
            overwrite_weights(victim.pid, TINY)
        self.struck[f"{fault}, {moment}"] += 1

    def _ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, also of those that have not loaded yet."""
        found = []
        for process in self._raylet.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._doing(process) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return [process for process in found if process.pid not in self._others]

    def _doing(self, process: psutil.Process) -> str:
        """The method of RankActor that a process runs; Ray writes it into the command line."""
        line = process.cmdline()
        return line[0].partition("RankActor.")[2] if line and "ray::RankActor" in line[0] else ""

    def _until_ranks_are(self, method: str) -> None:
        self._until(lambda: any(self._doing(one) == method for one in self._ranks()), method)

    def _until_recovered(self, number: int) -> None:
        """Returns when the engine has recovered so often."""

        def is_there() -> bool:
            stats = self.engine.stats()
            return stats["recoveries"] >= number and not stats["recovering"]

        self._until(is_there, f"recovery {number}")
        self.recovery_s.append(self.engine.stats()["last_recovery_s"])

    def _until_tokens(self, number: int) -> None:
        """Every request in a slot has got on, so that no fault is taken for its doing."""
        start = self.engine.stats()["tokens"]
        self._until(lambda: self.engine.stats()["tokens"] >= start + number * SLOTS, "tokens")

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + RECOVERY_LIMIT_S
        while not is_so():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {what} within {RECOVERY_LIMIT_S:g} s")
            time.sleep(0.01)


def footprint(engine: Engine) -> dict[str, float]:
    """What an engine holds on this machine; the driver's part, since ranks are replaced."""
    stats = engine.stats()
    driver = psutil.Process(stats["driver"]["pid"])
    ranks = [psutil.Process(rank["pid"]) for rank in stats["ranks"]]
    temporary = Path(tempfile.gettempdir())
    return {
        "driver_rss_mb": driver.memory_info().rss / 1e6,
        "driver_fds": driver.num_fds(),
        "driver_threads": driver.num_threads(),
        "ranks_rss_mb": sum(rank.memory_info().rss for rank in ranks) / 1e6,
        "ranks_fds": sum(rank.num_fds() for rank in ranks),
        "ranks_threads": sum(rank.num_threads() for rank in ranks),
        "rank_processes": sum(
            "ray::RankActor" in "".join(process.cmdline()[:1])
            for process in driver.parent().children()
            if process.status() != psutil.STATUS_ZOMBIE
        ),
        "shared_memory_files": len(list(Path("/dev/shm").glob("outrider-*"))),
        "socket_folders": len(list(temporary.glob("outrider-*/"))),
        "pages_held": stats["num_pages"] - 1 - stats["free_pages"],
        "slots_held": stats["active"],
        "queued": stats["queued"],
    }


def run(
    *,
    seed: int,
    num_faults: int = 0,
    minutes: float = 0.0,
    period_s: float = 0.0,
    faults: Sequence[str] = FAULTS,
    moments: Sequence[str] = MOMENTS,
    say: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> dict[str, Any]:
    """So many faults, or as many as fit in the minutes, one each period_s; -> the report."""
    rng = random.Random(seed)
    matrix = [(fault, moment) for fault in faults for moment in moments]
    with Engine.from_config(None, model=str(TINY), **{**LIMITS, **changes}) as engine:
        asked = pool(Tokenizer(TINY), rng)
        asked = [
            dataclasses.replace(one, right=engine.generate([one.prompt], one.sampling,
                                                           stop=one.stop)[0])
            for one in asked
        ]  # fmt: skip
        clients = Clients(engine, asked, seed)
        injector = Injector(engine, clients, rng)
        started_s, samples, plan = time.monotonic(), [footprint(engine)], []
        try:
            clients.start()
            injector._until_tokens(60)
            while (
                injector.num_faults < num_faults
                if num_faults
                else time.monotonic() - started_s < 60 * minutes
            ):
                plan = plan or rng.sample(matrix, len(matrix))
                fault, moment = plan.pop()
                injector.strike(fault, moment)
                say(f"{injector.num_faults} faults: {fault}, {moment}, "
                    f"{injector.recovery_s[-1]:.1f} s")  # fmt: skip
                time.sleep(period_s)
                if period_s:
                    with clients.paused():
                        samples.append(footprint(engine))
            with clients.paused():
                samples.append(footprint(engine))
        finally:
            clients.close()
        return report(seed, time.monotonic() - started_s, clients.tally, injector, samples)


def report(
    seed: int, wall_s: float, tally: Tally, injector: Injector, samples: list[dict[str, float]]
) -> dict[str, Any]:
    times = sorted(injector.recovery_s)
    return {
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "faults_injected": injector.num_faults,
        "faults": dict(sorted(injector.struck.items())),
        "requests_in_slots_at_faults": injector.in_flight,
        "requests_answered": sum(tally.answered.values()),
        "by_kind": dict(sorted(tally.answered.items())),
        "lost": len(tally.lost),
        "duplicated": len(tally.duplicated),
        "wrong": len(tally.wrong),
        "examples": (tally.lost + tally.duplicated + tally.wrong)[:10],
        "recovery_s": {
            "median": round(statistics.median(times), 2), "most": round(times[-1], 2)
        },
        "longest_pause_of_a_stream_s": round(tally.longest_pause_s, 2),
        "held_at_first": samples[0],
        "held_at_last": samples[-1],
        "held_between": samples[1:-1],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many to inject")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead: for how long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # A folder of our own for what engines leave there: others on this machine do not count.
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="chaos-")
    found = run(
        seed=options.seed,
        num_faults=0 if options.minutes else options.faults,
        minutes=options.minutes,
        period_s=20.0 if options.minutes else 0.0,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(found))
    return 1 if found["lost"] or found["duplicated"] or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
