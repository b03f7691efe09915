"""Texts and tables on a terminal and in a pipe. A number or a digest in a table is never cut."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Lines of text for standard output and standard error.
#
# The text may quote a file or a server: it is never read as markup, and control characters never reach the terminal.


def printable(text: str) -> str:
    """`text` with each control character and each invisible character, except the line feed, as a visible symbol."""
    return text if text.isprintable() else "".join(map(_printable_character, text))


def printable_line(text: str) -> str:
    """As `printable`, on one line: each line feed becomes `⏎`."""
    return printable(text).replace("\n", "⏎")


def shortened(text: str, most: int) -> str:
    """`text`, or of a text with more than `most` characters its beginning and its end, and how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[-half:]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 token", "1,200 tokens"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def print_line(text: str) -> None:
    """Print to standard output, without wrapping."""
    Console().print(Text(printable(text)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, of ASCII characters alone, to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_error(message: str) -> None:
    """Print one line to standard error; an error in that is ignored, because there is nowhere to report it."""
    _print_on_stderr(f"error: {message}")


def print_note(message: str) -> None:
    """As `print_error`, for what is no error."""
    _print_on_stderr(f"note: {message}")


def print_warning(message: str) -> None:
    """As `print_error`, for what went wrong and did not end the command."""
    _print_on_stderr(f"warning: {message}")


def _print_on_stderr(message: str) -> None:
    with contextlib.suppress(OSError):
        Console(stderr=True).print(Text(printable_line(message)), soft_wrap=True)


def exit_with_error(message: str) -> NoReturn:
    """Print one line to standard error and exit with code 2."""
    print_error(message)
    raise typer.Exit(2) from None


def _printable_character(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode symbols for control characters
    return "␡" if code == 0x7F else f"<U+{code:04X}>"


_GAP = 2
_MIN_TEXT_WIDTH = 13

Row = Sequence[Text | str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    `wraps`: its cells are wrapped where the terminal is too narrow, to lines of at least 13 columns.
    `drop_order`: columns that have one are left out of a narrow table, the lowest number first.
    """

    heading: str
    footer: str = ""
    align_right: bool = False
    wraps: bool = False
    drop_order: int | None = None


def print_table(columns: Sequence[Column], rows: Iterable[Row], console: Console | None = None) -> None:
    """Print rows with one cell per column to standard output. Cells are not read as markup.

    In a pipe each row is one line with all columns. Where a terminal is too narrow for all columns, a line below the
    table names those that are left out.
    """
    console = console or Console()
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = [
        max(map(cell_len, "\n".join([column.heading, column.footer, *(row[place].plain for row in cells)]).split("\n")))
        for place, column in enumerate(columns)
    ]
    if not console.is_terminal:
        file = io.StringIO()
        table = _table(columns, cells, widths, range(len(columns)))
        Console(file=file, width=sum(widths) + _GAP * len(widths)).print(table)
        for line in file.getvalue().split("\n")[:-1]:
            console.print(Text(line.rstrip()), soft_wrap=True)
        return
    least = [
        min(width, _MIN_TEXT_WIDTH) if column.wraps else width for column, width in zip(columns, widths, strict=True)
    ]
    shown = list(range(len(columns)))
    while sum(least[place] for place in shown) + _GAP * len(shown) > console.width:
        droppable = [place for place in shown if columns[place].drop_order is not None]
        if not droppable:
            break
        shown.remove(min(droppable, key=lambda place: columns[place].drop_order or 0))
    table = _table(columns, cells, least, shown)
    if (needed := sum(least[place] for place in shown) + _GAP * len(shown)) > console.width:
        table.width = needed  # it is not cut: the terminal wraps its lines
    console.print(table, crop=False)
    if len(shown) < len(columns):
        left_out = ", ".join(column.heading for place, column in enumerate(columns) if place not in shown)
        console.print(Text(f"not shown at this width: {left_out}"))


def _table(
    columns: Sequence[Column], cells: Sequence[Sequence[Text]], least: Sequence[int], shown: Sequence[int]
) -> Table:
    table = Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        show_footer=any(column.footer for column in columns),
        header_style="",
        footer_style="",
    )
    for place in shown:
        column = columns[place]
        table.add_column(
            Text(column.heading),
            Text(column.footer),
            justify="right" if column.align_right else "left",
            min_width=least[place],
            no_wrap=not column.wraps,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(row[place] for place in shown))
    return table
