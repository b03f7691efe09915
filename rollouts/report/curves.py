"""The series of a report: figures of episodes in the order of the file, of steps, and of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from rollouts.observability.group_metrics import GroupMetrics
from rollouts.report.charts import Chart, Line
from rollouts.report.figures import EpisodeFigures
from rollouts.values import mean_and_spread

_POINTS: Final = 48
_MAX_TRAINING_CHARTS: Final = 16
_MAX_METRIC_CHARTS: Final = 8
_EPISODE: Final = "episode"
#: A time that no clock shows, 31,000 years after 1970, is not known.
_MOST_SECONDS: Final = 1e12


class _Bin(NamedTuple):
    """Episodes `first` to `last` of the report, counted from 0."""

    first: int
    last: int


def episode_charts(episodes: Sequence[EpisodeFigures], *, rewarded: bool = True) -> list[Chart]:
    """Curves over the episodes in the order of the file; each point is the mean over a share of them.

    `rewarded`: whether the episodes have rewards.
    """
    if not episodes:
        return []
    bins = _bins(len(episodes))
    rewards = _mean_chart("Environment reward", "mean without failed episodes", episodes, bins, _reward)
    charts = [
        *([rewards] if rewarded else []),
        _mean_chart("Length", "sampled tokens per episode", episodes, bins, lambda episode: episode.sampled),
        _mean_chart("Turns", "turns per episode", episodes, bins, lambda episode: episode.turns),
        _entropy_chart(episodes, bins),
    ]
    if any(episode.ending in ("error", "truncated") for episode in episodes):
        charts.append(_endings_chart(episodes, bins))
    names = dict.fromkeys(name for episode in episodes for name in episode.metrics)
    for name in list(names)[:_MAX_METRIC_CHARTS]:
        values = [episode.metrics.get(name, float("nan")) for episode in episodes]
        charts.append(_chart(f"Metric {name}", "", episodes, bins, [Line(name, _means(values, bins))]))
    return charts


def group_charts(groups: Sequence[GroupMetrics]) -> list[Chart]:
    """Curves over the groups: total and group rewards, where a group has any, and each part of the rewards."""
    columns: dict[str, list[Sequence[float]]] = {}
    if any(reward for group in groups for reward in group.group_rewards):
        columns["Total reward"] = [group.total_rewards for group in groups]
        columns["Group reward"] = [group.group_rewards for group in groups]
    for name in list(dict.fromkeys(name for group in groups for name in group.reward_parts))[:_MAX_METRIC_CHARTS]:
        columns[f"Reward part {name}"] = [group.reward_parts.get(name, ()) for group in groups]
    bins = _bins(len(groups))
    charts = []
    for title, rewards in columns.items():
        means = [mean_and_spread(chain.from_iterable(rewards[each.first : each.last + 1])).mean for each in bins]
        ends = [each.last + 1 for each in bins]
        labels = [f"groups {each.first + 1} to {each.last + 1}" for each in bins]
        charts.append(Chart(title, "group", ends, [Line("mean", means)], labels, "mean"))
    return charts


def training_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """A curve for each figure of a trainer, at most 16. Of a figure given twice for a step the last counts."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row["metrics"])
    ordered = sorted(steps)
    names = dict.fromkeys(name for step in ordered for name in steps[step])
    charts = []
    for name in list(names)[:_MAX_TRAINING_CHARTS]:
        own = [step for step in ordered if name in steps[step]]
        kept = _thinned(own)
        ys = [float(steps[step][name]) for step in kept]
        charts.append(Chart(name.replace("_", " "), "step", kept, [Line(name, ys)]))
    return charts


