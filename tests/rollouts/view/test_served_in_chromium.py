"""The served page in a real Chromium: it reads episodes when they are opened, and follows the file."""

import pytest
from served_viewer import served
from viewer_episodes import failed, two_turns

from transport import RecordWriter

pytestmark = pytest.mark.browser


@pytest.mark.contract
def test_the_served_page_reads_on_demand_and_shows_episodes_as_they_are_written(renderer, tmp_path, open_page):
    path = tmp_path / "growing.mmr"
    with RecordWriter(path) as out:
        out.append([failed(), two_turns(renderer)])
        out.flush()
        with served(path) as address:
            opened = open_page(address)
            opened.until("document.querySelectorAll('tbody tr td.id').length", 2)
            assert not [url for url in opened.requests if "/episodes/" in url]
            opened.show("#e=1")
            opened.page.wait_for_selector("figure img")
            assert [url.removeprefix(address) for url in opened.requests if "/episodes/" in url] == ["episodes/1"]
            out.append(two_turns(renderer, "later"))
            opened.until("document.querySelectorAll('tbody tr td.id').length", 3)
            assert opened.texts("tbody tr td.id") == ["failed", "two-turns", "later"]
            opened.page.fill("#filter", "text:blue")
            opened.until("document.querySelectorAll('tbody tr td.id').length", 2)
            out.append(two_turns(renderer, "last"))
            opened.until("document.querySelectorAll('tbody tr td.id').length", 3)
            assert opened.texts("tbody tr td.id") == ["two-turns", "later", "last"]
            assert opened.messages == []
            assert all(url.startswith((address, "blob:")) for url in opened.requests)
        opened.until("document.querySelector('.top .hint').textContent", "the server does not answer")
