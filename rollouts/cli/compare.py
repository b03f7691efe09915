"""`rollouts compare RUN_A RUN_B...`: differences between stored runs, with intervals, as tables, files and a plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from rollouts.files import replaced_file
from rollouts.terminal.table import Column, print_line, print_table, printable_line

if TYPE_CHECKING:
    from rollouts.evaluation.comparison import Comparison, RunDifference
    from rollouts.evaluation.results import FailedEpisodes


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Output directories of `rollouts eval`, `run` or `demo`, the baseline first. RUN@VERSION: the groups "
            "of a training run that the weights of a version sampled.",
        ),
    ],
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="REWARD",
            help="An episode succeeds with at least this total reward; default: that of results.json, else 1.",
        ),
    ] = None,
    failed: Annotated[
        str | None,
        typer.Option(
            metavar="zero|exclude",
            help="How episodes with an error count: as 0, or not at all; default: as in results.json, else zero.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", min=1, metavar="K", help="Of pass@K; several times. Default: powers of 2."),
    ] = None,
    unpaired: Annotated[
        bool, typer.Option("--unpaired", help="Compare the means over all tasks of each run, not task by task.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write everything as JSON; -: print only that.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown, with links to reports.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|FILE.svg", help="Plot the differences with their intervals (extra `plot`)."),
    ] = None,
) -> None:
    """Compare runs with the first one: differences by task with 95 % intervals and paired tests.

    What differs between the runs apart from their rewards is printed first. A file that is named by an option is
    replaced if it exists; without these options nothing is written.
    """
    from rollouts.evaluation.comparison import compare_runs

    if plot is not None:
        from rollouts.report.comparison import check_plot

        check_plot(plot)
    comparison = compare_runs(
        runs, threshold=threshold, failed=cast("FailedEpisodes | None", failed), k=k or None, unpaired=unpaired
    )
    if json_file == "-":
        sys.stdout.write(comparison.model_dump_json() + "\n")
    else:
        _print_comparison(comparison)
    if json_file not in (None, "-"):
        _write(Path(str(json_file)), comparison.model_dump_json(indent=2) + "\n")
    if markdown is not None:
        from rollouts.report.comparison import comparison_markdown

        _write(markdown, comparison_markdown(comparison, markdown.parent))
    if plot is not None:
        from rollouts.report.comparison import plot_comparison

        plot_comparison(comparison, plot)


def _write(path: Path, text: str) -> None:
    with replaced_file(path) as file:
        file.write(text.encode("utf-8", "replace"))


def _print_comparison(comparison: Comparison) -> None:
    from rollouts.report.comparison import RUN_HEADINGS, counting_line, note_lines, run_rows

    console = Console()
    for note in note_lines(comparison):
        print_line(f"- {printable_line(note)}")
    print_line("")
    print_table(_columns(RUN_HEADINGS, names=1), _printable(run_rows(comparison)), console)
    print_line(counting_line(comparison))
    for against in comparison.against_baseline:
        _print_difference(comparison, against, console)


def _print_difference(comparison: Comparison, against: RunDifference, console: Console) -> None:
    from rollouts.report.comparison import (
        changed_headings,
        changed_rows,
        changes,
        figure_headings,
        figure_rows,
        pairing_line,
    )

    print_line("")
    print_line(printable_line(pairing_line(comparison, against)))
    headings = figure_headings(comparison, against)
    columns = _columns(headings, names=3, dropped=["tasks", comparison.runs[0].name])
    print_table(columns, _printable(figure_rows(comparison, against)), console)
    for title, tasks in changes(against):
        print_line(f"{title}:")
        print_table(_columns(changed_headings(comparison, against), names=3), _printable(changed_rows(tasks)), console)


def _columns(headings: Sequence[str], *, names: int, dropped: Sequence[str] = ()) -> list[Column]:
    """A column of texts, and others of numbers; the first `names` columns have headings or texts that wrap.

    The columns of the headings `dropped` are left out where the terminal is too narrow, in that order.
    """
    order = {heading: place for place, heading in enumerate(dropped)}
    return [
        Column(printable_line(heading), wraps=place < names, align_right=bool(place), drop_order=order.get(heading))
        for place, heading in enumerate(headings)
    ]


def _printable(rows: list[list[str]]) -> list[list[str]]:
    return [[printable_line(cell) for cell in row] for row in rows]
