"""A browser for the tests that ask for it, and the pages that several of them open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from viewer_episodes import called, drifted, failed, long_episode, media_episode, sound_source, tone, two_turns, video

from rollouts.view import write_html

if TYPE_CHECKING:
    from chromium import OpenPage
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from chromium import chromium

    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., OpenPage]]:
    """Open a file, or a URL, in a new context; `size` in pixels, `scheme` light or dark."""
    from chromium import DESKTOP, OpenPage

    contexts = []

    def opened(
        where: Path | str, size: tuple[int, int] = DESKTOP, scheme: str = "light", **options: object
    ) -> OpenPage:
        viewport = {"width": size[0], "height": size[1]}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, **options))
        url = where.as_uri() if isinstance(where, Path) else where
        return OpenPage(contexts[-1].new_page(), url)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def small_page(renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes with everything that the page shows, and token texts."""
    path = tmp_path_factory.mktemp("viewer") / "small.html"
    sibling = two_turns(renderer, "sibling")
    episodes = [two_turns(renderer), sibling, drifted(renderer), called(renderer), failed()]
    media = (("video", video()), ("image", b"no image"), ("audio", sound_source(tone(), 44_100)))
    write_html([*episodes, media_episode(*media)], path, renderer=renderer)
    return path


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 episodes of 30,000 tokens."""
    path = tmp_path_factory.mktemp("viewer") / "large.html"
    write_html(map(long_episode, range(500)), path)
    return path
