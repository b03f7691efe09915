"""`rollouts compare RUN_A RUN_B...`: differences between stored runs, with intervals, as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from rollouts.files import replaced_file
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import print_line, printable_line

if TYPE_CHECKING:
    from rollouts.evaluation.comparison import Comparison
    from rollouts.evaluation.results import FailedEpisodes
    from rollouts.report.page import Table


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
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
) -> None:
    """Compare runs with the first one: differences by task with 95 % intervals and paired tests.

    What differs between the runs apart from their rewards is printed first. Without --json nothing is
    written; `rollouts report` writes the same as a page.
    """
    from rollouts.evaluation.comparing import compare_runs

    comparison = compare_runs(
        runs, threshold=threshold, failed=cast("FailedEpisodes | None", failed), k=k or None, unpaired=unpaired
    )
    if json_file == "-":
        sys.stdout.write(comparison.model_dump_json() + "\n")
    else:
        _print_comparison(comparison)
    if json_file not in (None, "-"):
        with replaced_file(Path(str(json_file))) as file:
            file.write(f"{comparison.model_dump_json(indent=2)}\n".encode("utf-8", "replace"))


def _print_comparison(comparison: Comparison) -> None:
    from rollouts.report.comparison import changes, counting_line, figure_table, note_lines, pairing_line, run_table

    console = Console()
    for note in note_lines(comparison):
        print_line(f"- {printable_line(note)}")
    print_line("")
    _print_table(run_table(comparison), console, names=1)
    print_line(counting_line(comparison))
    for against in comparison.against_baseline:
        print_line("")
        print_line(printable_line(pairing_line(comparison, against)))
        _print_table(figure_table(comparison, against), console, names=3, dropped=["tasks", comparison.runs[0].name])
        for table in changes(comparison, against):
            print_line(f"{table.label}:")
            _print_table(table, console, names=3)


def _print_table(table: Table, console: Console, *, names: int, dropped: Sequence[str] = ()) -> None:
    """Print a table: a column of texts, and others of numbers; the first `names` have headings or texts that wrap.

    The columns of the headings `dropped` are left out where the terminal is too narrow, in that order.
    """
    order = {heading: place for place, heading in enumerate(dropped)}
    columns = [
        Column(printable_line(heading), wraps=place < names, align_right=bool(place), drop_order=order.get(heading))
        for place, heading in enumerate(table.headings)
    ]
    print_table(columns, [[printable_line(str(cell)) for cell in row] for row in table.rows], console)
