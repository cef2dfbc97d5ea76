"""The page of a skill bank in a real browser: it is typed into, clicked and asked what it shows."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skills.bank import SkillBank
from skills.intake import AddOptions
from skills.items import Evidence, Lineage, SkillItem
from skills.lifecycle import Use
from skills.page import build_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; install Debian's package chromium"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
LAUNCH = "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); "
LAUNCH += "os.execv(sys.argv[3], sys.argv[3:])"
"""The browser reads its commands from descriptor 3 and answers on 4."""
PATIENCE = 30.0
"""Seconds for an answer; a busy machine starts a browser slowly."""
HOSTILE = '</script><img src=x onerror="window.hit = 1"><script>window.hit = 2</script>\'`${1}'


class Browser:
    """A headless chromium behind a pair of pipes, and what it complained about."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        for end in (to_read, to_write):
            # Away from 3 and 4, which the launcher is about to fill.
            os.set_inheritable(end, True)
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.complaints: list[str] = []
        self._buffer = b""
        self._number = 0
        self._session = ""
        pages = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._wait(lambda answer: answer.get("id") == self._number)["result"]

    def open(self, page: Path, words: str = "") -> None:
        self("Page.navigate", url="about:blank")
        self._wait(lambda answer: answer.get("method") == "Page.loadEventFired")
        self("Page.navigate", url=page.as_uri() + words)
        self._wait(lambda answer: answer.get("method") == "Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page. AssertionError when it throws."""
        answer = self(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def type(self, text: str) -> None:
        """Into the field that has the focus, as a keyboard would."""
        self("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            sign = {"text": "\r"} if key == "Enter" and kind == "char" else {}
            if kind != "char" or sign:
                self(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=code,
                    **sign,
                )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)

    def _wait(self, is_wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            line, zero, rest = self._buffer.partition(b"\0")
            if not zero:
                ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
                data = os.read(self._read, 1 << 20) if ready else b""
                assert data, "the browser ended or does not answer"
                self._buffer += data
                continue
            self._buffer = rest
            answer = json.loads(line)
            self._note(answer)
            if is_wanted(answer):
                assert "error" not in answer, answer
                return answer

    def _note(self, answer: dict[str, Any]) -> None:
        """Keep every error, warning, refusal of the policy and request."""
        method, words = answer.get("method"), answer.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(words))
        elif method == "Network.requestWillBeSent":
            url = words["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.complaints.append(url)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> SkillBank:
    """Three plain skills, one hostile in every field, and 150 fillers."""
    bank = SkillBank.create(tmp_path_factory.mktemp("home"), "main", capacity=0, actor=HOSTILE)
    plain = [
        ("heat_001", "Heat, then place", "heat", "Carry the hot object to its place."),
        ("cool_001", "Cool in the fridge", "cool", "The sink does not cool."),
        ("look_001", "Take it to the lamp", "look", "Switch on the desklamp, it is not hot."),
    ]
    items = [
        SkillItem(id=name, title=title, category=category, principle=text, status="active")
        for name, title, category, text in plain
    ]
    items.append(
        SkillItem(
            id="evil_001",
            title=f"{HOSTILE}\u202e",
            category=HOSTILE,
            principle=HOSTILE,
            when_to_apply=HOSTILE,
            body=f"```\n</pre>{HOSTILE}",
            avoid=HOSTILE,
            evidence=(Evidence(traj_id=HOSTILE, outcome="failure"),),
            lineage=Lineage(author=HOSTILE, run=HOSTILE, parents=(HOSTILE, "heat_001")),
            extra={HOSTILE: HOSTILE},
        )
    )
    items += [
        SkillItem(id=f"filler_{n:03d}", title=f"Number {n}", principle=f"Of {n}.")
        for n in range(150)
    ]
    bank.add(items, AddOptions(dedup=False), reason=HOSTILE)
    seen = [Use(skill="heat_001", success=n < 3, num_without=1) for n in range(4)]
    bank.record(seen, reason=HOSTILE)
    with bank.change(actor=HOSTILE) as change:
        change.retire("cool_001", reason=HOSTILE)
    return bank


@pytest.fixture(scope="module")
def page(bank: SkillBank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "skills.html"
    path.write_text(build_page(bank), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """No test may leave an error, a refusal of the policy, or a request to anywhere."""
    browser.complaints.clear()
    yield
    browser.ask("1")
    assert browser.complaints == []


def titles(browser: Browser) -> list[str]:
    return browser.ask("[...document.querySelectorAll('.title')].map((e) => e.innerText)")


def choose(browser: Browser, field: str, value: str) -> None:
    browser.ask(
        f"(() => {{ const f = document.getElementById({field!r}); f.value = {json.dumps(value)}; "
        "f.dispatchEvent(new Event('input')); })()"
    )


def test_words_typed_into_the_search_leave_only_the_skills_that_have_them(browser, page) -> None:
    browser.open(page)
    assert len(titles(browser)) == 50
    assert browser.ask("document.getElementById('count').innerText") == "154 skills"
    browser.ask("document.getElementById('q').focus()")
    browser.type("HOT")
    assert titles(browser) == ["Heat, then place", "Take it to the lamp"]
    browser.type(" lamp")
    assert titles(browser) == ["Take it to the lamp"]
    assert browser.ask("document.getElementById('count').innerText") == "1 of 154 skills"
    assert browser.ask("location.hash") == "#q=HOT+lamp"
    browser.type("x")
    assert titles(browser) == []
    assert "No skill has" in browser.ask("document.getElementById('count').innerText")


def test_filters_order_and_address_lead_to_the_same_list(browser, page) -> None:
    browser.open(page)
    choose(browser, "status", "retired")
    assert titles(browser) == ["Cool in the fridge"]
    choose(browser, "status", "active")
    choose(browser, "sort", "newest")
    assert titles(browser) == ["Take it to the lamp", "Heat, then place"]
    words = browser.ask("location.hash")
    browser.open(page, words)
    assert titles(browser) == ["Take it to the lamp", "Heat, then place"]
    choose(browser, "category", "heat")
    assert titles(browser) == ["Heat, then place"]


def test_the_rest_of_a_long_list_comes_on_demand_and_keeps_the_focus_in_it(browser, page) -> None:
    browser.open(page)
    browser.ask("document.getElementById('more').focus()")
    browser.press("Enter", 13)
    assert len(titles(browser)) == 100
    place = "[...document.querySelectorAll('summary')].indexOf(document.activeElement)"
    assert browser.ask(place) == 50
    assert browser.ask("document.getElementById('more').innerText") == "Show 50 more of 54"
    browser.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert len(titles(browser)) == 154
    assert browser.ask("document.getElementById('more').hidden") is True


def test_hostile_text_is_shown_and_does_nothing(browser, page) -> None:
    browser.open(page, "#skill=evil_001")
    assert browser.ask("document.querySelector('[open] .title').innerText") == (
        f"{HOSTILE}\u27e8U+202E\u27e9"
    )
    assert browser.ask("document.activeElement.tagName") == "SUMMARY"
    shown = browser.ask("document.querySelector('[open] .full').innerText")
    assert shown.count(HOSTILE) >= 9
    assert browser.ask("document.querySelectorAll('img, iframe, object, link, base').length") == 0
    assert browser.ask("document.scripts.length") == 2
    assert browser.ask("window.hit === undefined") is True
    # A parent that is in the bank is a link to it.
    browser.ask("document.querySelector('[open] .plain a').click()")
    browser.ask("new Promise((done) => setTimeout(done, 50))")
    opened = "[...document.querySelectorAll('[open] .title')].map((e) => e.innerText)"
    assert browser.ask(opened) == ["Heat, then place"]


def test_the_policy_of_the_page_stops_what_would_act(browser, page) -> None:
    browser.open(page)
    browser.ask(
        "document.addEventListener('securitypolicyviolation', (e) => "
        "{ window.stopped = (window.stopped || '') + e.effectiveDirective + ' '; })"
    )
    done = browser(
        "Runtime.evaluate",
        expression="document.getElementById('count').innerHTML = '<img src=x onerror=alert(1)>'",
    )
    assert "TrustedHTML" in json.dumps(done)
    browser.ask(
        "(() => { const s = document.createElement('img'); s.src = 'http://127.0.0.1:9/x.png'; "
        "document.body.append(s); })()"
    )
    assert "img-src" in browser.ask(
        "new Promise((done) => setTimeout(() => done(window.stopped), 50))"
    )
    assert any("img-src" in words for words in browser.complaints)
    browser.complaints.clear()


def test_the_change_that_is_chosen_is_shown(browser, page, bank) -> None:
    browser.open(page)
    assert browser.ask("document.querySelector('#change .count').innerText") == (
        "0 added, 0 removed, 1 changed"
    )
    assert "retired" in browser.ask("document.querySelector('.changes ins').innerText")
    labels = browser.ask("[...document.querySelectorAll('#which option')].map((o) => o.innerText)")
    assert [label.split("; ")[-2] for label in labels] == [
        "retire \u00d71",
        "credit \u00d71",
        "add \u00d7154",
    ]
    browser.ask(
        "(() => { const w = document.getElementById('which'); w.value = '2'; "
        "w.dispatchEvent(new Event('change')); })()"
    )
    assert browser.ask("document.querySelector('#change .count').innerText") == (
        "154 added, 0 removed, 0 changed"
    )


@pytest.mark.parametrize("width", [380, 1200])
def test_no_width_makes_the_page_scroll_sideways(browser, page, width) -> None:
    browser(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.open(page, "#skill=evil_001")
    wide = browser.ask("[document.documentElement.scrollWidth, window.innerWidth]")
    browser("Emulation.clearDeviceMetricsOverride")
    assert wide == [width, width]
