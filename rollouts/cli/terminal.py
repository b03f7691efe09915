"""Words for a terminal. They may quote a file: nothing in them is markup, nothing reaches the terminal raw."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.cli.render.token_view import visible

# Wide enough that a table never has words cut off or folded: each row is one line, in a pipe and on any terminal.
_UNBOUNDED = 10_000


def show_everything() -> None:
    """What the terminal's encoding lacks is written as an escape, and is no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show_table(table: Table) -> None:
    Console(width=_UNBOUNDED).print(table)


def say(words: str) -> None:
    Console().print(Text(visible(words)), soft_wrap=True)


def one_line(text: str) -> str:
    """What stands in a line of its own: line breaks are shown, too."""
    return visible(text).replace("\n", "⏎")


def complain(words: str) -> None:
    """One line to stderr."""
    Console(stderr=True).print(Text(f"error: {one_line(words)}"), soft_wrap=True)


def refuse(words: str) -> NoReturn:
    """One line to stderr, and exit code 2."""
    complain(words)
    raise typer.Exit(2) from None