def throughput_charts(episodes: Sequence[EpisodeFigures]) -> list[Chart]:
    """Turns and sampled tokens a second over time; those of an episode count evenly over its duration."""
    timed = [episode for episode in episodes if 0 < episode.started_at < _MOST_SECONDS > episode.seconds]
    if not timed:
        return []
    starts = np.array([episode.started_at for episode in timed])
    ends = starts + np.array([max(episode.seconds, 1e-3) for episode in timed])
    edges = np.linspace(starts.min(), ends.max(), min(_POINTS, max(len(timed), 2)) + 1)
    middles = ((edges[:-1] + edges[1:]) / 2 - edges[0]).tolist()
    unit, factor = _unit(edges[-1] - edges[0])
    names = [f"{(a - edges[0]) / factor:.1f} to {(b - edges[0]) / factor:.1f} {unit}" for a, b in pairwise(edges)]
    charts = []
    for title, label, amounts in (
        ("Turns a second", "turns a second", [episode.turns for episode in timed]),
        ("Tokens a second", "sampled tokens a second", [episode.sampled for episode in timed]),
    ):
        until = [
            float(np.sum(np.clip((edge - starts) / (ends - starts), 0, 1) * np.asarray(amounts))) for edge in edges
        ]
        rates = (np.diff(until) / np.diff(edges)).tolist()
        xs = [middle / factor for middle in middles]
        charts.append(Chart(title, f"{unit} since the first episode began", xs, [Line(label, rates)], names))
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
            Line(label, [float(row["metrics"].get(name, float("nan"))) for row in kept])
            for name, label in labels.items()
            if any(name in row["metrics"] for row in kept)
        ]
        if lines:
            charts.append(Chart(title, f"{unit} since the first reading", xs, lines))
    return charts


def _mean_chart(
    title: str,
    label: str,
    episodes: Sequence[EpisodeFigures],
    bins: Sequence[_Bin],
    value: Callable[[EpisodeFigures], float],
) -> Chart:
    return _chart(title, label, episodes, bins, [Line(label, _means(map(value, episodes), bins))])


def _reward(episode: EpisodeFigures) -> float:
    """NaN for a failed episode: an engine that fails is no fall of the reward."""
    return float("nan") if episode.failed else episode.environment_reward


def _entropy_chart(episodes: Sequence[EpisodeFigures], bins: Sequence[_Bin]) -> Chart:
    """The mean entropy of the sampled tokens, or its estimate where the engine does not report it."""
    if any(episode.entropy_tokens for episode in episodes):
        ys = _ratios([e.entropy for e in episodes], [e.entropy_tokens for e in episodes], bins)
        return _chart("Entropy", "nats per sampled token", episodes, bins, [Line("entropy", ys)])
    ys = _ratios([e.surprisal for e in episodes], [e.sampled for e in episodes], bins)
    note = "nats per sampled token, estimated as the mean negative log-probability of the sampled tokens"
    return _chart("Entropy, estimated", note, episodes, bins, [Line("estimated entropy", ys)])


def _endings_chart(episodes: Sequence[EpisodeFigures], bins: Sequence[_Bin]) -> Chart:
    lines = [
        Line(label, _means([float(episode.ending == ending) for episode in episodes], bins))
        for ending, label in (("error", "failed"), ("truncated", "truncated"))
    ]
    return _chart("Failed and truncated", "share of the episodes", episodes, bins, lines)


def _chart(
    title: str, note: str, episodes: Sequence[EpisodeFigures], bins: Sequence[_Bin], lines: Sequence[Line]
) -> Chart:
    xs = [float(episodes[each.last].number) for each in bins]
    names = [
        f"episodes {episodes[each.first].number} to {episodes[each.last].number}"
        if each.first < each.last
        else f"episode {episodes[each.first].number}"
        for each in bins
    ]
    return Chart(title, _EPISODE, xs, lines, names, note)


def _bins(count: int) -> list[_Bin]:
    """At most 48 runs of about equal length."""
    edges = np.linspace(0, count, min(count, _POINTS) + 1).round().astype(int).tolist()
    return [_Bin(first, end - 1) for first, end in pairwise(edges)]


def _means(values: Iterable[float], bins: Sequence[_Bin]) -> list[float]:
    """The mean of the finite values of each bin; NaN where there are none."""
    array = np.fromiter(values, np.float64)
    return [mean_and_spread(array[each.first : each.last + 1]).mean for each in bins]


@np.errstate(over="ignore", invalid="ignore")  # a sum that is not finite is a gap of the curve, which says so
def _ratios(sums: Sequence[float], counts: Sequence[int], bins: Sequence[_Bin]) -> list[float]:
    totals = [float(np.sum(np.asarray(sums, np.float64)[each.first : each.last + 1])) for each in bins]
    numbers = [float(np.sum(np.asarray(counts, np.float64)[each.first : each.last + 1])) for each in bins]
    return [total / number if number else float("nan") for total, number in zip(totals, numbers, strict=True)]


def _thinned(entries: Sequence[Any]) -> list[Any]:
    """At most twice 48 of the entries, at equal distances, with the first and the last."""
    if len(entries) <= 2 * _POINTS:
        return list(entries)
    return [entries[int(at)] for at in np.linspace(0, len(entries) - 1, 2 * _POINTS)]


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
