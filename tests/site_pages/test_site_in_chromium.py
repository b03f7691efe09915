"""The built documentation site in a real Chromium: no page requests anything from another host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parent.parent.parent
PAGES = (
    "",
    "concepts/image/",
    "environments/",
    "reference/commands/",
    "reference/errors/",
    "reference/python/rollouts/",
)
DESKTOP, PHONE = (1400, 900), (390, 800)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None:
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site: the folder $MMROLLOUTS_SITE, or one that is built now."""
    directory = os.environ.get("MMROLLOUTS_SITE") or str(tmp_path_factory.mktemp("site"))
    if "MMROLLOUTS_SITE" not in os.environ:
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", directory]
        subprocess.run(build, cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium")
    assert executable, "tests with the marker browser need Chromium: apt-get install chromium"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=flags)
        yield started
        started.close()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path or "index")
def test_a_page_requests_nothing_from_other_hosts_and_fits_the_window(
    browser: Browser, site: str, path: str, size: tuple[int, int]
) -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    requests: list[str] = []
    messages: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(site + path, wait_until="networkidle")
    assert [url for url in requests if not url.startswith(site)] == []
    assert messages == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    broken = "Array.from(document.images).filter(image => !image.naturalWidth).map(image => image.src)"
    assert page.evaluate(broken) == []
    if directory := os.environ.get("MMROLLOUTS_SCREENSHOTS"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(directory) / f"site-{path.replace('/', '-') or 'index-'}{size[0]}.png")
    page.close()


@pytest.mark.parametrize("name", ["branches", "bridging", "image", "mismatch", "staleness", "token"])
def test_the_texts_of_a_drawing_can_be_read_at_phone_width(browser: Browser, site: str, name: str) -> None:
    page = browser.new_page(viewport={"width": PHONE[0], "height": PHONE[1]})
    page.goto(f"{site}concepts/{name}/", wait_until="networkidle")
    assert page.evaluate("document.querySelector('.drawing img').getBoundingClientRect().width") == 860  # not reduced
    page.focus(".drawing")
    page.evaluate("document.querySelector('.drawing').scrollLeft = 1000")
    assert page.evaluate("document.querySelector('.drawing').scrollLeft") > 400
    assert page.is_visible("text=scroll it sideways")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    if directory := os.environ.get("MMROLLOUTS_SCREENSHOTS"):
        page.evaluate("document.querySelector('.drawing').scrollLeft = 0")
        page.screenshot(path=Path(directory) / f"drawing-{name}-{PHONE[0]}.png")
    page.close()


@pytest.mark.contract
def test_the_search_finds_a_class_without_a_server_of_another_host(browser: Browser, site: str) -> None:
    page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(site, wait_until="networkidle")
    # The page searches when a key is released, and not when a value is put into the field, as `fill` does.
    page.locator("input.md-search__input").press_sequentially("FleetMismatchError")
    page.locator(".md-search-result__link", has_text="FleetMismatchError").first.wait_for()
    assert [url for url in requests if not url.startswith(site)] == []
    page.close()


def test_a_request_to_another_host_would_be_seen(browser: Browser, site: str) -> None:
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(site, wait_until="networkidle")
    with page.expect_event("requestfailed"):
        page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:1/font.png' }))")
    assert [url for url in requests if not url.startswith(site)] == ["http://127.0.0.1:1/font.png"]
    page.close()
