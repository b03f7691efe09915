"""The series of a report: figures of episodes in the order of the file, of steps, and of time."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from rollouts.observability.group_metrics import GroupMetrics
from rollouts.report.charts import Chart, Line
from rollouts.report.figures import EpisodeFigures
from rollouts.values import mean_and_spread

_POINTS: Final = 48
_MAX_METRIC_CHARTS: Final = 8


def episode_charts(episodes: Sequence[EpisodeFigures], *, rewarded: bool = True) -> list[Chart]:
    """Curves over the episodes in the order of the file; each point is the mean over a share of them.

    `rewarded`: whether the episodes have rewards. A failed episode has none: an engine that fails is no fall of them.
    """
    if not episodes:
        return []
    rewards = [math.nan if episode.failed else episode.environment_reward for episode in episodes]
    series: dict[str, dict[str, Sequence[float]]] = {
        **({"Environment reward": {"mean without failed episodes": rewards}} if rewarded else {}),
        "Length": {"sampled tokens per episode": [episode.sampled for episode in episodes]},
        "Turns": {"turns per episode": [episode.turns for episode in episodes]},
    }
    if any(math.isfinite(episode.entropy) for episode in episodes):
        series["Entropy"] = {"nats per sampled token": [episode.entropy for episode in episodes]}
    else:
        label = "mean negative log-probability of the sampled tokens, nats"
        series["Entropy, estimated"] = {label: [episode.surprisal for episode in episodes]}
    if any(episode.ending in ("error", "truncated") for episode in episodes):
        series["Failed and truncated"] = {
            label: [float(episode.ending == ending) for episode in episodes]
            for ending, label in (("error", "share failed"), ("truncated", "share truncated"))
        }
    for name in list(dict.fromkeys(name for episode in episodes for name in episode.metrics))[:_MAX_METRIC_CHARTS]:
        series[f"Metric {name}"] = {name: [episode.metrics.get(name, math.nan) for episode in episodes]}
    numbers = [episode.number for episode in episodes]
    return [_binned(title, "episode", numbers, lines) for title, lines in series.items()]


def group_charts(groups: Sequence[GroupMetrics]) -> list[Chart]:
    """Curves over the groups: total and group rewards, where a group has any, and each part of the rewards."""
    columns: dict[str, list[Sequence[float]]] = {}
    if any(reward for group in groups for reward in group.group_rewards):
        columns["Total reward"] = [group.total_rewards for group in groups]
        columns["Group reward"] = [group.group_rewards for group in groups]
    for name in list(dict.fromkeys(name for group in groups for name in group.reward_parts))[:_MAX_METRIC_CHARTS]:
        columns[f"Reward part {name}"] = [group.reward_parts.get(name, ()) for group in groups]
    numbers = range(1, len(groups) + 1)
    return [
        _binned(title, "group", numbers, {"mean": [mean_and_spread(of_group).mean for of_group in rewards]})
        for title, rewards in columns.items()
    ]


def training_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """A curve for each figure of a trainer, at most 24. Of a figure given twice for a step the last counts."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row["metrics"])
    ordered = sorted(steps)
    names = dict.fromkeys(name for step in ordered for name in steps[step])
    charts = []
    for name in list(names)[:24]:
        kept = _thinned([step for step in ordered if name in steps[step]])
        ys = [float(steps[step][name]) for step in kept]
        charts.append(Chart(name.replace("_", " "), "step", kept, [Line(name, ys)]))
    return charts


def runner_charts(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Mapping[str, str]]) -> list[Chart]:
    """Charts of the runner's metrics over time: for each title, the label of each metric in it that occurs."""
    if not rows:
        return []
    kept = _thinned(sorted(rows, key=lambda row: row["time"]))
    unit, factor = _unit(kept[-1]["time"] - kept[0]["time"])
    xs = [(row["time"] - kept[0]["time"]) / factor for row in kept]
    charts = []
    for title, labels in groups.items():
        lines = [
            Line(label, [float(row["metrics"].get(name, math.nan)) for row in kept])
            for name, label in labels.items()
            if any(name in row["metrics"] for row in kept)
        ]
        if lines:
            charts.append(Chart(title, f"{unit} since the first reading", xs, lines))
    return charts


def _binned(title: str, noun: str, numbers: Sequence[int], lines: Mapping[str, Sequence[float]]) -> Chart:
    """At most 48 points, each the mean of the finite values of about as many items; NaN where there are none."""
    edges = np.linspace(0, len(numbers), min(len(numbers), _POINTS) + 1).round().astype(int).tolist()
    shares = list(pairwise(edges))
    ends = [(numbers[first], numbers[end - 1]) for first, end in shares]
    names = [f"{noun} {first}" if first == last else f"{noun}s {first} to {last}" for first, last in ends]
    means = [
        Line(label, [mean_and_spread(values[first:end]).mean for first, end in shares])
        for label, values in lines.items()
    ]
    note = next(iter(lines)) if len(lines) == 1 else ""
    return Chart(title, noun, [last for _, last in ends], means, names, note)


def _thinned(entries: Sequence[Any]) -> list[Any]:
    """At most twice 48 of the entries, at equal distances, with the first and the last."""
    if len(entries) <= 2 * _POINTS:
        return list(entries)
    return [entries[int(at)] for at in np.linspace(0, len(entries) - 1, 2 * _POINTS)]


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
