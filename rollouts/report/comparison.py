"""A comparison of runs as sentences and tables, which `rollouts compare` prints and the page shows."""

from __future__ import annotations

from collections.abc import Iterator

from rollouts.evaluation.comparison import Comparison, RunDifference
from rollouts.evaluation.statistics import Difference, Estimate
from rollouts.report.page import Table
from rollouts.terminal.text import counted


def figure_table(comparison: Comparison, against: RunDifference) -> Table:
    """A row for each figure: its name, the values of baseline and run, and the difference."""
    compared = next(run for run in comparison.runs[1:] if run.name == against.name)
    baseline, run = (dict(one.estimates.labelled()) for one in (comparison.runs[0], compared))
    differences = dict(against.differences.labelled())
    headings = ["figure", comparison.runs[0].name, against.name, "difference", "95 % interval", "p", "tasks"]
    rows = [
        [label, _value(baseline.get(label)), _value(run.get(label)), *_difference_cells(differences.get(label))]
        for label in dict.fromkeys([*baseline, *run])
    ]
    return Table(title_of(comparison, against), headings, rows)


def run_table(comparison: Comparison) -> Table:
    """A row for each run."""
    rows = []
    for run in comparison.runs:
        low, high = run.samples
        complete = {True: "yes", False: "no", None: "not known"}[run.complete]
        samples = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        rows.append([run.name, f"{run.tasks:,}", samples, f"{run.episodes:,}", f"{run.failed:,}", complete])
    return Table("runs", ["run", "tasks", "samples", "episodes", "failed", "complete"], rows)


def title_of(comparison: Comparison, against: RunDifference) -> str:
    return f"{against.name} against {comparison.runs[0].name}"


def note_lines(comparison: Comparison) -> list[str]:
    """What a reader has to know before the numbers: of each run, and what else differs between it and the baseline."""
    of_runs = [f"{run.name}: {note}" for run in comparison.runs for note in run.notes]
    of_pairs = [f"{title_of(comparison, one)}: {note}" for one in comparison.against_baseline for note in one.notes]
    nothing = "Tasks, samples and configurations of the runs are the same, as far as they are known."
    return [*of_runs, *of_pairs] or [nothing]


def counting_line(comparison: Comparison) -> str:
    """How the figures are made: what is a success, and how failed episodes count."""
    counted_as = "counts as 0" if comparison.failed_episodes == "zero" else "does not count"
    return (
        f"An episode succeeds with a total reward of at least {comparison.threshold:g}; a failed one {counted_as}. "
        "Values are over all tasks of each run; intervals are clustered by task, and p-values are not corrected for "
        "the number of figures."
    )


def pairing_line(comparison: Comparison, against: RunDifference) -> str:
    """What the differences of a run are of."""
    names = f"{against.name} minus {comparison.runs[0].name}"
    if not against.paired:
        return f"Unpaired differences, {names}: of the means over all tasks of each run (Welch's t-test)."
    least = 2.0 ** (1 - against.shared_tasks)
    more = "where an interval excludes 0 and p is larger than you accept, more tasks are needed"
    few = f" The smallest p that so few tasks allow is {_number(least)}: {more}." if least >= 0.001 else ""
    return (
        f"Paired differences, {names}, over {counted(against.shared_tasks, 'shared task')}; the total reward is larger "
        f"in {against.increased:,}, smaller in {against.decreased:,}, equal in {against.equal:,}.{few}"
    )


def changes(comparison: Comparison, against: RunDifference) -> Iterator[Table]:
    """The tasks that changed most in each direction: id, mean total rewards, change."""
    headings = ["task", comparison.runs[0].name, against.name, "change"]
    for direction, tasks in (("increases", against.most_increased), ("decreases", against.most_decreased)):
        rows = [[one.task_id, *map(_number, (one.baseline, one.run)), _signed(one.run - one.baseline)] for one in tasks]
        if rows:
            yield Table(f"Largest {direction} of the total reward", headings, rows)


def _value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else _number(estimate.value)


def _difference_cells(found: Difference | None) -> list[str]:
    if found is None:
        return ["-", "-", "-", "0"]
    one, p = found.difference, found.p_value
    interval = "-" if one.low is None or one.high is None else f"{_signed(one.low)} to {_signed(one.high)}"
    p_text = "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return [_signed(one.value), interval, p_text, f"{one.tasks:,}"]


def _number(value: float) -> str:
    return f"{value:.3f}" if not value or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{_number(value)}"
