"""The groups that earlier processes of a run have written, where its two files of groups may have lost different ones.

A process that is killed leaves at most its last group without a line in `metrics.jsonl`. After a power cut, each file
may have lost any part of its end. A group with a record in `trajectories.mmr` counts as written: where its line is
missing, it is computed from the record. A line without a record is removed; the journal delivers the group again, or
the task is run again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rollouts.cli.errors import CommandFileError
from rollouts.cli.run.group_rows import read_group_rows
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.replaced_file import replaced_file
from rollouts.trajectory.tree import Trajectory
from transport import DecodeError, MalformedError, RecordReader


class StoredGroups:
    """The tasks of both files. Of a record only the position is kept. An incomplete last line is cut off.

    Raises `CommandFileError` for a damaged line of `metrics.jsonl`, and where `trajectories.mmr` has no usable header.
    """

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        _cut_incomplete_line(output.metrics)
        rows = {row.values["task_id"] for row in read_group_rows(output.metrics)}
        self._records = dict(_tasks_of_records(output.trajectories))
        self.without_record = frozenset(rows - self._records.keys())
        self.without_row = tuple(task_id for task_id in self._records if task_id not in rows)

    @property
    def task_ids(self) -> frozenset[str]:
        """The tasks whose groups have a record."""
        return frozenset(self._records)

    def remove_rows_without_record(self) -> None:
        """Remove from `metrics.jsonl` the lines of the groups that `trajectories.mmr` does not have."""
        if self.without_record:
            with replaced_file(self._output.metrics) as file:
                for row in read_group_rows(self._output.metrics):
                    if row.values["task_id"] in self._records:
                        file.write(row.line)

    def groups_without_row(self) -> Iterator[tuple[str, list[Trajectory]]]:
        """The tasks of which `metrics.jsonl` has no line, with the episodes of their records."""
        if self.without_row:
            with RecordReader(self._output.trajectories) as reader:
                for task_id in self.without_row:
                    yield task_id, reader[self._records[task_id]]


def _tasks_of_records(path: Path) -> Iterator[tuple[str, int]]:
    """The task and the position of each record. A damaged record counts as lost."""
    if not path.exists():
        return
    with _opened(path) as reader:
        for index in range(len(reader)):
            try:
                record = reader.without_media(index)
            except DecodeError:
                continue
            if isinstance(record, list) and record and isinstance(record[0], Trajectory):
                yield record[0].group_id, index


def _opened(path: Path) -> RecordReader:
    try:
        return RecordReader(path)
    except MalformedError as error:
        reason = "it has no usable header; delete it, and --resume writes its groups again from the journal"
        raise CommandFileError(path, reason) from error


def _cut_incomplete_line(path: Path) -> None:
    """Cut off what stands after the last line feed."""
    if path.exists():
        with open(path, "rb") as lines:
            end = sum(len(line) for line in lines if line.endswith(b"\n"))
        os.truncate(path, end)
