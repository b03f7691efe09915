"""The groups that earlier processes of a run have written.

A group with a record in `trajectories.mmr` counts as written. A process that is killed leaves at most its last group
without a line in `metrics.jsonl`, a power cut several: they are computed from the records. A line without a record,
which only a defective disk or another program leaves, is removed, and the task is run again.
"""

from collections.abc import Iterator
from pathlib import Path

from rollouts.errors import CommandFileError
from rollouts.files import replaced_file
from rollouts.observability.metric_sinks import cut_incomplete_line
from rollouts.run_config.group_files import read_group_rows, write_errors_name
from rollouts.run_config.output import OutputDirectory
from rollouts.trajectory.tree import Trajectory
from transport import DecodeError, MalformedError, RecordReader
from transport.records.rewriting import writer_beside


class StoredGroups:
    """The tasks of both files. Of a record only the position is kept. An incomplete last line is cut off.

    Raises `CommandFileError` for a damaged line of `metrics.jsonl`, and where `trajectories.mmr` has no usable header.
    """

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        cut_incomplete_line(output.metrics)
        rows = {row.values.task_id for row in read_group_rows(output.metrics)}
        self._records = {episodes[0].group_id: index for episodes, index in _episodes_of_records(output.trajectories)}
        self.task_ids = frozenset(self._records)  # of the groups that have a record
        self.without_record = frozenset(rows - self._records.keys())
        self.without_row = tuple(task_id for task_id in self._records if task_id not in rows)

    def remove_rows_without_record(self) -> None:
        """Remove from `metrics.jsonl` the lines of the groups that `trajectories.mmr` does not have."""
        if self.without_record:
            with replaced_file(self._output.metrics) as file:
                for row in read_group_rows(self._output.metrics):
                    if row.values.task_id in self._records:
                        file.write(row.line)

    def groups_without_row(self) -> Iterator[tuple[str, list[Trajectory]]]:
        """The tasks of which `metrics.jsonl` has no line, with the episodes of their records."""
        if self.without_row:
            with RecordReader(self._output.trajectories) as reader:
                for task_id in self.without_row:
                    yield task_id, reader[self._records[task_id]]


def remove_failed_groups(output: OutputDirectory) -> frozenset[str]:
    """Remove the groups with failed episodes from `trajectories.mmr`, so that they count as lost; returns their tasks.

    The file is replaced by one without them when that is complete. Raises `CommandFileError`.
    """
    failed: set[str] = set()
    kept: list[int] = []
    for episodes, index in _episodes_of_records(output.trajectories):
        if any(episode.error for episode in episodes):
            failed.add(episodes[0].group_id)
        else:
            kept.append(index)
    if not failed:
        return frozenset()
    with (
        write_errors_name(output.trajectories),
        _opened(output.trajectories) as reader,
        writer_beside(output.trajectories) as writer,
    ):
        for index in kept:
            writer.copy(reader, index)
        writer.replace(output.trajectories)
    return frozenset(failed)


def _episodes_of_records(path: Path) -> Iterator[tuple[list[Trajectory], int]]:
    """The episodes, without media, and the position of each record. A damaged record counts as lost."""
    if not path.exists():
        return
    with _opened(path) as reader:
        for index in range(len(reader)):
            try:
                record = reader.without_media(index)
            except DecodeError:
                continue
            if isinstance(record, list) and record and isinstance(record[0], Trajectory):
                yield record, index


def _opened(path: Path) -> RecordReader:
    try:
        return RecordReader(path)
    except MalformedError as error:
        reason = "it has no usable header; delete it, and --resume runs its groups again"
        raise CommandFileError(path, reason) from error
