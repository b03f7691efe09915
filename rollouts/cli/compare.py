"""`rollouts compare RUN_A RUN_B...`: differences between stored runs, with intervals, as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from rollouts.files import replaced_file
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import counted, print_line, printable_line

if TYPE_CHECKING:
    from rollouts.evaluation.comparison import ComparedRun, Comparison, RunDifference
    from rollouts.evaluation.results import FailedEpisodes


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
    written.
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
    """What a reader has to know before the numbers, the runs, and each of them against the baseline."""
    console = Console()
    baseline = comparison.runs[0].name
    notes = [f"{run.name}: {note}" for run in comparison.runs for note in run.notes]
    notes += [f"{one.name} against {baseline}: {note}" for one in comparison.against_baseline for note in one.notes]
    for note in notes or ["Tasks, samples and configurations of the runs are the same, as far as they are known."]:
        print_line(f"- {printable_line(note)}")
    print_line("")
    _print_table(["run", "tasks", "samples", "episodes", "failed", "complete"], map(_run_row, comparison.runs), console)
    counted_as = "counts as 0" if comparison.failed_episodes == "zero" else "does not count"
    print_line(
        f"An episode succeeds with a total reward of at least {comparison.threshold:g}; a failed one {counted_as}. "
        "Values are over all tasks of each run; intervals are clustered by task, and p-values are not corrected for "
        "the number of figures."
    )
    for run, against in zip(comparison.runs[1:], comparison.against_baseline, strict=True):
        print_line("")
        print_line(printable_line(_pairing_line(against, baseline)))
        headings = ["figure", baseline, against.name, "difference", "95 % interval", "p", "tasks"]
        rows = _figure_rows(comparison.runs[0], run, against)
        _print_table(headings, rows, console, names=3, dropped=["tasks", baseline])
        for direction, tasks in (("increases", against.most_increased), ("decreases", against.most_decreased)):
            if tasks:
                print_line(f"Largest {direction} of the total reward:")
                headings = ["task", baseline, against.name, "change"]
                changed = [
                    [one.task_id, _number(one.baseline), _number(one.run), _signed(one.run - one.baseline)]
                    for one in tasks
                ]
                _print_table(headings, changed, console, names=3)


def _run_row(run: ComparedRun) -> list[str]:
    low, high = run.samples
    complete = {True: "yes", False: "no", None: "not known"}[run.complete]
    samples = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return [run.name, f"{run.tasks:,}", samples, f"{run.episodes:,}", f"{run.failed:,}", complete]


def _pairing_line(against: RunDifference, baseline: str) -> str:
    """What the differences of a run are of."""
    names = f"{against.name} minus {baseline}"
    if not against.paired:
        return f"Unpaired differences, {names}: of the means over all tasks of each run (Welch's t-test)."
    least = 2.0 ** (1 - against.shared_tasks)
    more = "where an interval excludes 0 and p is larger than you accept, more tasks are needed"
    few = f" The smallest p that so few tasks allow is {_number(least)}: {more}." if least >= 0.001 else ""
    return (
        f"Paired differences, {names}, over {counted(against.shared_tasks, 'shared task')}; the total reward is larger "
        f"in {against.increased:,}, smaller in {against.decreased:,}, equal in {against.equal:,}.{few}"
    )


def _figure_rows(baseline: ComparedRun, run: ComparedRun, against: RunDifference) -> Iterator[list[str]]:
    """A row for each figure: its name, the values of baseline and run, and the difference."""
    values = [dict(one.estimates.labelled()) for one in (baseline, run)]
    differences = dict(against.differences.labelled())
    for label in dict.fromkeys([*values[0], *values[1]]):
        cells = [_number(one[label].value) if label in one else "-" for one in values]
        if (found := differences.get(label)) is None:
            yield [label, *cells, "-", "-", "-", "0"]
            continue
        one, p = found.difference, found.p_value
        interval = "-" if one.low is None or one.high is None else f"{_signed(one.low)} to {_signed(one.high)}"
        p_text = "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
        yield [label, *cells, _signed(one.value), interval, p_text, f"{one.tasks:,}"]


def _number(value: float) -> str:
    return f"{value:.3f}" if not value or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{_number(value)}"


def _print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    console: Console,
    *,
    names: int = 1,
    dropped: Sequence[str] = (),
) -> None:
    """Print a table. Where the terminal is too narrow, the columns `dropped` are left out, in that order."""
    order = {heading: place for place, heading in enumerate(dropped)}
    columns = [
        Column(printable_line(heading), wraps=place < names, align_right=bool(place), drop_order=order.get(heading))
        for place, heading in enumerate(headings)
    ]
    print_table(columns, [list(map(printable_line, row)) for row in rows], console)
