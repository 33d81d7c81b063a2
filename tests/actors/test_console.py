"""Progress on stderr: lines where there is no terminal, a bar with a total where there is one."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors import console

GIB = 1 << 30


LOADS = """
import logging
from outrider.actors import console
with console.progress() as on_progress:
    logging.getLogger("outrider.actors.x").info("starting %d ranks", 2)
    for done, total in (0, 0), (0, 2), (1, 2), (2, 2), (2, 2):
        on_progress(done << 30, total << 30)
console.say("ready")
"""


def test_a_terminal_shows_a_bar_with_a_total_once_it_is_known(repo: Path) -> None:
    screen, terminal = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", LOADS], cwd=repo, stderr=terminal, stdout=terminal, timeout=60,
        check=True,
    )  # fmt: skip
    os.close(terminal)
    assert done.returncode == 0
    shown = os.read(screen, 1 << 16).decode()
    os.close(screen)
    assert re.match(r"0\.\d s: starting 2 ranks\r\n\rloading weights:   0%", shown)
    assert "loading weights: 100%" in shown
    assert "2.15G/2.15G" in shown
    assert shown.endswith("\r\nready\r\n")


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress() as on_progress:
        on_progress(GIB, 4 * GIB)  # too early for a line
        monkeypatch.setattr(console, "REPORT_S", -1)
        on_progress(3 * GIB, 4 * GIB)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"0\.\d s: weights: 3,221 of 4,295 MB\n", err)


def test_a_library_user_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress():
        pass
    logging.getLogger("outrider.actors.x").info("starting")
    assert capsys.readouterr().err == ""
