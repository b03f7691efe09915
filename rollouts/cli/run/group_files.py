"""The files to which the groups of a run are written as they are delivered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rollouts.cli.errors import CommandFileError
from rollouts.cli.run.group_rows import group_row
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.runner.group import Group
from transport import FileDeletedError, RecordWriter


class GroupFiles:
    """Writes groups: the episodes of each as one record of `trajectories.mmr`, and a line of `metrics.jsonl`."""

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        with _named(output.trajectories):
            self._trajectories = RecordWriter(output.trajectories)
        with _named(output.metrics):
            self._metrics = open(output.metrics, "a", encoding="utf-8")  # noqa: SIM115  `__exit__` closes it

    def write(self, group: Group) -> None:
        """Write a group. The operating system has all of it when this returns.

        Raises `CommandFileError` where the system refuses to write, as when the disk is full.
        """
        with _named(self._output.trajectories):
            self._trajectories.append(list(group.episodes))
        self.write_row(group)

    def write_row(self, group: Group) -> None:
        """Write the line of a group whose record is written. Raises as `write`."""
        with _named(self._output.metrics):
            self._metrics.write(json.dumps(group_row(group)) + "\n")
            self._metrics.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # `write` has raised it: the line is written when the run continues
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
