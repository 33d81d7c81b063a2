"""`outrider chat` with a running server: through pipes, and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from outrider.actors import cli
from outrider.actors.chat import Screen
from outrider.actors.conversation import Conversation, Piece, Server, ServerError
from outrider.actors.options import FAILED, INTERRUPTED, USER_ERROR
from tests.actors.http.local_server import TinyServer

KEY = "sk-correct"
PROMPTS = ("To create a new project,", "What is a view?")
HOW = {"temperature": 0, "max_tokens": 24}
OPTIONS = ("--temperature", "0", "--max-tokens", "24")


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with closing(TinyServer(keys=[KEY])) as running:
        yield running


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# ours\n\n{KEY}\nsk-other\n")
    return file


def right(server: TinyServer, *said: str, **how: Any) -> str:
    """The answer to a conversation whose turns alternate, user first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    got = httpx.post(
        server.root + "/v1/chat/completions", json=HOW | {"messages": messages} | how,
        headers={"authorization": f"Bearer {KEY}"}, timeout=60,
    )  # fmt: skip
    return got.json()["choices"][0]["message"]["content"]


def chat(monkeypatch: pytest.MonkeyPatch, text: str, server: TinyServer, *args: str | Path) -> int:
    """Run the command with this text on stdin -> its exit code."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(["chat", "--url", server.root, *OPTIONS, *map(str, args)])


def test_through_pipes_it_answers_each_line_in_one_conversation(
    server: TinyServer, key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    first = right(server, PROMPTS[0])
    second = right(server, PROMPTS[0], first, "a\n /b")
    anew = right(server, PROMPTS[1])
    assert second != right(server, "a\n /b")
    asked = f'{PROMPTS[0]}\n\n"""a\n /b"""\n/reset\n{PROMPTS[1]}\n/stats\n/quit\nnever\n'
    assert chat(monkeypatch, asked, server, "--key-file", key_file, "--drafts") == 0
    out, err = capsys.readouterr()
    assert out == f"{first}\n{second}\n{anew}\n"
    assert "\x1b" not in out + err
    assert "(forgotten)" in err
    assert re.search(r"last answer: 24 tokens \| \d+ tok/s \| first after \d+ ms \| accepted", err)
    assert re.search(r"all: 3 answers \| 72 tokens .* by position \d+/\d+/\d+ %", err)


def test_the_systems_message_stays_and_settings_reach_the_server(
    server: TinyServer, key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    how = ("--key-file", key_file, "--system", "Be brief.", "--draft-tokens", "0")
    assert chat(monkeypatch, f"{PROMPTS[0]}\n/reset\n{PROMPTS[0]}\n/stats\n", server, *how) == 0
    out, err = capsys.readouterr()
    half = out[: len(out) // 2]
    assert out == half + half
    assert half.strip() != right(server, PROMPTS[0]).strip()
    assert "no drafts" in err


def test_what_is_counted_is_what_the_server_counts(server: TinyServer) -> None:
    settings = HOW | {"max_tokens": 60}
    conversation = Conversation(Server(server.root, KEY), settings=settings)
    pieces = list(conversation.ask(PROMPTS[0]))
    got = httpx.post(
        server.root + "/v1/chat/completions",
        json=settings | {"messages": [{"role": "user", "content": PROMPTS[0]}]},
        headers={"authorization": f"Bearer {KEY}"}, timeout=60,
    ).json()  # fmt: skip
    counts, usage = conversation.last, got["usage"]
    assert "".join(piece.text for piece in pieces) == got["choices"][0]["message"]["content"]
    assert conversation.messages[1]["content"] == got["choices"][0]["message"]["content"]
    assert counts.tokens == usage["completion_tokens"]
    assert sum(counts.drafted) == usage["speculation"]["drafted_tokens"]
    assert sum(counts.accepted) == usage["speculation"]["accepted_tokens"] > 0
    assert {piece.source for piece in pieces} == {"draft", "correction", "target"}


@pytest.mark.parametrize(
    ("args", "code", "parts"),
    [
        (["--url", "here"], USER_ERROR, ['--url "here"', "http://HOST:PORT"]),
        (["--key-file", "/nowhere"], USER_ERROR, ["/nowhere", "cannot be read"]),
        ([], USER_ERROR, ["401", "API key"]),
        (["--url", "http://127.0.0.1:9/v1"], FAILED, ["does not answer", "outrider serve"]),
        (["KEY", "--min-p", "7"], USER_ERROR, ["400", "min_p = 7"]),
        (["KEY", "--model", "gpt"], USER_ERROR, ["404", "'gpt'"]),
    ],
)
def test_what_goes_wrong_is_one_line(
    args: list[str], code: int, parts: list[str], server: TinyServer, key_file: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    given = ["--key-file", key_file, *args[1:]] if args[:1] == ["KEY"] else args
    assert chat(monkeypatch, "hi\n", server, *given) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def test_what_was_said_stays_where_the_server_ends_an_answer_early() -> None:
    with closing(TinyServer()) as server:
        conversation = Conversation(Server(server.root), settings={"max_tokens": 900})
        texts = []

        def read() -> None:
            for piece in conversation.ask(PROMPTS[0]):
                texts.append(piece.text)
                if len(texts) == 5:
                    server.call(server.endpoints.drain, cut=True)

        with pytest.raises(ServerError, match="ended early: this server shuts down"):
            read()
        assert len(texts) > 4
        assert conversation.messages[1]["content"] == "".join(texts)
        with pytest.raises(ServerError, match=r"503: this server shuts down.*try again in"):
            next(conversation.ask("more"))
        assert len(conversation.messages) == 2, "a question without an answer leaves no trace"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, repo: Path, *args: str) -> None:
        self.screen, inner = pty.openpty()
        command = [sys.executable, "-m", "outrider.actors.cli", "chat", *args]
        self.process = subprocess.Popen(
            command, cwd=repo, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(repo)},
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(inner)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def wait_for(self, pattern: str, limit_s: float = 30) -> re.Match[str]:
        """Read until the pattern is on the screen; -> what was found, with all before it read."""
        deadline_s = time.monotonic() + limit_s
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < deadline_s, self.shown
            if select.select([self.screen], [], [], 0.1)[0]:
                self.shown += os.read(self.screen, 1 << 16).decode().replace("\r\n", "\n")
        self.shown = self.shown[found.end() :]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the command


def bare(text: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_on_a_terminal_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    server: TinyServer, key_file: Path, repo: Path
) -> None:
    how = ("--url", server.root, "--key-file", str(key_file), "--temperature", "0", "--drafts")
    how += ("--max-tokens", "300")
    with closing(Terminal(repo, *how)) as terminal:
        terminal.wait_for(r"tiny at http.*/v1; /help.*corrections.*> ")
        terminal.type(PROMPTS[0] + "\r")
        terminal.wait_for(re.escape(PROMPTS[0]) + r".*?\n")
        begun = terminal.wait_for(r"^.*?\x1b\[32m.*?\x1b\[4;33m.{60}")
        terminal.type("\x03")
        said = begun[0] + terminal.wait_for(r"^(.*?)\n\(stopped\)\n")[1]
        said = bare(said).replace("^C", "").lstrip("\r")
        terminal.wait_for("> ")
        terminal.type("/stats\r")
        terminal.wait_for(r"last answer: \d+ tokens.*\n.*> ")
        terminal.type("And then?\r")
        terminal.wait_for(r"And then\?.*?\n")
        second = terminal.wait_for(r"^(.*)\n\x1b\[\?2004h> ")[1]
        assert right(server, PROMPTS[0], said, "And then?") in bare(second)
        terminal.type("\x03")
        assert terminal.process.wait(10) == INTERRUPTED


def test_a_pasted_text_is_one_message_and_ctrl_d_leaves(
    server: TinyServer, key_file: Path, repo: Path
) -> None:
    how = ("--url", server.root, "--key-file", str(key_file), *OPTIONS)
    with closing(Terminal(repo, *how)) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~first line\nsecond line\x1b[201~\r")
        text = right(server, "first line\nsecond line")
        terminal.wait_for(re.escape(text) + r"\n.*> ")
        terminal.type('"""\rfirst line\rsecond line"""\r')
        again = right(server, "first line\nsecond line", text, "first line\nsecond line")
        terminal.wait_for(re.escape(again) + r"\n.*> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_models_text_cannot_steer_the_terminal() -> None:
    out = FakeTerminal()
    screen = Screen(out)
    screen.shows_drafts = True
    screen.show(Piece("a\x1b[2J\x9b1m\rb\n\tc\x00", False, "draft"))
    screen.show(Piece("d", True, "target"))
    screen.end()
    assert out.getvalue() == "\x1b[0m\x1b[32ma␛[2J\ufffd1m␍b\n\tc␀\x1b[0m\x1b[2md\x1b[0m\n"


def test_a_thought_is_not_sent_again_and_not_printed_into_a_pipe() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.show(Piece("hm", True, "draft"))
    screen.show(Piece("x\x1b", False, "draft"))
    screen.end()
    assert out.getvalue() == "x\x1b\n"


def test_it_is_no_server_that_answers_otherwise() -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>")

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        one = Server(f"http://127.0.0.1:{other.server_port}")
        with pytest.raises(ServerError, match="no OpenAI server"):
            one.models()
        with pytest.raises(ServerError, match="text/html"):
            next(one.stream({}))
        other.shutdown()
