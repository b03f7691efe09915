"""Tables on terminals of 80 and 40 columns and in a pipe."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

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


def test_in_a_pipe_each_row_is_one_line_with_all_columns():
    printed = lines(None)
    assert len(printed) == 4
    assert printed[0].split() == [column.heading for column in COLUMNS]
    assert printed[2].split() == ROWS[1]
    assert not any(line.endswith(" ") for line in printed)


def test_a_terminal_of_80_columns_shows_all_columns_and_wraps_text():
    printed = lines(80)
    assert max(map(cell_len, printed)) <= 80
    assert printed[0].split() == [column.heading for column in COLUMNS]
    assert words(printed) >= NUMBERS
    assert not any("not shown" in line for line in printed)


def test_a_narrow_terminal_leaves_out_columns_in_their_order_and_names_them():
    printed = lines(60)
    assert max(map(cell_len, printed)) <= 60
    assert printed[-1] == "not shown at this width: branches"
    assert "group" in printed[0]
    assert lines(52)[-1] == "not shown at this width: group, branches"
    assert words(printed) & words(lines(52)) >= NUMBERS


def test_a_terminal_that_is_too_narrow_for_what_remains_gets_lines_that_it_wraps_itself():
    assert words(lines(40)) >= NUMBERS


@pytest.mark.parametrize("width", [5, 12, 20, 40])
def test_no_column_is_lost_without_being_named(width):
    digest = "0123456789abcdef" * 4
    columns = [Column("message", wraps=True), Column("sha"), Column("group", drop_order=1)]
    printed = lines(width, columns, [["first", digest, "g"]])
    assert {"message", "sha", "first", digest} <= words(printed)
    assert {"not", "shown", "group"} <= words(printed)


def test_cells_with_several_lines_stay_in_their_column():
    rows = [["a", Text("seen\n-> cure", "bold")], ["b", "fine"]]
    assert lines(40, [Column("check"), Column("seen", wraps=True)], rows) == [
        "check  seen",
        "a      seen",
        "       -> cure",
        "b      fine",
    ]


def test_a_row_of_empty_cells_is_an_empty_line():
    assert lines(None, [Column("a"), Column("b")], [["1", "2"], ["", ""], ["3", "4"]])[2] == ""


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


@pytest.mark.parametrize("width", [80, 40])
def test_a_table_without_rows_is_its_heading(width):
    assert lines(width, [Column("a"), Column("b")], []) == ["a  b"]
