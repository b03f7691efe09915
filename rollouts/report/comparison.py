"""A comparison of runs: as tables of texts, as Markdown with links to the reports of the runs, and as a plot."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import numpy as np

from rollouts.errors import CommandFileError, MissingExtraError
from rollouts.evaluation.comparison import ChangedTask, Comparison, RunDifference
from rollouts.evaluation.statistics import Difference, Estimate
from rollouts.files import replaced_file
from rollouts.report.write import REPORT_FILE, VIEWER_FILE
from rollouts.terminal.table import counted, printable_line, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The texts of a comparison, for the console, Markdown and HTML.


def figure_headings(comparison: Comparison, against: RunDifference) -> list[str]:
    """The headings of `figure_rows`."""
    return ["figure", comparison.runs[0].name, against.name, "difference", "95 % interval", "p", "tasks"]


def figure_rows(comparison: Comparison, against: RunDifference) -> list[list[str]]:
    """A row for each figure: its name, the values of baseline and run, and the difference."""
    compared = next(run for run in comparison.runs[1:] if run.name == against.name)
    baseline, run = (dict(one.estimates.labelled()) for one in (comparison.runs[0], compared))
    differences = dict(against.differences.labelled())
    return [
        [label, _value(baseline.get(label)), _value(run.get(label)), *_difference_cells(differences.get(label))]
        for label in dict.fromkeys([*baseline, *run])
    ]


def run_rows(comparison: Comparison) -> list[list[str]]:
    """A row for each run, with the cells of `RUN_HEADINGS`."""
    rows = []
    for run in comparison.runs:
        low, high = run.samples
        complete = {True: "yes", False: "no", None: "not known"}[run.complete]
        samples = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        rows.append([run.name, f"{run.tasks:,}", samples, f"{run.episodes:,}", f"{run.failed:,}", complete])
    return rows


RUN_HEADINGS: Final = ("run", "tasks", "samples", "episodes", "failed", "complete")


def note_lines(comparison: Comparison) -> list[str]:
    """What a reader has to know before the numbers: of each run, and what else differs between it and the baseline."""
    baseline = comparison.runs[0].name
    of_runs = [f"{run.name}: {note}" for run in comparison.runs for note in run.notes]
    of_pairs = [
        f"{against.name} against {baseline}: {note}"
        for against in comparison.against_baseline
        for note in against.notes
    ]
    return [*of_runs, *of_pairs] or [
        "Tasks, samples and configurations of the runs are the same, as far as they are known."
    ]


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
        return f"Unpaired differences, {names}: of the means over different tasks (Welch's t-test)."
    return (
        f"Paired differences, {names}, over {counted(against.shared_tasks, 'shared task')}; the total reward is larger "
        f"in {against.increased:,}, smaller in {against.decreased:,}, equal in {against.equal:,}."
    )


def changed_headings(comparison: Comparison, against: RunDifference) -> list[str]:
    """The headings of `changed_rows`."""
    return ["task", comparison.runs[0].name, against.name, "change"]


def changed_rows(tasks: Sequence[ChangedTask]) -> list[list[str]]:
    """A row for each task: its id, its mean total reward in baseline and run, and the change."""
    return [[one.task_id, *map(_number, (one.baseline, one.run)), _signed(one.run - one.baseline)] for one in tasks]


def changes(against: RunDifference) -> Iterator[tuple[str, Sequence[ChangedTask]]]:
    """The lists of changed tasks that are not empty, with their titles."""
    if against.most_increased:
        yield "Largest increases of the total reward", against.most_increased
    if against.most_decreased:
        yield "Largest decreases of the total reward", against.most_decreased


def _value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else _number(estimate.value)


def _difference_cells(found: Difference | None) -> list[str]:
    if found is None:
        return ["-", "-", "-", "0"]
    one, p = found.difference, found.p_value
    interval = "-" if one.low is None or one.high is None else f"{_signed(one.low)} to {_signed(one.high)}"
    return [
        _signed(one.value),
        interval,
        "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
        f"{one.tasks:,}",
    ]


def _number(value: float) -> str:
    return f"{value:.3f}" if not value or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{_number(value)}"


# Links from a file that compares runs to the reports and the viewers of the runs.


@dataclass(frozen=True, slots=True)
class RunLinks:
    """Addresses relative to a file. `report` and `viewer` are empty where the run has none.

    `episodes` maps a task to the number of its first episode on the page of the viewer.
    """

    report: str = ""
    viewer: str = ""
    episodes: Mapping[str, int] = field(default_factory=dict)

    def of_task(self, task_id: str) -> str:
        """The address of the task's first episode; empty where the page does not have it."""
        number = self.episodes.get(task_id)
        return "" if number is None or not self.viewer else f"{self.viewer}#e={number}"


def links_of_run(directory: Path, folder: Path) -> RunLinks:
    """The links from a file in `folder` to the report in the run's directory, and to the viewer's page beside it."""
    report, viewer = directory / REPORT_FILE, directory / VIEWER_FILE
    return RunLinks(
        _address(report, folder) if report.is_file() else "",
        _address(viewer, folder) if viewer.is_file() else "",
        _tasks_on_page(viewer),
    )


def _address(path: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix())


_INDEX: Final = re.compile(rb'<script type="application/json" id="index">(.*?)</script>', re.DOTALL)
_MOST_INDEX_BYTES: Final = 8 << 20


