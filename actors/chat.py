"""`outrider chat`: a conversation in a terminal with a server that is running.

    stdin: messages and commands -> Conversation -> stdout: the answers      stderr: all the rest
Ctrl-C stops an answer, and what was said stays; at the prompt it leaves, as Ctrl-D does. Where
stdout is no terminal, it gets the bare text of the answers. It imports nothing slow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, TextIO

import typer

from outrider.actors import console
from outrider.actors.conversation import Conversation, Piece, RefusedError, Server, ServerError
from outrider.actors.options import EXIT_CODES

FENCE = '"""'
"""Before and after a message of several lines."""
HELP = f"""\
/help    these commands
/reset   forget what was said
/drafts  colour the tokens that were accepted drafts, or stop doing so
/stats   tokens and drafts of the last answer, and of all
/quit    leave; so do Ctrl-D, and Ctrl-C where no answer is under way
{FENCE}      begins a message of several lines, which another {FENCE} ends
Ctrl-C stops an answer. A message that begins with / has a space before it."""
LEGEND = "\x1b[32maccepted drafts\x1b[0m  \x1b[4;33mcorrections\x1b[0m  the target's other tokens"
RESET = "\x1b[0m"
STYLES: Mapping[str, str] = {"draft": "32", "correction": "4;33", "target": ""}
"""By source of a piece: its graphic attributes, green, and underlined yellow."""
THOUGHT = "2"
SHOWN_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), "\ufffd"),
}
"""Control characters as characters that do nothing: the text of a model must not steer a
terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Screen:
    """What is written to stdout."""

    def __init__(self, out: TextIO) -> None:
        self._out, self.is_terminal = out, out.isatty()
        self.shows_drafts = False
        self._style = ""
        self._is_open = False
        """Whether some of an answer is written, and its end is not."""

    def show(self, piece: Piece) -> None:
        """Some text of an answer; of a thought only on a terminal."""
        if not self.is_terminal:
            if not piece.is_thought:
                self._write(piece.text)
            return
        source = STYLES[piece.source] if self.shows_drafts else ""
        style = ";".join(part for part in (THOUGHT if piece.is_thought else "", source) if part)
        text = piece.text.translate(SHOWN_CONTROLS)
        if style != self._style:
            text = RESET + (f"\x1b[{style}m" if style else "") + text
            self._style = style
        self._write(text)

    def end(self) -> None:
        """Behind an answer, whole or not."""
        if self._is_open:
            self._write((RESET if self._style else "") + "\n")
        self._style, self._is_open = "", False

    def _write(self, text: str) -> None:
        self._is_open = True
        self._out.write(text)
        self._out.flush()


class Prompt:
    """Reads messages from stdin, with an editable line where both ends are a terminal."""

    def __init__(self, source: TextIO, out: TextIO) -> None:
        self._source, self._is_terminal = source, source.isatty()
        self._edits = self._is_terminal and out.isatty()
        if self._edits:
            import readline  # input() edits its line from now on

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message

    def message(self) -> str | None:
        """The next message, or command; None at the end."""
        line = self._line("> ")
        if line is None or not line.lstrip().startswith(FENCE):
            return line
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            line = self._line(". ")
            if line is None:
                raise ValueError(f"the message that {FENCE} begins has no end: write {FENCE} there")
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(FENCE).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._edits:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self._is_terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = self._source.readline()
        return line.removesuffix("\n") if line else None


class Chat:
    """A conversation between a prompt and a screen."""

    def __init__(self, conversation: Conversation, prompt: Prompt, screen: Screen) -> None:
        self._conversation, self._prompt, self._screen = conversation, prompt, screen

    def run(self, *, goes_on: bool) -> None:
        """Until the end of the input. goes_on: an error is told, and the next message follows."""
        while (text := self._prompt.message()) is not None:
            if text.startswith("/"):
                if not self._command(text.strip()):
                    return
            elif text.strip():
                self._ask(text, goes_on=goes_on)

    def _ask(self, text: str, *, goes_on: bool) -> None:
        note = None
        try:
            with closing(self._conversation.ask(text)) as pieces:
                for piece in pieces:
                    self._screen.show(piece)
        except KeyboardInterrupt:
            note = "(stopped)"
        except (RefusedError, ServerError) as error:
            if not goes_on:
                raise
            note = f"error: {error}"
        finally:
            self._screen.end()
        if note is not None:
            console.say(note)

    def _command(self, word: str) -> bool:
        """Do what a command says -> whether to go on."""
        match word:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/help" | "/?":
                sys.stderr.write(HELP + "\n")
            case "/reset":
                self._conversation.reset()
                console.say("(forgotten)")
            case "/drafts":
                self.show_drafts(not self._screen.shows_drafts)
            case "/stats":
                console.say(f"last answer: {self._conversation.last.line()}")
                console.say(f"all: {self._conversation.total.line()}")
            case _:
                console.say(f"unknown command {word}: /help lists those there are")
        return True

    def show_drafts(self, wanted: bool) -> None:
        if not self._screen.is_terminal:
            console.say("drafts are coloured on a terminal only")
            return
        self._screen.shows_drafts = wanted
        sys.stderr.write((LEGEND if wanted else "(drafts are not coloured)") + "\n")


def read_key(file: Path) -> str:
    """The first key of a file with one a line, as serve.api_key_file names one. ValueError."""
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"--key-file {file}: cannot be read: {problem}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--key-file {file}: must hold a key in a line: it holds none")
    return keys[0]


@app.command(epilog=EXIT_CODES)
def chat(
    url: Annotated[
        str, typer.Option(help="Of the server, as `outrider serve` prints it.")
    ] = "http://127.0.0.1:8000/v1",
    key_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the key of the API.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name.  [default: the one there is]")] = None,
    system: Annotated[str | None, typer.Option(help="Message of the system.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer.  [default: what the context holds]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest up to this sum.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop below this share of the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.  [default: drawn]")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(metavar="K", help="Drafts an iteration.  [default: the server's]")
    ] = None,
    drafts: Annotated[bool, typer.Option("--drafts", help="Colour accepted drafts.")] = False,
) -> None:
    """Chat with a running server: `outrider serve` starts one.

    A message is a line; /help lists commands. What is not said here is as the server has it.
    """
    server = Server(url, None if key_file is None else read_key(key_file))
    models = server.models()
    settings = {
        "model": model or next(iter(models), None),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "speculation": None if draft_tokens is None else {"draft_tokens": draft_tokens},
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    conversation = Conversation(server, system=system, settings=settings)
    one = Chat(conversation, Prompt(sys.stdin, sys.stdout), Screen(sys.stdout))
    if sys.stdin.isatty():
        console.say(f"{settings['model']} at {server.url}; /help lists the commands")
    if drafts:
        one.show_drafts(True)
    try:
        one.run(goes_on=sys.stdin.isatty())
    finally:
        if sys.stdin.isatty():
            sys.stderr.write("\n")
