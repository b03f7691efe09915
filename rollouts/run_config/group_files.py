"""The groups of a run in its files: records of `trajectories.mmr`, and lines of `metrics.jsonl`."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pydantic import ValidationError
from safetensors import SafetensorError

from rollouts.errors import CommandFileError
from rollouts.observability.group_metrics import GroupMetrics, line_violation
from rollouts.run_config.output import OutputDirectory
from rollouts.runner.group import Group
from transport import RecordWriter


class StoredRow(NamedTuple):
    """A line of the file, as it is there, and its values."""

    line: bytes
    values: GroupMetrics


def read_group_rows(path: Path) -> Iterator[StoredRow]:
    """The lines of `metrics.jsonl`, if there is one. Raises `CommandFileError` for another line."""
    if not path.exists():
        return
    cure = "remove the line; --resume writes it anew from trajectories.mmr"
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield StoredRow(line, GroupMetrics.model_validate_json(line))
            except ValidationError as error:
                reason = f"no line of a run ({line_violation(error)}); {cure}"
                raise CommandFileError(path, reason, line=number) from error


class GroupFiles:
    """Writes groups: the episodes of each as one record of `trajectories.mmr`, and a line of `metrics.jsonl`.

    `durable`: whether a group is on the disk when `write` returns.
    """

    def __init__(self, output: OutputDirectory, *, durable: bool = True) -> None:
        self._output = output
        self._durable = durable
        with write_errors_name(output.trajectories):
            self._trajectories = RecordWriter(output.trajectories)
        with write_errors_name(output.metrics):
            self._metrics = open(output.metrics, "a", encoding="utf-8")  # noqa: SIM115  `__exit__` closes it

    def write(self, group: Group) -> None:
        """Write a group to the disk. Raises `CommandFileError`, as when the disk is full."""
        with write_errors_name(self._output.trajectories):
            self._trajectories.append(list(group.episodes))
            if self._durable:
                self._trajectories.flush()
        self.write_row(group)

    def write_all(self, groups: Sequence[Group]) -> None:
        """`write` each group."""
        for group in groups:
            self.write(group)

    def write_row(self, group: Group) -> None:
        """Write the line of a group whose record is written. Raises as `write`."""
        with write_errors_name(self._output.metrics):
            self._metrics.write(GroupMetrics.of(group).line() + "\n")
            self._metrics.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # `write` has raised it: the line is written when the run continues
            self._metrics.close()
        with write_errors_name(self._output.trajectories):
            self._trajectories.close()


@contextlib.contextmanager
def write_errors_name(path: Path) -> Iterator[None]:
    """Turn an error of the system, of safetensors or of a deleted file into one that names the path and the cure."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        cure = "correct the cause, and continue with --resume"
        raise CommandFileError(path, f"cannot be written: {reason}; {cure}") from error
