"""The list of episodes, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.cli.trajectory_file.episodes import Episode
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import printable_line

# The columns of counts, each with its place in the order in which a narrow table leaves columns out.
_COUNTS = {"turns": 4, "branches": 1, "tokens": 6, "sampled": 5, "images": 3}


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
    """How the episode ended: "error", "truncated", "done", or "-" if it has not ended."""
    if described["error"]:
        return "error"
    if described["truncated"]:
        return "truncated"
    return "done" if described["done"] else "-"


def print_episodes(described: Sequence[dict[str, Any]]) -> None:
    """Print a table of episodes, with totals below it; of the reward the mean."""
    totals = {name: f"{sum(one[name] for one in described):,}" for name in _COUNTS}
    groups = len({one["group"] for one in described})
    mean_reward = sum(one["reward"] for one in described) / max(len(described), 1)
    columns = [
        Column("#", align_right=True),
        Column("episode", f"{len(described):,} episodes", min_width=16),
        Column("group", f"{groups:,} groups", min_width=10, drop_order=2),
        *(Column(name, totals[name], align_right=True, drop_order=order) for name, order in _COUNTS.items()),
        Column("reward", f"{mean_reward:.4g}", align_right=True),
        Column("done", f"{sum(one['done'] for one in described):,}"),
    ]
    rows = (
        [
            str(one["number"]),
            printable_line(one["episode"]),
            printable_line(one["group"]) or "-",
            *(f"{one[name]:,}" for name in _COUNTS),
            f"{one['reward']:.4g}",
            ending(one),
        ]
        for one in described
    )
    print_table(columns, rows)
