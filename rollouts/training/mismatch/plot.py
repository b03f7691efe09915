"""A report of the mismatch as a figure of four plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from renderers.errors import MissingExtraError
from rollouts.training.mismatch.report import MismatchGroup, MismatchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Differences of 0 are drawn at this value, because the axis is logarithmic.
_SMALLEST = 1e-8


def plot_mismatch(report: MismatchReport, path: str | Path) -> None:
    """Write a figure of the report to `path`; its ending selects the format (PNG, SVG, PDF).

    Four plots: the trainer's against the sampler's log-probabilities, by modality; |difference| by position
    in the turn; the mean |difference| by turn, modality and version lag; the mean |difference| of the 12
    worst images. Raises `MissingExtraError` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plot_mismatch", "plot", "matplotlib") from error
    figure = Figure(figsize=(12, 9))
    FigureCanvasAgg(figure)
    (scatter, position), (groups, images) = figure.subplots(2, 2)
    _plot_scatter(scatter, report)
    _plot_positions(position, report)
    _plot_bars(groups, [*report.by_turn, *report.by_modality, *report.by_lag], "mean |difference| (nats)")
    worst = sorted(report.by_image, key=lambda group: -group.statistics.mean_abs)[:12]
    _plot_bars(images, worst, "mean |difference| after an image (nats)")
    figure.suptitle(f"{report!r:.100}".replace("<", "").replace(">", ""))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plot_scatter(axes: Axes, report: MismatchReport) -> None:
    compared = report.compared
    modality = compared.modality()
    for name, colour in {
        "text": "tab:blue",
        "image": "tab:orange",
        "video": "tab:green",
        "audio": "tab:purple",
    }.items():
        chosen = modality == name
        if chosen.any():
            axes.scatter(compared.sampler[chosen], compared.trainer[chosen], s=4, color=colour, label=name)
    finite = compared.sampler[np.isfinite(compared.sampler)]
    lowest = float(finite.min(initial=-1.0))
    axes.plot([lowest, 0], [lowest, 0], color="0.7", linewidth=1)
    axes.set(xlabel="log p(sampler)", ylabel="log p(trainer)")
    if report.tokens:
        axes.legend(loc="upper left")


def _plot_positions(axes: Axes, report: MismatchReport) -> None:
    compared = report.compared
    finite = np.isfinite(compared.difference)
    absolute = np.maximum(np.abs(compared.difference[finite]), _SMALLEST)
    axes.scatter(compared.turn_position[finite], absolute, s=4, color="0.6")
    axes.set(yscale="log", xlabel="position in the turn", ylabel="|difference| (nats)")


def _plot_bars(axes: Axes, groups: list[MismatchGroup], label: str) -> None:
    labels = [f"{group.label:.12}" for group in groups]
    values: Any = [min(max(group.statistics.mean_abs, _SMALLEST), 1e6) for group in groups]
    axes.barh(range(len(groups)), values, color="0.6")
    axes.set_yticks(range(len(groups)), labels)
    axes.set(xscale="log", xlabel=label)
    axes.invert_yaxis()
