"""A headless Chromium that tests drive by its debugging protocol, over two pipes.

    Chromium -> open -> Tab: evaluate, type, press, wait_for, screenshot
It needs no library, only an installed Chromium (`find_chromium`). `Tab.problems` holds what a page
put into the console as an error: exceptions, and what its Content-Security-Policy forbids.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIMIT_S = 90.0
"""Longest wait for the browser, and for what is waited for in a page."""
LAUNCH = """
import fcntl, os, sys
for target, pipe in zip((3, 4), [fcntl.fcntl(int(p), fcntl.F_DUPFD, 10) for p in sys.argv[1:3]]):
    os.dup2(pipe, target)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from file 3 and writes to file 4."""


def find_chromium() -> str | None:
    """The path of an installed Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with a fresh profile."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        command = [
            path, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update",
            f"--user-data-dir={self._profile.name}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(their_in), str(their_out), *command],
            pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._tabs: dict[str, Tab] = {}

    def open(self, url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Tab:
        """A page that has loaded. It shares nothing with those opened before."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.call("Target.attachToTarget", flatten=True, **target)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.prefer(scheme)
        tab.call("Page.navigate", url=url)
        tab.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return tab

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. AssertionError with the browser's words where it fails."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params}
        command |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            tab = self._tabs.get(message.get("sessionId", ""))
            if tab is not None and "method" in message:
                tab.note(message["method"], message["params"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], LIMIT_S)
            assert ready, "Chromium says nothing"
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()


class Tab:
    """A page in a browser."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """An event of the page."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(json.dumps(params["args"]))

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        got = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        assert "exceptionDetails" not in got, f"{script}: {got['exceptionDetails']}"
        return got["result"].get("value")

    def wait_for(self, script: str, limit_s: float = LIMIT_S) -> Any:
        """The value of an expression as soon as it is true."""
        return self.poll(lambda: self.evaluate(script), script, limit_s)

    def poll(self, look: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        deadline_s = time.monotonic() + limit_s
        while not (value := look()):
            assert time.monotonic() < deadline_s, f"{what}: not within {limit_s:g} s"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """The text of the last element of this selector."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).textContent"
        )

    def fill(self, selector: str, text: str) -> None:
        """Put a text into a field, as if it were typed, and leave the field."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{where}.focus(), {where}.select?.()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Backspace", 8)
        self.evaluate(f"{where}.dispatchEvent(new Event('change'))")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, by its name and its virtual key code. text: what it writes."""
        both = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def enter(self) -> None:
        self.press("Enter", 13, "\r")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """As PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
