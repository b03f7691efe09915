"""Episodes as a table and as data: one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rollouts.cli.terminal import one_line
from rollouts.cli.trajectory_file.episodes import Episode

_COUNTS = ("turns", "branches", "tokens", "sampled", "images")


def describe_episode(episode: Episode) -> dict[str, Any]:
    """Plain data. `tokens` counts each node once, however many branches share it; `images` are distinct sources."""
    trajectory = episode.trajectory
    return {
        "number": episode.number,
        "episode": trajectory.episode_id,
        "group": trajectory.group_id,
        "turns": len(trajectory.turns),
        "branches": len(trajectory.leaves()),
        "tokens": sum(map(len, trajectory.nodes)),
        "sampled": sum(len(node.logprobs) for node in trajectory.nodes),
        "images": len({reference.source.digest for reference in trajectory.all_media()}),
        "reward": trajectory.reward,
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "error": trajectory.error,
    }


def ending(described: dict[str, Any]) -> str:
    """error, truncated, done, or neither: the episode was not ended."""
    if described["error"]:
        return "error"
    if described["truncated"]:
        return "truncated"
    return "done" if described["done"] else "-"


def episode_table(described: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", footer_style="", show_footer=True)
    table.add_column("#", justify="right")
    table.add_column("episode", f"{len(described):,} episodes")
    table.add_column("group", f"{len({one['group'] for one in described}):,}")
    for name in _COUNTS:
        table.add_column(name, f"{sum(one[name] for one in described):,}", justify="right")
    mean = sum(one["reward"] for one in described) / max(len(described), 1)
    table.add_column("reward", f"{mean:.4g}", justify="right")
    table.add_column("done", f"{sum(one['done'] for one in described):,}")
    for one in described:
        # Names come from the file: nothing in them is markup.
        names = [one_line(one["episode"]), one_line(one["group"]) or "-"]
        counts = [f"{one[name]:,}" for name in _COUNTS]
        table.add_row(*map(Text, [str(one["number"]), *names, *counts, f"{one['reward']:.4g}", ending(one)]))
    return table
