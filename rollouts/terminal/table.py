"""Tables on a terminal and in a pipe. A number or a digest is never cut."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2

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

    In a pipe each row is one line with all columns. Where a terminal is too narrow for all columns, a line
    below the table names those that are left out.
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
    least = [min(width, 13) if column.wraps else width for column, width in zip(columns, widths, strict=True)]
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
