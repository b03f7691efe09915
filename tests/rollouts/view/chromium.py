"""A real Chromium that opens pages of the viewer and keeps what it reports and requests."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

# No connection but that to the page: without these flags Chromium looks up hosts of its maker at every start.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parents[3] / "rollouts" / "view" / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP, PHONE = (1400, 900), (390, 800)


@dataclass
class OpenPage:
    """A page with what it has printed and requested, and the errors that it did not catch."""

    page: Page
    url: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"uncaught: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        self.page.goto(self.url)

    def show(self, fragment: str) -> None:
        """Go to a fragment and wait until its view is there."""
        self.page.evaluate("fragment => { location.hash = fragment }", fragment)
        self.page.wait_for_selector("#view:not(:empty)")

    def until(self, expression: str, value: Any = True, seconds: float = 20.0) -> None:
        """Wait until `expression` has this value. Playwright's own wait needs `eval`, which the page forbids."""
        deadline = time.monotonic() + seconds
        while (found := self.page.evaluate(expression)) != value:
            assert time.monotonic() < deadline, f"{expression} is {found!r}, not {value!r}"
            self.page.wait_for_timeout(20)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def check_quiet(self) -> None:
        """Nothing was printed or thrown, and nothing was requested but the page itself and pictures in memory."""
        assert self.messages == []
        assert [url for url in self.requests if not url.startswith("blob:")] == [self.url]

    def screenshot(self, name: str) -> None:
        """Write a picture into the directory $MMROLLOUTS_SCREENSHOTS, if it is set."""
        if directory := os.environ.get("MMROLLOUTS_SCREENSHOTS"):
            Path(directory).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(directory) / f"{name}.png")


def serious_violations(opened: OpenPage) -> list[tuple[str, list[str]]]:
    """What axe, which the page has read, finds of serious and critical violations: their names and some elements."""
    found = opened.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        (each["id"], [node["html"][:120] for node in each["nodes"]][:3])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. The tests fail where it is missing, because the marker `browser` asks for it."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.fail("tests with the marker browser need Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        yield browser
        browser.close()
