"""Tables that are readable at every width: a number or a digest is never cut.

In a pipe each row is one line with all columns. Where a terminal is too narrow, columns of text are wrapped first, then
columns are left out in the order that the table gives, and a line below the table names them. If that is not enough,
each row is printed as a list of its values, one on a line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
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
_INDENT = 4
_MIN_BLOCK_WIDTH = 16

Row = Sequence[Text | str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    `min_width`: the column holds text, which may be wrapped to lines of at least this width; None: it is never wrapped.
    `drop_order`: columns that have one are left out of a narrow table, the lowest number first.
    """

    heading: str
    footer: str = ""
    align_right: bool = False
    min_width: int | None = None
    drop_order: int | None = None


def print_table(columns: Sequence[Column], rows: Iterable[Row], console: Console | None = None) -> None:
    """Print rows with one cell per column to standard output. Cells are not read as markup."""
    console = console or Console()
    for line in table_lines(columns, rows, console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)


def table_lines(columns: Sequence[Column], rows: Iterable[Row], width: int | None) -> Iterator[Text]:
    """The lines of a table for a terminal of `width` columns; None: each row on one line, however long.

    A row whose cells are all empty is an empty line.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    footer = [Text(column.footer) for column in columns]
    natural_widths = [
        max(cell_len(line) for row in (*cells, footer) for line in [column.heading, *row[place].plain.split("\n")])
        for place, column in enumerate(columns)
    ]
    if width is None:
        widths: dict[int, int] | None = dict(enumerate(natural_widths))
    else:
        widths = _fit(columns, natural_widths, width)
    if widths is None:
        assert width is not None
        yield from _blocks(columns, [*cells, footer], width)
        return
    table = [[Text(column.heading) for column in columns], *cells]
    for row in [*table, footer] if any(footer) else table:
        yield from _row_lines(columns, row, widths)
    dropped = [column.heading for place, column in enumerate(columns) if place not in widths]
    if dropped:
        yield from _wrapped(Text(f"not shown at this width: {', '.join(dropped)}"), width or 0)


def _fit(columns: Sequence[Column], natural_widths: Sequence[int], width: int) -> dict[int, int] | None:
    """The width of each column that is shown, by its place; None if the table does not fit."""
    kept = list(range(len(columns)))
    while True:
        room = width - _GAP * (len(kept) - 1)
        widths = {place: natural_widths[place] for place in kept}
        spare = {place: widths[place] - min(widths[place], columns[place].min_width or widths[place]) for place in kept}
        missing = sum(widths.values()) - room
        if missing <= sum(spare.values()):
            break
        droppable = [place for place in kept if columns[place].drop_order is not None]
        if not droppable:
            return None
        kept.remove(min(droppable, key=lambda place: columns[place].drop_order or 0))
    for _ in range(missing):  # always from the widest column that can be narrower
        widest = max((place for place in kept if spare[place]), key=widths.__getitem__)
        widths[widest] -= 1
        spare[widest] -= 1
    return widths


def _row_lines(columns: Sequence[Column], row: Sequence[Text], widths: dict[int, int]) -> Iterator[Text]:
    wrapped = {place: _wrapped(row[place], width) for place, width in widths.items()}
    for number in range(max(map(len, wrapped.values()))):
        line = Text()
        for place, width in widths.items():
            part = wrapped[place][number] if number < len(wrapped[place]) else Text()
            padding = " " * (width - cell_len(part.plain))
            if columns[place].align_right:
                line.append(padding).append_text(part)
            else:
                line.append_text(part).append(padding)
            line.append(" " * _GAP)
        line.rstrip()
        yield line


def _blocks(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
    """Each row as its first cell that is not empty, then a line `heading: value` for each of the others."""
    for row in rows:
        filled = [(column.heading, cell) for column, cell in zip(columns, row, strict=True) if cell.plain]
        for number, (heading, cell) in enumerate(filled):
            indent = " " * _INDENT if number else ""
            text = Text(f"{heading}: " if heading and number else "").append_text(cell)
            for line in _wrapped(text, max(width - len(indent), _MIN_BLOCK_WIDTH)):
                yield Text(indent).append_text(line)


def _wrapped(text: Text, width: int) -> list[Text]:
    if cell_len(text.plain) <= width and "\n" not in text.plain:
        return [text]
    return list(text.wrap(Console(), max(width, 1), overflow="fold")) or [Text()]
