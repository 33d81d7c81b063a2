"""What every command does with its terminal: progress, warnings, errors in a line, Ctrl-C.

    argv -- run --> the command --> exit code
    log.info("...") of the modules below -- progress --> lines with seconds on stderr

stdout belongs to a command's answers. Errors that a user can mend are one line; those of our own
making keep their traceback. It imports nothing slow, so that --help answers at once.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import typer

from outrider.actors.loading import ProgressBar
from outrider.actors.options import FAILED, INTERRUPTED, USER_ERROR

OURS = "outrider"
REPORT_S = 5.0
"""Seconds between two lines on the loading of weights, where no terminal shows a bar."""

_interrupted = threading.Event()


def run(app: typer.Typer, argv: Sequence[str] | None, prog_name: str) -> int:
    """Run a command line; returns the exit code. argv None: the process's own arguments."""
    _interrupted.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _on_interrupt)
    args = sys.argv[1:] if argv is None else list(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            command = typer.main.get_command(app)
            return command.main(args, prog_name=prog_name, standalone_mode=False) or 0
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except Exception as error:
            return _report(error, prog_name)


def check_interrupt() -> None:
    """Raise for a Ctrl-C that struck inside a callback, where Python drops exceptions."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def say(text: str) -> None:
    """Print one line on stderr, whatever line breaks the text has."""
    sys.stderr.write(" ".join(text.split()) + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show on stderr what our modules log, with the seconds since the beginning.

    Yields what `Engine.from_config` takes as on_progress: on a terminal a bar with a total, else a
    line every REPORT_S.
    """
    started_s = time.monotonic()
    shown = _Lines(started_s)
    logger = logging.getLogger(OURS)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(shown)
    try:
        yield _Loading(shown).update
    finally:
        logger.removeHandler(shown)
        logger.setLevel(before)


class _Lines(logging.Handler):
    """Log records as lines: "4.2 s: starting Ray on this machine"."""

    def __init__(self, started_s: float) -> None:
        super().__init__(logging.INFO)
        self._started_s = started_s

    def emit(self, record: logging.LogRecord) -> None:
        self.line(record.getMessage())

    def line(self, text: str) -> None:
        say(f"{time.monotonic() - self._started_s:.1f} s: {text}")


class _Loading:
    """How far the weights are: a bar on a terminal, lines elsewhere; nothing before the total."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._bar = ProgressBar() if sys.stderr.isatty() else None
        self._told_s = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Both in bytes over all ranks; total 0: not known yet."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(done, total)
        elif total and now - self._told_s > REPORT_S:
            self._told_s = now
            self._lines.line(f"weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")


def _on_interrupt(number: int, frame: object) -> NoReturn:
    _interrupted.set()
    raise KeyboardInterrupt


def _report(error: Exception, prog_name: str) -> int:
    """Print an exception as one line and return its exit code; our own bugs keep their trace."""
    usage = getattr(error, "format_message", None)  # what typer raises for wrong options
    if usage is not None:
        context = getattr(error, "ctx", None)
        command = prog_name if context is None else context.command_path
        say(f"error: {usage().rstrip('.')}; see {command} --help")
        return USER_ERROR
    if isinstance(error, ValueError):
        say(f"error: {error}")
        return USER_ERROR
    if type(error).__module__.partition(".")[0] != OURS:
        traceback.print_exception(error)
    elif detail := getattr(error, "detail", ""):
        sys.stderr.write(detail.rstrip() + "\n")
    say(f"error: {type(error).__name__}: {error}")
    return FAILED


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    say(f"warning: {message}")
