"""The lines of the keys of TOML documents."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.run_config.key_lines import KeyPath, key_lines

NAMES = st.sampled_from(["a", "b-c", "1", '"x.y"', "'q # ['", r'"A\""'])
STRINGS = st.sampled_from(
    ['"text"', "'c:\\'", r'"\"] # ="', '"""\nlines = 1\n[x]\n"""', "'''\n]\n''''", '""', '"""a""b\\"""""""', "''''''"]
)
OTHERS = st.sampled_from(["1", "-0.5e3", "true", "1979-05-27 07:32:00", "inf", "0xff"])
GAPS = st.sampled_from(["", " ", "\n", " # a ] comment = 1\n", "\n\n\t"])


def paths_of(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all keys and array elements of a parsed document."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key)
        yield from paths_of(member, (*path, key))


@st.composite
def arrays(draw: st.DrawFn, elements: st.SearchStrategy[str]) -> str:
    parts = [draw(GAPS) + element + draw(GAPS) for element in draw(st.lists(elements, max_size=3))]
    return "[" + ",".join(parts) + ("," if parts and draw(st.booleans()) else "") + draw(GAPS) + "]"


@st.composite
def inline_tables(draw: st.DrawFn, elements: st.SearchStrategy[str]) -> str:
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    return "{ " + ", ".join(f"{name} = {draw(elements)}" for name in names) + " }"


VALUES = st.recursive(STRINGS | OTHERS, lambda inner: arrays(inner) | inline_tables(inner), max_leaves=6)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A document whose every statement is unique; some are of no valid document, and are left out."""
    text = ""
    for _ in range(draw(st.integers(1, 8))):
        key = " . ".join(draw(st.lists(NAMES, min_size=1, max_size=3)))
        form = draw(st.sampled_from(["[{}]", "[[{}]]", " {} = {}", "{}={}"]))
        statement = draw(GAPS).rstrip(" \t") + form.format(key, draw(VALUES)) + draw(st.sampled_from(["", " # [a]"]))
        try:
            tomllib.loads(f"{text}{statement}\n")
        except tomllib.TOMLDecodeError:
            continue
        text += f"{statement}\n"
    return text


@settings(max_examples=60)
@given(documents())
def test_every_key_of_a_document_has_a_line_and_nothing_else_has_one(text: str) -> None:
    assert set(key_lines(text)) == set(paths_of(tomllib.loads(text)))


@settings(max_examples=30)
@given(documents(), st.integers(1, 5))
def test_empty_lines_before_a_document_move_every_key_by_as_many(text: str, count: int) -> None:
    moved = key_lines("\n" * count + text)
    assert moved == {path: line + count for path, line in key_lines(text).items()}


@settings(max_examples=30)
@given(documents())
def test_carriage_returns_change_no_line(text: str) -> None:
    assert key_lines(text.replace("\n", "\r\n")) == key_lines(text)


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\nb = 2", ("b",), 2),
        ("[t]\n\n# comment\nx.y = 1", ("t", "x", "y"), 4),
        ("[t.u]\nv = 1", ("t",), 1),
        ("a = [\n1,\n2,\n]", ("a", 1), 3),
        ('a = """\n\n"""\nb = 1', ("b",), 4),
        ("[[t]]\nx = 1\n[[t]]\nx = 2", ("t", 1, "x"), 4),
        ("[[t]]\n[[t]]\n[t.u]\nx = 2", ("t", 1, "u", "x"), 4),
        ("[[t]]\n[[t.u]]\n[[t.u]]\nx = 2", ("t", 0, "u", 1, "x"), 4),
        ("a = { b = 1, c = [2, { d = 3 }] }", ("a", "c", 1, "d"), 1),
        (r'"\u0041" = 1' + "\nb = 1", ("A",), 1),
    ],
)
def test_the_line_of_a_key_is_the_line_on_which_it_is_written(text: str, path: KeyPath, line: int) -> None:
    assert key_lines(text)[path] == line
