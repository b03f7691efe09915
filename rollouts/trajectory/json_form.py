"""An episode as JSON values, with all tokens, messages and rewards. Media are entries that the caller makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollouts.trajectory.plain_json import plain, short_float
from rollouts.trajectory.token_node import TokenNode, Turn
from rollouts.trajectory.tree import Trajectory

#: The JSON values of the media of a node, in prompt order.
MediaEntries = Callable[[TokenNode], list[dict[str, Any]]]


def trajectory_json(trajectory: Trajectory, media_entries: MediaEntries) -> dict[str, Any]:
    """The episode as lists, dicts, text, numbers, booleans and None. Raises `NoJsonFormError`."""
    return {
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
        "nodes": [_node(node, media_entries) for node in trajectory.nodes],
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def _node(node: TokenNode, media_entries: MediaEntries) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "token_ids": node.token_ids.tolist(),
        "sampled": node.sampled.astype(int).tolist(),
        "content": None if node.content is None else node.content.astype(int).tolist(),
        "logprobs": [short_float(value) for value in node.logprobs],
        "weight_spans": [[span.version, span.start, span.end] for span in node.weight_spans],
        "media": media_entries(node),
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
