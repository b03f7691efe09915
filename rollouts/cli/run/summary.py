"""The summary of a run, from the lines of its `metrics.jsonl`: what earlier processes did is part of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rollouts.terminal.table import Column, print_table

_TOTALS = ("done", "truncated", "failed", "turns", "tokens", "sampled_tokens", "images")
_MOST_ERRORS = 10


def summarise(rows: Sequence[Mapping[str, Any]], *, complete: bool, seconds: float) -> dict[str, Any]:
    """Figures over all groups of the output directory.

    `complete`: every task of the source, up to the limit, has been delivered. `seconds` is the time of this process.
    Rewards are means over all episodes, failed ones included, and null without episodes. `errors` has the most frequent
    texts with their counts.
    """
    rewards = np.array([reward for row in rows for reward in row["rewards"]])
    parts = sorted({name for row in rows for name in row["reward_parts"]})
    errors = Counter(error for row in rows for error in row["errors"])
    return {
        "complete": complete,
        "seconds": seconds,
        "groups": len(rows),
        "episodes": len(rewards),
        **{name: sum(row[name] for row in rows) for name in _TOTALS},
        "attempts": sum(sum(row["attempts"]) for row in rows),
        "mean_reward": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else None,
        "reward_parts": {
            name: _mean(np.array([value for row in rows for value in row["reward_parts"].get(name, [])]))
            for name in parts
        },
        "errors": dict(errors.most_common(_MOST_ERRORS)),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table, and the errors below it."""
    names = [name for name in summary if name not in ("complete", "reward_parts", "errors")]
    rows = [[name.replace("_", " "), _figure(summary[name])] for name in names]
    rows += [[f"reward {name}", _figure(value)] for name, value in summary["reward_parts"].items()]
    print_table([Column("figure"), Column("value", align_right=True)], rows, console)
    if summary["errors"]:
        errors = [[f"{count:,}", text] for text, count in summary["errors"].items()]
        console.print()
        print_table([Column("episodes", align_right=True), Column("error", min_width=20)], errors, console)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
