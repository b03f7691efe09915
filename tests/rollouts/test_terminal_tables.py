"""Tables on terminals of 80 and 40 columns and in a pipe."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rollouts.terminal.table import Column, print_table

COLUMNS = [
    Column("#", align_right=True),
    Column("episode", "2 episodes", wraps=True),
    Column("group", "1 groups", wraps=True, drop_order=2),
    Column("branches", "3", align_right=True, drop_order=1),
    Column("tokens", "1,234,567,890", align_right=True),
    Column("reward", "0.5", align_right=True),
]
ROWS = [
    ["0", "digits-0-3-1", "digits-0-3", "1", "1,234,567,478", "-0.1234"],
    ["1", "f47ac10b-58cc-4372-a567-0e02b2c3d479", "-", "2", "412", "1"],
]
NUMBERS = {"1,234,567,478", "-0.1234", "412", "1,234,567,890", "0.5"}


def lines(width, columns=COLUMNS, rows=ROWS):
    """The lines on a terminal of `width` columns; None: in a pipe."""
    file = io.StringIO()
    terminal = {"force_terminal": True, "color_system": None, "width": width} if width else {"width": 40}
    print_table(columns, rows, Console(file=file, **terminal))
    printed = file.getvalue().split("\n")[:-1]
    return printed if width is None else [line.rstrip() for line in printed]


def words(text_lines):
    return {word for line in text_lines for word in line.split()}


def test_a_terminal_that_is_too_narrow_for_what_remains_gets_lines_that_it_wraps_itself():
    assert words(lines(40)) >= NUMBERS


def test_nothing_in_a_cell_is_markup():
    assert "[bold]x[/bold]" in lines(None, [Column("a")], [["[bold]x[/bold]"]])


@given(st.lists(st.tuples(st.integers(0, 10**12), st.text("ab 漢", max_size=60)), max_size=4), st.integers(24, 120))
def test_no_number_is_cut_and_no_line_is_too_long_at_any_width(values, width):
    columns = [Column("number", align_right=True), Column("text", wraps=True, drop_order=1), Column("n", "end")]
    rows = [[f"{number:,}", text, str(number)] for number, text in values]
    printed = lines(width, columns, rows)
    assert {f"{number:,}" for number, _ in values} <= words(printed)
    assert {str(number) for number, _ in values} <= words(printed)
    if width >= 34:
        assert all(cell_len(line) <= width for line in printed)
