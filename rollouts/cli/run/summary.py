"""The summary of a run, from the lines of its `metrics.jsonl`: what earlier processes did is part of it."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from rollouts.evaluation.task_scores import ErrorCounts
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable_line
from rollouts.values import mean_and_spread

_TOTALS = ("done", "truncated", "failed", "turns", "length_stops", "tokens", "sampled_tokens", "images", "sounds")
_SECONDS = ("episode_seconds", "engine_seconds")


def summarise(
    rows: Iterable[GroupMetrics], *, complete: bool, process_seconds: float, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Figures over all groups of the output directory.

    `complete`: every task of the source, up to the limit, has been run. `process_seconds`, the wall time of
    the command, and `metrics` are those of this process; the other figures are of earlier ones too.
    `episode_seconds` and `engine_seconds` are sums over the episodes, which run side by side. Rewards are
    means over all episodes, failed ones included, and null without episodes; rewards that are not finite
    (sums that overflow) are counted in `rewards_not_finite` and in no mean. `errors` has the most frequent
    kinds of errors, with the number of episodes and the first text of each, shortened to 1,000 characters. A
    run with a teacher also has `teacher_kl_mean`, over the scored episodes.
    """
    groups = attempts = 0
    totals = dict.fromkeys(_TOTALS, 0)
    seconds = dict.fromkeys(_SECONDS, 0.0)
    rewards: dict[str, array[float]] = {name: array("d") for name in ("total", "environment", "group")}
    parts: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    teacher_kl = array("d")
    errors = ErrorCounts()
    for row in rows:
        groups += 1
        attempts += sum(row.attempts)
        for name in _TOTALS:
            totals[name] += getattr(row, name)
        for name in _SECONDS:
            seconds[name] += getattr(row, name)
        for name, values in rewards.items():
            values.extend(getattr(row, f"{name}_rewards"))
        for name, part in row.reward_parts.items():
            parts[name].extend(part)
        teacher_kl.extend(value for value in row.teacher_kl or () if value is not None)
        errors.add(row.errors)
    found = {name: mean_and_spread(values) for name, values in rewards.items()}
    return {
        "complete": complete,
        "groups": groups,
        "episodes": len(rewards["total"]),
        **totals,
        "attempts": attempts,
        "process_seconds": process_seconds,
        **seconds,
        **{f"{name}_reward_mean": _known(reward.mean) for name, reward in found.items()},
        "total_reward_std": _known(found["total"].spread),
        "rewards_not_finite": found["total"].not_finite,
        **({"teacher_kl_mean": mean_and_spread(teacher_kl).mean} if teacher_kl else {}),
        "reward_parts": {name: _known(mean_and_spread(parts[name]).mean) for name in sorted(parts)},
        "errors": {kind: error.model_dump() for kind, error in errors.most_frequent().items()},
        "metrics": dict(metrics),
    }


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table, and the errors below it. Texts of environments and rewards are on one line each."""
    names = [name for name, value in summary.items() if name != "complete" and not isinstance(value, dict)]
    rows = [[name.replace("_", " "), _figure(summary[name])] for name in names]
    rows += [[f"reward part {printable_line(name)}", _figure(value)] for name, value in summary["reward_parts"].items()]
    for name, value in summary["metrics"].items():
        kind, _, reason = name.partition("/")
        if kind in ("groups_skipped", "groups_stale"):
            rows.append([f"{kind.replace('_', ' ')}: {printable_line(reason)}", _figure(int(value))])
    print_table([Column("figure", wraps=True), Column("value", align_right=True)], rows, console)
    if warning := length_stops_warning(summary["length_stops"], summary["turns"]):
        console.print()
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    if summary["errors"]:
        errors = [[f"{error['episodes']:,}", printable_line(error["example"])] for error in summary["errors"].values()]
        console.print()
        print_table([Column("episodes", align_right=True), Column("first error", wraps=True)], errors, console)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
