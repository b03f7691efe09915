"""The lines of `metrics.jsonl`: one for each group of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from rollouts.cli.errors import CommandFileError
from rollouts.error_texts import short_repr
from rollouts.runner.group import Group


class StoredRow(NamedTuple):
    """A line of the file, as it is there, and its values."""

    line: bytes
    values: dict[str, Any]


class _Row(BaseModel):
    """The values of a line that the summary needs, and the task that it is of."""

    model_config = ConfigDict(strict=True)

    task_id: str
    rewards: list[float]
    reward_parts: dict[str, list[float]]
    attempts: list[int]
    done: int
    truncated: int
    failed: int
    errors: list[str]
    turns: int
    tokens: int
    sampled_tokens: int
    images: int


def group_row(group: Group) -> dict[str, Any]:
    """The line for a group."""
    episodes = group.episodes
    return {
        "task_id": group.task.task_id,
        "time": time.time(),
        "seconds": group.seconds,
        "rewards": group.rewards.tolist(),
        "reward_parts": {name: values.tolist() for name, values in group.reward_parts.items()},
        "attempts": list(group.attempts),
        "done": sum(episode.done for episode in episodes),
        "truncated": sum(episode.truncated for episode in episodes),
        "failed": group.num_failed,
        "errors": [episode.error for episode in episodes if episode.error],  # "KindOfError: text"
        "turns": sum(episode.num_turns for episode in episodes),
        "tokens": sum(len(node) for episode in episodes for node in episode.nodes),
        "sampled_tokens": sum(len(node.logprobs) for episode in episodes for node in episode.nodes),
        "images": sum(1 for episode in episodes for _ in episode.all_media()),
        "oldest_version": group.oldest_version,
    }


def read_group_rows(path: Path) -> Iterator[StoredRow]:
    """The lines of `metrics.jsonl`, none if there is no such file.

    Raises `CommandFileError` for a line that is not that of a group.
    """
    if not path.exists():
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            yield StoredRow(line, _values(path, number, line))


def _values(path: Path, number: int, line: bytes) -> dict[str, Any]:
    cure = "remove the line; --resume writes it anew from trajectories.mmr"
    try:
        values: dict[str, Any] = json.loads(line.decode("utf-8"))
        if not isinstance(values, dict):
            raise CommandFileError(path, f"no line of a run ({short_repr(values)}); {cure}", line=number)
        _Row.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise CommandFileError(path, f"no line of a run ({problem}); {cure}", line=number) from error
    except (ValueError, RecursionError) as error:
        raise CommandFileError(path, f"not JSON ({error}); {cure}", line=number) from error
    return values
