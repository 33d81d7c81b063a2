"""Progress on stderr: lines where there is no terminal, a bar with a total where there is one."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from outrider.actors import console

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_a_total_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with console.progress() as on_progress:
        logging.getLogger("outrider.actors.x").info("starting %d ranks", 2)
        on_progress(0, 0)
        assert "loading" not in screen.getvalue()
        for done in (0, 1, 2, 2):
            on_progress(done * GIB, 2 * GIB)
    shown = screen.getvalue()
    assert re.match(r"0\.\d s: starting 2 ranks\n", shown)
    assert "loading weights: 100%" in shown
    assert "2.15G/2.15G" in shown
    assert "?" not in shown.partition("100%")[2]


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress() as on_progress:
        on_progress(GIB, 4 * GIB)  # too early for a line
        monkeypatch.setattr(console, "REPORT_S", -1)
        on_progress(3 * GIB, 4 * GIB)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"0\.\d s: weights: 3\.0 of 4\.0 GiB\n", err)


def test_a_library_user_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress():
        pass
    logging.getLogger("outrider.actors.x").info("starting")
    assert capsys.readouterr().err == ""