def _tasks_on_page(viewer: Path) -> dict[str, int]:
    """The first episode of each task on a page of the viewer; empty for another file."""
    try:
        with open(viewer, "rb") as file:
            found = _INDEX.search(file.read(_MOST_INDEX_BYTES))
        rows = json.loads(found[1])["episodes"] if found else []
        places = {str(row["group"]): int(row["number"]) for row in reversed(rows)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return places


# Markdown.


def comparison_markdown(comparison: Comparison, folder: Path) -> str:
    """The comparison as Markdown, for a file in `folder`: texts of the runs are no markup, links are relative."""
    links = {run.name: links_of_run(Path(run.directory), folder) for run in comparison.runs}
    baseline = comparison.runs[0]
    lines = [f"# {' and '.join(_plain(run.name) for run in comparison.runs[1:])} against {_plain(baseline.name)}", ""]
    lines += [f"- {_plain(note)}" for note in note_lines(comparison)]
    lines += ["", *_markdown_table(RUN_HEADINGS, run_rows(comparison)), "", _plain(counting_line(comparison)), ""]
    reports = [(run.name, links[run.name].report) for run in comparison.runs if links[run.name].report]
    lines += [*(f"- [report of {_plain(name)}]({address})" for name, address in reports), ""] if reports else []
    for against in comparison.against_baseline:
        lines += [f"## {_plain(against.name)} against {_plain(baseline.name)}", ""]
        lines += [_plain(pairing_line(comparison, against)), ""]
        lines += [*_markdown_table(figure_headings(comparison, against), figure_rows(comparison, against)), ""]
        for title, tasks in changes(against):
            cells = [[_plain(cell) for cell in row] for row in changed_rows(tasks)]
            for task, row in zip(tasks, cells, strict=True):
                for column, name in ((1, baseline.name), (2, against.name)):
                    if address := links[name].of_task(task.task_id):
                        row[column] = f"[{row[column]}]({address})"
            headings = changed_headings(comparison, against)
            lines += [f"### {title}", "", *_markdown_table(headings, cells, are_markdown=True), ""]
    return "\n".join(lines)


def _markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, are_markdown: bool = False
) -> Iterator[str]:
    yield f"| {' | '.join(map(_plain, headings))} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(row if are_markdown else map(_plain, row))} |"


_MARKUP: Final = re.compile(r"([\\`*_\[\]<>&|~$#])")


def _plain(text: str) -> str:
    """The text as one line of Markdown without markup."""
    return _MARKUP.sub(r"\\\1", printable_line(text))


# The plot: differences with their intervals, and the changes of all tasks.

_ENDINGS: Final = (".png", ".svg")
_MOST_FIGURES: Final = 24
_MOST_CHARACTERS: Final = 40


def check_plot(path: Path) -> None:
    """Raise `CommandFileError` for an ending other than .png and .svg, `MissingExtraError` without matplotlib."""
    if path.suffix.lower() not in _ENDINGS:
        raise CommandFileError(path, f"its ending is {path.suffix!r}; name a file with the ending .png or .svg")
    _figure_class()


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Write a figure with a row for each run against the baseline; the ending of `path` selects PNG or SVG.

    From left to right: the differences of rewards, those of pass@k, both with 95 % intervals, and the changes of the
    tasks' total rewards in ascending order. Raises as `check_plot`, and `OSError`.
    """
    check_plot(path)
    pairs = comparison.against_baseline
    labelled = [list(pair.differences.labelled())[:_MOST_FIGURES] for pair in pairs]
    heights = [max(3.0, 1.2 + 0.35 * len(rows)) for rows in labelled]
    figure = _figure_class()(figsize=(15, sum(heights)), layout="constrained")
    axes = figure.subplots(len(pairs), 3, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (rewards, rates, changes), pair, rows in zip(axes, pairs, labelled, strict=True):
        is_rate = [label.startswith("pass@") for label, _ in rows]
        _plot_intervals(rewards, [row for row, rate in zip(rows, is_rate, strict=True) if not rate])
        _plot_intervals(rates, [row for row, rate in zip(rows, is_rate, strict=True) if rate])
        rewards.set_title(_text(f"{pair.name} against {comparison.runs[0].name}"), loc="left")
        changes.axhline(0, color="0.6", linewidth=1)
        changes.plot(np.linspace(0, 100, len(pair.quantiles)), pair.quantiles, color="tab:blue")
        changes.set(xlabel="share of the tasks, %", ylabel="change of the total reward")
    with replaced_file(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names of tasks and rewards in a script that the font lacks
        figure.savefig(file, format=path.suffix.lower().removeprefix("."), dpi=120)


def _plot_intervals(axes: Axes, rows: Sequence[tuple[str, Difference]]) -> None:
    axes.axvline(0, color="0.6", linewidth=1)
    for place, (_, found) in enumerate(rows):
        one = found.difference
        if one.low is not None and one.high is not None:
            axes.plot([one.low, one.high], [place, place], color="tab:blue", linewidth=2)
        axes.plot(one.value, place, "o", color="tab:blue")
    axes.set_yticks(range(len(rows)), [_text(label) for label, _ in rows])
    axes.set(xlabel="difference, 95 % interval", ylim=(max(len(rows), 1) - 0.5, -0.5))


def _text(text: str) -> str:
    """One line in which no character begins a formula."""
    return printable_line(shortened(text, _MOST_CHARACTERS)).replace("$", r"\$")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a plot of a comparison", "plot", "matplotlib") from error
    return Figure
