"""The summary of a run, from the lines of its `metrics.jsonl`: what earlier processes did is part of it."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rollouts.numbers import mean_and_spread
from rollouts.replaced_file import replaced_file
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable_line, shortened

_TOTALS = ("done", "truncated", "failed", "turns", "tokens", "sampled_tokens", "images")
_MOST_ERRORS = 10
_MOST_ERROR_CHARACTERS = 1000  # an error may quote a whole message; the episode has all of it
_MOST_WITHOUT_EXPONENT = 1e12


def summarise(
    rows: Iterable[Mapping[str, Any]], *, complete: bool, seconds: float, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Figures over all groups of the output directory.

    `complete`: every task of the source, up to the limit, has been run. `seconds` and `metrics` are those of this
    process. Rewards are means over all episodes, failed ones included, and null without episodes; rewards that are not
    finite (sums that overflow) are counted in `rewards_not_finite` and in no mean. `errors` has the most frequent
    kinds of errors, with the number of episodes and the first text of each, shortened to 1,000 characters.
    """
    groups = attempts = 0
    totals = dict.fromkeys(_TOTALS, 0)
    rewards = array("d")
    parts: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row in rows:
        groups += 1
        attempts += sum(row["attempts"])
        for name in _TOTALS:
            totals[name] += row[name]
        rewards.extend(row["rewards"])
        for name, values in row["reward_parts"].items():
            parts[name].extend(values)
        for text in row["errors"]:
            kind = text.partition(":")[0]
            errors[kind] += 1
            examples.setdefault(kind, shortened(text, _MOST_ERROR_CHARACTERS))
    reward = mean_and_spread(rewards)
    return {
        "complete": complete,
        "seconds": seconds,
        "groups": groups,
        "episodes": len(rewards),
        **totals,
        "attempts": attempts,
        "reward_mean": _known(reward.mean),
        "reward_std": _known(reward.spread),
        "rewards_not_finite": reward.not_finite,
        "reward_parts": {name: _known(mean_and_spread(parts[name]).mean) for name in sorted(parts)},
        "errors": {
            kind: {"episodes": count, "example": examples[kind]} for kind, count in errors.most_common(_MOST_ERRORS)
        },
        "metrics": dict(metrics),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary to `path`, whose earlier content stays until the new one is complete. Raises `OSError`."""
    with replaced_file(path) as file:
        file.write((json.dumps(summary, indent=2) + "\n").encode())


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table, and the errors below it. Texts of environments and rewards are on one line each."""
    names = [name for name, value in summary.items() if name != "complete" and not isinstance(value, dict)]
    rows = [[name.replace("_", " "), _figure(summary[name])] for name in names]
    rows += [[f"reward {printable_line(name)}", _figure(value)] for name, value in summary["reward_parts"].items()]
    for name, value in summary["metrics"].items():
        kind, _, reason = name.partition("/")
        if kind in ("groups_skipped", "groups_stale"):
            rows.append([f"{kind.replace('_', ' ')}: {printable_line(reason)}", _figure(int(value))])
    print_table([Column("figure", min_width=20), Column("value", align_right=True)], rows, console)
    if summary["errors"]:
        errors = [[f"{error['episodes']:,}", printable_line(error["example"])] for error in summary["errors"].values()]
        console.print()
        print_table([Column("episodes", align_right=True), Column("first error", min_width=20)], errors, console)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < _MOST_WITHOUT_EXPONENT else f"{value:.4g}"
    return f"{value:,}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
