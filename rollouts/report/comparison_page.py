"""Writes the comparison of several runs as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from rollouts.evaluation.comparing import compare_runs
from rollouts.evaluation.comparison import Comparison, RunDifference
from rollouts.files import replaced_file
from rollouts.report.charts import Chart, Line
from rollouts.report.comparison import (
    changes,
    counting_line,
    figure_table,
    note_lines,
    pairing_line,
    run_table,
    title_of,
)
from rollouts.report.page import Block, Cell, Heading, Items, Section, Text, charts_of, html_page
from rollouts.report.write import REPORT_FILE


def write_comparison(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, unpaired: bool = False
) -> None:
    """Write the comparison of `runs` (`rollouts.evaluation.compare_runs`, with `unpaired`) to `out`, an HTML file.

        write_comparison(["evaluations/before", "evaluations/after"], "comparison.html")

    It links to the reports of the runs. A file of this name is replaced. Raises what `compare_runs` raises, and
    `OSError`.
    """
    path = Path(out)
    comparison = compare_runs(runs, unpaired=unpaired)
    title = f"{' and '.join(run.name for run in comparison.runs[1:])} against {comparison.runs[0].name}"
    reports = [(run.name, Path(run.directory) / REPORT_FILE) for run in comparison.runs]
    folder = os.path.realpath(path.parent)
    linked = [
        Cell(f"report of {name}", quote(Path(os.path.relpath(os.path.realpath(one), folder)).as_posix()))
        for name, one in reports
        if one.is_file()
    ]
    sections: list[Section] = [
        ("What differs between the runs", [Items(note_lines(comparison))]),
        ("Runs", [run_table(comparison), Text(counting_line(comparison)), *([Items(linked)] if linked else [])]),
    ]
    sections += [(title_of(comparison, one), list(_pair(comparison, one))) for one in comparison.against_baseline]
    page = html_page(title, sections)
    with replaced_file(path) as file:
        file.write(page)


def _pair(comparison: Comparison, against: RunDifference) -> Iterator[Block]:
    yield Text(pairing_line(comparison, against))
    yield figure_table(comparison, against)
    if against.quantiles:
        shares = np.linspace(0, 100, len(against.quantiles)).tolist() if len(against.quantiles) > 1 else [50.0]
        lines = [Line("change of the total reward", against.quantiles)]
        note = "total reward, tasks in ascending order"
        yield from charts_of([Chart("Change of each task", "share of the tasks, %", shares, lines, note=note)])
    for table in changes(comparison, against):
        yield Heading(table.label)
        yield table
