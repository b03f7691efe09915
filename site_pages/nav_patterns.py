"""The navigation of mkdocs.yml with patterns, such as `how-to/*.md`, replaced by pages."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any


def expanded(nav: Sequence[Any], pages: Sequence[str]) -> list[Any]:
    """`nav` in which each pattern is replaced by the pages of its folder that match it and have no entry of their own.

    `nav` has mkdocs' form: pages, and dicts from a title to a page or to a list of entries. The pages of a pattern come
    in the order of their names. A section without pages is left out.
    """
    named = set(_pages_named(nav))
    free = sorted((page for page in pages if page not in named), key=lambda page: page.removesuffix(".md"))
    return _expanded_entries(nav, free)


def _pages_named(nav: Sequence[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _pages_named(value)
            else:
                yield value


def _expanded_entries(nav: Sequence[Any], free: Sequence[str]) -> list[Any]:
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            entries += [page for page in free if _matches(page, entry)] if "*" in entry else [entry]
            continue
        for title, value in entry.items():
            if not isinstance(value, list):
                entries.append({title: value})
            elif section := _expanded_entries(value, free):
                entries.append({title: section})
    return entries


def _matches(page: str, pattern: str) -> bool:
    """Whether the page is in the pattern's folder itself, not in a folder below, and its name fits."""
    path, wanted = PurePosixPath(page), PurePosixPath(pattern)
    return path.parent == wanted.parent and fnmatch(path.name, wanted.name)
