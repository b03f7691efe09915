"""Plots a comparison of runs with matplotlib: differences with their intervals, and the changes of all tasks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollouts.errors import CommandFileError, MissingExtraError
from rollouts.evaluation.comparison import Comparison
from rollouts.evaluation.statistics import Difference
from rollouts.files import replaced_file
from rollouts.terminal.table import printable_line, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
