"""README's links to files and headings. `mkdocs build --strict` checks those between pages of `docs/`."""

import re
from pathlib import Path

import pytest
from markdown import Markdown
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def broken_links(text: str) -> list[str]:
    """The links of the Markdown `text`, a file in the root folder, whose file or heading does not exist."""
    return [
        f"{path}#{anchor}" if anchor else path
        for path, anchor in LINK.findall(text)
        if not (ROOT / path).exists() or (anchor and anchor not in anchors((ROOT / path).read_text("utf-8")))
    ]


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as in the site (mkdocs.yml) and on the page of a repository."""
    markdown = Markdown(
        extensions=["toc", "pymdownx.superfences"], extension_configs={"toc": {"slugify": slugify(case="lower")}}
    )
    return set(re.findall(r'<h\d id="([^"]+)"', markdown.convert(text)))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    assert broken_links((ROOT / name).read_text("utf-8")) == []


def test_a_missing_file_and_a_missing_heading_are_found() -> None:
    text = "[a](docs/absent.md) [b](docs/training.md#absent) [c](docs/training.md#adapters) [d](docs/training.md)"
    assert broken_links(text) == ["docs/absent.md", "docs/training.md#absent"]
