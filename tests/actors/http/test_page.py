"""The page at /, as it is sent and in a headless Chromium."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from outrider.actors.http import page
from tests.actors.http.chromium import Chromium, Tab
from tests.actors.http.local_server import TinyServer, run, serving
from tests.actors.http.scripted import Scripted
from tests.templates import IN_TAGS, folder_with

KEY = "sk-correct"
FIRST, SECOND = "To create a new project,", "What is a view?"
GREEDY = {"temperature": 0, "max_tokens": 60}


def test_the_page_names_all_that_it_runs_and_takes_nothing_from_elsewhere() -> None:
    async def work() -> None:
        async with serving(keys=(KEY,)) as (client, _, _):
            got = await client.get("/")
            assert got.headers["content-type"] == "text/html; charset=utf-8"
            assert (await client.head("/")).content == b""
            assert (await client.get("/v1/stats")).status_code == 401
        html, rules = got.text, got.headers["content-security-policy"]
        for tag in ("script", "style"):
            (inline,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in rules
        for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
            assert rule in rules.split("; ")
        assert "unsafe" not in rules
        assert set(re.findall(r"https?://[^'\" ]+", html)) == {"http://www.w3.org/2000/svg"}
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "localStorage", "cookie"):
            assert name not in html
        assert not re.search(r"<[^>]+ (on[a-z]+|style)=", html)

    run(work)


def test_the_page_can_be_left_out() -> None:
    async def work() -> None:
        async with serving(serve={"page": False}) as (client, _, _):
            assert (await client.get("/")).status_code == 404
        async with serving(keys=(KEY,), serve={"page": False}) as (client, _, _):
            assert (await client.get("/")).status_code == 401

    run(work)


def test_the_page_is_a_part_of_the_package(repo: Path) -> None:
    settings = tomllib.loads((repo / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-data"]["outrider.actors.http"] == [page.FILE.name]


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with closing(TinyServer()) as running:
        yield running


def opened(browser: Chromium, server: TinyServer, **how: Any) -> Tab:
    tab = browser.open(server.root + "/", **how)
    tab.wait_for("document.querySelector('#model').textContent === 'tiny'")
    for name, value in GREEDY.items():
        tab.fill(f"[data-field={name}]", str(value))
    return tab


def send(tab: Tab, text: str) -> None:
    tab.fill("#text", text)
    tab.enter()


def answer(tab: Tab, text: str) -> str:
    """Send a text -> the whole answer that the page shows."""
    count = tab.evaluate("document.querySelectorAll('.turn').length")
    send(tab, text)
    tab.wait_for(f"document.querySelectorAll('.turn:not([aria-busy])').length === {count + 1}")
    return tab.text(".turn > .answer")


def events_of(server: TinyServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events, as the server tells them."""
    what = GREEDY | {"stream": True, "return_draft_info": True} | body
    lines = httpx.post(server.root + "/v1/" + path, json=what, timeout=60).text.split("\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice for event in data for choice in event["choices"]]


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation whose turns alternate, user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def shown_sources(tab: Tab) -> list[tuple[str, str]]:
    """The last answer by character: the character and the class of what it stands in."""
    spans = tab.evaluate(
        "[...[...document.querySelectorAll('.turn > .answer')].at(-1).children]"
        ".map((span) => [span.className, span.textContent])"
    )
    return [(char, kind) for kind, text in spans for char in text]


def right_sources(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        info = choice.get("draft_info") or {}
        kind = info.get("source", "target")
        if kind == "target" and (info.get("drafted") or 0) > (info.get("accepted") or 0):
            kind = "correction"
        found += [(char, kind) for char in text]
    return found


def test_a_chat_shows_the_servers_answers_with_their_drafts(
    browser: Chromium, server: TinyServer
) -> None:
    tab = opened(browser, server)
    first = answer(tab, FIRST)
    choices = events_of(server, "chat/completions", messages=said(FIRST))
    assert shown_sources(tab) == right_sources(choices)
    assert {kind for _, kind in shown_sources(tab)} == {"draft", "correction", "target"}
    infos = [choice["draft_info"] for choice in choices if "draft_info" in choice]
    ends = [info for info in infos if info["drafted"] is not None]
    rates = []
    for position in range(3):
        made = [info["accepted"] > position for info in ends if info["drafted"] > position]
        rates.append(f"{100 * sum(made) / len(made):.0f}")
    bars = tab.evaluate("[...document.querySelectorAll('.bar b')].map((b) => b.textContent)")
    assert all(abs(int(bar) - int(rate)) <= 1 for bar, rate in zip(bars, rates, strict=True))
    accepted, drafted = (sum(info[name] for info in ends) for name in ("accepted", "drafted"))
    assert tab.text("#accepted") == f"{accepted} / {drafted}"
    assert f"{accepted} of {drafted} drafts accepted" in tab.text(".figures")
    assert tab.evaluate("document.querySelector('#bars').ariaLabel").startswith("Accepted, draft 1")
    choices = events_of(server, "chat/completions", messages=said(FIRST, first, SECOND))
    answer(tab, SECOND)
    assert shown_sources(tab) == right_sources(choices)
    tab.fill("#system", "Be brief.")
    tab.click("#new")
    system = [{"role": "system", "content": "Be brief."}]
    choices = events_of(server, "chat/completions", messages=[*system, *said(FIRST)])
    answer(tab, FIRST)
    assert shown_sources(tab) == right_sources(choices)
    assert tab.problems == []


def test_a_prompt_is_continued_and_settings_count(browser: Chromium, server: TinyServer) -> None:
    tab = opened(browser, server)
    tab.click("input[value=prompt]")
    for name, value in {"seed": 7, "temperature": 0.9, "top_k": 20, "draft_tokens": 0}.items():
        tab.fill(f"[data-field={name}]", str(value))
    how = {"seed": 7, "temperature": 0.9, "top_k": 20}
    choices = events_of(server, "completions", prompt=FIRST, **how)
    text = answer(tab, FIRST)
    assert text == FIRST + "".join(choice["text"] for choice in choices)
    assert {kind for _, kind in shown_sources(tab)} == {"given", "target"}, "drafts were made"
    tab.fill("[data-field=draft_tokens]", "")
    assert answer(tab, FIRST) == text
    assert "draft" in {kind for _, kind in shown_sources(tab)}
    assert tab.problems == []


def test_what_a_model_or_a_person_writes_is_never_html(browser: Chromium, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    text = f"{evil}\n</think>\n\n{evil} &amp; **b**"
    folder = folder_with(tmp_path, IN_TAGS)
    with closing(TinyServer(runner=Scripted(text), folder=folder)) as server:
        tab = opened(browser, server)
        tab.fill("[data-field=max_tokens]", "")
        assert answer(tab, evil) == f"{evil} &amp; **b**"
        assert tab.text(".question") == evil
        assert tab.text(".thought .answer") == evil
        assert tab.evaluate("document.querySelectorAll('.turn img, .turn script').length") == 0
        assert tab.evaluate("document.title") == "tiny · Outrider"
        assert tab.problems == []


def endless() -> Scripted:
    """Ranks whose answers last for a minute."""
    runner = Scripted("word " * 900)
    runner.step_s, runner.chunk = 0.2, 2048
    return runner


def test_an_answer_that_is_stopped_ends_on_the_server_and_stays(browser: Chromium) -> None:
    with closing(TinyServer(runner=endless())) as server:
        tab = opened(browser, server)
        tab.fill("[data-field=max_tokens]", "")
        stops = (lambda: tab.press("Escape", 27), lambda: tab.click("#send"))
        for number, stop in enumerate(stops):
            send(tab, FIRST)
            tab.wait_for("document.querySelectorAll('.turn[aria-busy] .draft').length > 1")
            tab.wait_for("document.querySelector('#slots').textContent === '1 of 4'")
            assert tab.evaluate("document.querySelector('#send').ariaLabel") == "Stop"
            stop()
            tab.wait_for("!document.querySelector('[aria-busy]')")
            tab.poll(lambda: server.driver.stats()["active"] == 0, "the server has stopped")
            assert tab.evaluate("document.querySelectorAll('.figures').length") == number + 1
            assert tab.evaluate("document.querySelectorAll('.problem').length") == 0
            assert server.driver.stats()["requests_aborted"] == number + 1
        texts = tab.evaluate(
            "[...document.querySelectorAll('.turn > .answer')].map((a) => a.textContent)"
        )
        assert tab.evaluate("messages") == said(FIRST, texts[0], FIRST, texts[1])
        assert tab.problems == []


def test_a_key_is_asked_for_and_kept_nowhere(browser: Chromium) -> None:
    with closing(TinyServer(keys=[KEY])) as server:
        tab = browser.open(server.root + "/")
        tab.wait_for("document.querySelector('#server-rate').textContent === 'wants a key'")
        answer(tab, FIRST)
        assert "API key" in tab.text(".problem")
        assert tab.evaluate("document.querySelector('#text').value") == FIRST, "it is kept"
        assert tab.evaluate("document.activeElement.id") == "key"
        tab.fill("#key", KEY)
        tab.wait_for("document.querySelector('#model').textContent === 'tiny'")
        assert answer(tab, FIRST)
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert tab.evaluate(kept) == '[{},{},""]'
        assert all("401" in problem for problem in tab.problems)


def test_errors_of_the_server_are_shown(browser: Chromium) -> None:
    with closing(TinyServer(runner=endless())) as server:
        tab = opened(browser, server)
        tab.fill("[data-field=min_p]", "7")
        answer(tab, FIRST)
        assert "min_p = 7" in tab.text(".problem")
        tab.fill("[data-field=min_p]", "")
        tab.fill("[data-field=max_tokens]", "")
        send(tab, FIRST)
        tab.wait_for("document.querySelectorAll('[aria-busy] .draft').length > 1")
        server.call(server.endpoints.drain, cut=True)
        tab.wait_for("!document.querySelector('[aria-busy]')")
        assert "shuts down" in tab.text(".problem")
        assert len(tab.text(".turn > .answer")) > 10
        answer(tab, SECOND)
        assert "send the request again later" in tab.text(".problem")


def test_colours_follow_the_system_until_they_are_chosen(
    browser: Chromium, server: TinyServer
) -> None:
    tab = opened(browser, server)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(colour)
    tab.prefer("dark")
    dark = tab.evaluate(colour)
    assert light != dark
    for expected in (light, dark, dark):
        tab.click("#theme")
        assert tab.evaluate(colour) == expected
    answer(tab, FIRST)
    tinted = "getComputedStyle(document.querySelector('.answer .draft')).backgroundColor"
    assert tab.evaluate(tinted) != "rgba(0, 0, 0, 0)"
    tab.click("#colour")
    assert tab.evaluate(tinted) == "rgba(0, 0, 0, 0)"


def test_a_phone_shows_all_of_it(browser: Chromium, server: TinyServer) -> None:
    tab = opened(browser, server, width=360, height=700)
    answer(tab, "x" * 300)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.evaluate("getComputedStyle(document.querySelector('#panel')).visibility") == "hidden"
    assert tab.text("#strip").count("tok/s") == 1
    tab.click("#open-panel")
    assert (
        tab.evaluate("getComputedStyle(document.querySelector('#panel')).visibility") == "visible"
    )
    assert tab.evaluate("document.activeElement.id") == "close-panel"
    assert tab.evaluate("document.querySelector('#panel').scrollWidth") == 360
    tab.press("Escape", 27)
    assert tab.evaluate("getComputedStyle(document.querySelector('#panel')).visibility") == "hidden"
    assert tab.evaluate("document.activeElement.id") == "open-panel"
    assert tab.problems == []


def test_every_control_has_a_name_for_screen_readers(browser: Chromium, server: TinyServer) -> None:
    tab = opened(browser, server)
    answer(tab, FIRST)
    controls = {"button", "textbox", "spinbutton", "radio", "checkbox", "combobox", "meter", "log"}
    found = set()
    for node in tab.call("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if role in controls and not node["ignored"]:
            found.add(role)
            assert node["name"]["value"], node
    assert found == controls
    assert tab.text("#status") == "The answer is complete."
