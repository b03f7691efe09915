"""Writes episodes as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollouts.cli.traj.media_files import MediaFiles
from rollouts.cli.traj.plain import plain, short_float
from rollouts.cli.trajectory_file.episodes import Episode
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Turn


def write_jsonl(lines: Iterable[str], path: Path) -> int:
    """Write the lines of episodes to the new file `path`; returns their number. Raises `OSError`."""
    written = 0
    with path.open("w", encoding="ascii") as file:
        for line in lines:
            file.write(line)
            written += 1
    return written


def json_line(episode: Episode, files: MediaFiles) -> str:
    """One episode on one line, ASCII, with a line feed. Raises `NoJsonFormError`."""
    trajectory = episode.trajectory
    entry = {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "reward": short_float(trajectory.reward),
        "done": trajectory.done,
        "truncated": trajectory.truncated,
        "truncation_reason": trajectory.truncation_reason,
        "error": trajectory.error,
        "metrics": plain(trajectory.metrics),
        "started_at": short_float(trajectory.started_at),
        "seconds": short_float(trajectory.seconds),
        "provenance": plain(trajectory.provenance),
        "nodes": [_node(node, files) for node in trajectory.nodes],
        "turns": [_turn(turn) for turn in trajectory.turns],
    }
    return json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n"


def _node(node: TokenNode, files: MediaFiles) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "token_ids": node.token_ids.tolist(),
        "sampled": node.sampled.astype(int).tolist(),
        "content": None if node.content is None else node.content.astype(int).tolist(),
        "logprobs": [short_float(value) for value in node.logprobs],
        "weight_spans": [[span.version, span.start, span.end] for span in node.weight_spans],
        "media": files.entries(node),
        "messages": plain(node.messages),
        "extras": plain(node.extras),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "node": turn.node,
        "finish_reason": turn.finish_reason.value,
        "message": plain(turn.message),
        "reward": short_float(turn.reward),
        "info": plain(turn.info),
        "seconds": short_float(turn.seconds),
        "agent": turn.agent,
    }
