"""The files to which the groups of a run are written as they are delivered."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollouts.cli.errors import CommandFileError
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.runner.group import Group
from transport import FileDeletedError, RecordReader, RecordWriter


class GroupFiles:
    """Writes each group once: its episodes as one record of `trajectories.mmr`, and a line of `metrics.jsonl`.

    A run that was killed may deliver its last group again, because it was written and not yet recorded as delivered.
    What the files have of it is not written a second time. An incomplete last line is cut off.
    """

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        self._last_episodes = _last_episodes(output.trajectories)
        self._last_task = _cut_incomplete_line(output.metrics)
        with _named(output.trajectories):
            self._trajectories = RecordWriter(output.trajectories)
        with _named(output.metrics):
            self._metrics = open(output.metrics, "a", encoding="utf-8")  # noqa: SIM115  `__exit__` closes it

    def write(self, group: Group) -> None:
        """Write a group. The operating system has all of it when this returns.

        Raises `CommandFileError` where the system refuses to write, as when the disk is full.
        """
        episode_ids = [episode.episode_id for episode in group.episodes]
        if episode_ids != self._last_episodes:
            with _named(self._output.trajectories):
                self._trajectories.append(list(group.episodes))
        if group.task.task_id != self._last_task:
            with _named(self._output.metrics):
                self._metrics.write(json.dumps(group_row(group)) + "\n")
                self._metrics.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # `write` has raised it: the last line is written again
            self._metrics.close()
        with _named(self._output.trajectories):
            self._trajectories.close()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an error of the system, or of a file that was deleted, into one that names the file and the cure."""
    try:
        yield
    except (OSError, FileDeletedError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it was deleted during the run"
        cure = "correct the cause, and continue with --resume"
        raise CommandFileError(path, f"cannot be written: {reason}; {cure}") from error


def group_row(group: Group) -> dict[str, Any]:
    """The line of `metrics.jsonl` for a group."""
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


def read_group_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, none if there is no such file.

    Raises `CommandFileError` for a line that is not JSON.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CommandFileError(path, f"not JSON ({error}); remove the line", line=number) from error


def _last_episodes(path: Path) -> list[str] | None:
    """The ids of the episodes of the last record; None if there is none."""
    if not path.exists():
        return None
    with RecordReader(path) as reader:
        return [episode.episode_id for episode in reader[len(reader) - 1]] if len(reader) else None


def _cut_incomplete_line(path: Path) -> str | None:
    """Cut off what stands after the last line feed; return the task of the last line, None if there is none."""
    if not path.exists():
        return None
    end = number = 0
    last = b""
    with open(path, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                last, end, number = line, end + len(line), number + 1
    os.truncate(path, end)
    if not last:
        return None
    try:
        return str(json.loads(last)["task_id"])
    except (ValueError, KeyError, TypeError) as error:
        reason = "no line of a run; remove the line, or name another output directory"
        raise CommandFileError(path, reason, line=number) from error
