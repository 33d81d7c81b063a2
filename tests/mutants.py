"""Faults that are planted one by one, each with the test that must turn red: `make mutants`.

    python -m tests.mutants                 plant all, two at a time
    python -m tests.mutants rotary stop     only those whose name holds one of the words
    python -m tests.mutants --table         write docs/mutants.md

A fault is a piece of source text and what takes its place (the files tests/*faults.py). It is
planted in a temporary copy of the tree, never in the checkout, and only its own test runs.
The exit status is 1 when no assertion of that test fails, when the test is red without the fault,
and when the text is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.cache_faults import CACHE_FAULTS
from tests.checkpoint_faults import CHECKPOINT_FAULTS
from tests.dialect_faults import DIALECT_FAULTS
from tests.faults import FAULTS, Fault
from tests.http_faults import HTTP_FAULTS
from tests.loading_faults import LOADING_FAULTS
from tests.recovery_faults import RECOVERY_FAULTS
from tests.reply_faults import REPLY_FAULTS
from tests.sampling_faults import SAMPLING_FAULTS
from tests.security_faults import SECURITY_FAULTS

ALL_FAULTS = (
    *FAULTS,
    *SAMPLING_FAULTS,
    *HTTP_FAULTS,
    *DIALECT_FAULTS,
    *REPLY_FAULTS,
    *SECURITY_FAULTS,
    *LOADING_FAULTS,
    *CHECKPOINT_FAULTS,
    *RECOVERY_FAULTS,
    *CACHE_FAULTS,
)
REPO = Path(__file__).parents[1]
PAGE = "docs/mutants.md"
JOBS = 2
LIMIT_S = 240
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "out"
)


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    red: bool
    found: bool
    """Red by an assertion, not by an error that says nothing of the fault."""
    seconds: float
    last_words: str
    """Its first failing test and why, or else its summary."""


def copy_tree(folder: Path) -> Path:
    return Path(shutil.copytree(REPO, folder, symlinks=True, ignore=NOT_COPIED))


def run_tests(root: Path, tests: Sequence[str]) -> Run:
    """Run tests of the tree at `root` up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["COLUMNS"] = "500"  # or pytest cuts the reason off
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines() or [""]
    words = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    test, _, reason = words.partition(" - ")
    found = done.returncode == 1 and reason.startswith(("assert", "AssertionError"))
    words = test if found else words
    return Run(done.returncode == 1, found, time.monotonic() - started, words)


def plant(fault: Fault, root: Path) -> str:
    """Put the fault into the tree at `root`; -> the text of its file before."""
    file = root / fault.file
    before = file.read_text("utf-8")
    assert before.count(fault.text) == 1, complaint(fault, before)
    file.write_text(before.replace(fault.text, fault.becomes), "utf-8")
    return before


def complaint(fault: Fault, source: str) -> str | None:
    """What is wrong with the fault's place in its file, if anything."""
    count = source.count(fault.text)
    if count == 1:
        return None
    return f"{fault.name}: {fault.file} holds {fault.text!r} {count} times instead of once"


def table() -> str:
    """docs/mutants.md."""
    lines = [
        "# Faults that tests find",
        "",
        "`make mutants` plants each of these faults in a copy of the tree, one by one, and runs "
        "the test beside it, an assertion of which must fail. It is not part of `make test`, which "
        "only checks that this table is that of the files tests/*faults.py, that the places of the "
        f"faults still exist, and that the tests do. {len(ALL_FAULTS)} faults, two at a time: 7 "
        "minutes of CPU time.",
        "",
        "| fault | file | test that turns red |",
        "|---|---|---|",
    ]
    for fault in ALL_FAULTS:
        lines.append(f"| {fault.name} | {fault.file} | `{fault.test.removeprefix('tests/')}` |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of the faults to plant; none: all")
    parser.add_argument("--table", action="store_true", help=f"write {PAGE} and plant nothing")
    options = parser.parse_args(arguments)
    if options.table:
        (REPO / PAGE).write_text(table(), "utf-8")
        return 0
    chosen = [f for f in ALL_FAULTS if not options.words or any(w in f.name for w in options.words)]
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as folder:
        return plant_all(chosen, Path(folder))


def plant_all(faults: Sequence[Fault], folder: Path) -> int:
    """Plant each and report it; -> the exit status."""
    started = time.monotonic()
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(JOBS):
        copies.put(copy_tree(folder / f"copy{number}"))

    def without(tests: Sequence[str]) -> Run:
        root = copies.get()
        result = run_tests(root, tests)
        copies.put(root)
        return result

    def with_fault(fault: Fault) -> Run:
        root = copies.get()
        before = plant(fault, root)
        result = run_tests(root, [fault.test])
        (root / fault.file).write_text(before, "utf-8")
        copies.put(root)
        return result

    tests = sorted({fault.test for fault in faults})
    with ThreadPoolExecutor(JOBS) as pool:
        bad = 0
        for run in pool.map(without, [tests[i::JOBS] for i in range(min(JOBS, len(tests)))]):
            bad += run.red
            if run.red:
                print(f"red without any fault: {run.last_words}", flush=True)
        for fault, run in zip(faults, pool.map(with_fault, faults)):
            bad += not run.found
            state = "red  " if run.found else "ERROR" if run.red else "GREEN"
            print(f"{state} {run.seconds:5.1f} s  {fault.name}: {run.last_words}", flush=True)
    print(f"{len(faults)} faults in {time.monotonic() - started:.0f} s, {bad} complaints")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
