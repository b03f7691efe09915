"""The output directory of a run: its files, its groups, its summary."""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pydantic import ValidationError
from rich.console import Console

from rollouts.errors import CommandFileError
from rollouts.evaluation.results import RESULTS_FILE
from rollouts.files import replaced_file, replaced_path
from rollouts.observability.group_metrics import GroupMetrics, line_violation
from rollouts.observability.metric_sinks import cut_incomplete_line
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.run_config.config_file import ConfigFile
from rollouts.runner.group import Group
from rollouts.terminal.table import Column, print_table, printable_line, shortened
from rollouts.trajectory.tree import Trajectory
from rollouts.values import mean_and_spread
from transport import DecodeError, MalformedError, RecordReader, RecordWriter


class OutputDirectory:
    """The files of a run: a journal, from which it continues, and what it produces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.trajectories = path / "trajectories.mmr"
        self.metrics = path / "metrics.jsonl"
        self.runner_metrics = path / "runner_metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.results = path / RESULTS_FILE


_KEY = ("output", "directory")


def prepare_output(file: ConfigFile, *, resume: bool) -> OutputDirectory:
    """Check the output directory as `check_output`, and make it. Raises `RunConfigError`."""
    output = check_output(file, resume=resume)
    with _refusing(file, output, "cannot be made"):
        output.path.mkdir(parents=True, exist_ok=True)
    return output


def check_output(file: ConfigFile, *, resume: bool) -> OutputDirectory:
    """The output directory, which is not made here.

    Without `resume` it must be new or empty; with it, new, empty or that of a run. Raises `RunConfigError`.
    """
    output = OutputDirectory(file.resolve(file.config.output.directory))
    existing = next(path for path in (output.path, *output.path.parents) if os.path.lexists(path))
    if not existing.is_dir():
        reason = f"{output.path} cannot be made: {existing} is no directory; name another directory"
        raise file.error(_KEY, reason)
    with _refusing(file, output, "cannot be read"):
        is_empty = existing != output.path or not any(os.scandir(output.path))
    if not is_empty and not resume:
        cure = "pass --resume to continue the run in it, or name another directory"
        raise file.error(_KEY, f"{output.path} is not empty; {cure}")
    if not is_empty and not output.journal.is_dir():
        cure = "name the directory of a run, or an empty one"
        raise file.error(_KEY, f"{output.path} is not empty and has no journal to continue from; {cure}")
    return output


@contextmanager
def _refusing(file: ConfigFile, output: OutputDirectory, refusal: str) -> Iterator[None]:
    """Raise `RunConfigError` in place of an error of the system."""
    try:
        yield
    except OSError as error:
        reason = f"{output.path} {refusal}: {error.strerror or error}; name another directory"
        raise file.error(_KEY, reason) from error


# The lines of `metrics.jsonl`: one for each group of a run.


class StoredRow(NamedTuple):
    """A line of the file, as it is there, and its values."""

    line: bytes
    values: GroupMetrics


def read_group_rows(path: Path) -> Iterator[StoredRow]:
    """The lines of `metrics.jsonl`, none if there is no such file.

    Raises `CommandFileError` for a line that is not that of a group.
    """
    if not path.exists():
        return
    cure = "remove the line; --resume writes it anew from trajectories.mmr"
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield StoredRow(line, GroupMetrics.of_line(line))
            except ValidationError as error:
                reason = f"no line of a run ({line_violation(error)}); {cure}"
                raise CommandFileError(path, reason, line=number) from error


class GroupFiles:
    """Writes groups: the episodes of each as one record of `trajectories.mmr`, and a line of `metrics.jsonl`."""

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        with _named(output.trajectories):
            self._trajectories = RecordWriter(output.trajectories)
        with _named(output.metrics):
            self._metrics = open(output.metrics, "a", encoding="utf-8")  # noqa: SIM115  `__exit__` closes it

    def write(self, group: Group) -> None:
        """Write a group. Its record is on the disk when this returns: the journal may forget the episodes.

        Raises `CommandFileError` where the system refuses to write, as when the disk is full.
        """
        with _named(self._output.trajectories):
            self._trajectories.append(list(group.episodes))
            self._trajectories.flush()
        self.write_row(group)

    def write_row(self, group: Group) -> None:
        """Write the line of a group whose record is written. Raises as `write`."""
        with _named(self._output.metrics):
            self._metrics.write(GroupMetrics.of(group).line() + "\n")
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
    except OSError as error:
        cure = "correct the cause, and continue with --resume"
        raise CommandFileError(path, f"cannot be written: {error.strerror or error}; {cure}") from error


# The groups that earlier processes of a run have written.
#
# A group with a record in `trajectories.mmr` counts as written. A process that is killed leaves at most its last group
# without a line in `metrics.jsonl`, a power cut several: they are computed from the records. A line without a record,
# which only a defective disk or another program leaves, is removed, and the task is run again.


class StoredGroups:
    """The tasks of both files. Of a record only the position is kept. An incomplete last line is cut off.

    Raises `CommandFileError` for a damaged line of `metrics.jsonl`, and where `trajectories.mmr` has no usable header.
    """

    def __init__(self, output: OutputDirectory) -> None:
        self._output = output
        cut_incomplete_line(output.metrics)
        rows = {row.values.task_id for row in read_group_rows(output.metrics)}
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
        _named(output.trajectories),
        replaced_path(output.trajectories) as partial,
        _opened(output.trajectories) as reader,
        RecordWriter(partial) as writer,
    ):
        for index in kept:
            writer.append(reader[index])
        writer.flush()
    return frozenset(failed)


def _tasks_of_records(path: Path) -> Iterator[tuple[str, int]]:
    """The task and the position of each record."""
    return ((episodes[0].group_id, index) for episodes, index in _episodes_of_records(path))


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


# The summary of a run, from the lines of its `metrics.jsonl`: what earlier processes did is part of it.


_TOTALS = ("done", "truncated", "failed", "turns", "length_stops", "tokens", "sampled_tokens", "images", "sounds")
_SECONDS = ("episode_seconds", "engine_seconds")
_REWARDS = ("total", "environment", "group")
_MOST_ERRORS = 10
_MOST_ERROR_CHARACTERS = 1000  # an error may quote a whole message; the episode has all of it
_MOST_WITHOUT_EXPONENT = 1e12


def summarise(
    rows: Iterable[GroupMetrics], *, complete: bool, process_seconds: float, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Figures over all groups of the output directory.

    `complete`: every task of the source, up to the limit, has been run. `process_seconds`, the wall time of the
    command, and `metrics` are those of this process; the other figures are of earlier ones too. `episode_seconds` and
    `engine_seconds` are sums over the episodes, which run side by side. Rewards are means over all episodes, failed
    ones included, and null without episodes; rewards that are not finite (sums that overflow) are counted in
    `rewards_not_finite` and in no mean. `errors` has the most frequent kinds of errors, with the number of episodes and
    the first text of each, shortened to 1,000 characters. A run with a teacher also has `teacher_kl_mean`, over the
    scored episodes.
    """
    groups = attempts = 0
    totals = dict.fromkeys(_TOTALS, 0)
    seconds = dict.fromkeys(_SECONDS, 0.0)
    rewards: dict[str, array[float]] = {name: array("d") for name in _REWARDS}
    parts: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    teacher_kl = array("d")
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row in rows:
        groups += 1
        attempts += sum(row.attempts)
        for name in _TOTALS:
            totals[name] += getattr(row, name)
        for name in _SECONDS:
            seconds[name] += getattr(row, name)
        for name, values in rewards.items():
            values.extend(getattr(row, f"{name}_rewards"))
        for name, part in row.reward_parts.items():
            parts[name].extend(part)
        teacher_kl.extend(value for value in row.teacher_kl or () if value is not None)
        for text in row.errors:
            kind = text.partition(":")[0]
            errors[kind] += 1
            examples.setdefault(kind, shortened(text, _MOST_ERROR_CHARACTERS))
    found = {name: mean_and_spread(values) for name, values in rewards.items()}
    return {
        "complete": complete,
        "groups": groups,
        "episodes": len(rewards["total"]),
        **totals,
        "attempts": attempts,
        "process_seconds": process_seconds,
        **seconds,
        **{f"{name}_reward_mean": _known(reward.mean) for name, reward in found.items()},
        "total_reward_std": _known(found["total"].spread),
        "rewards_not_finite": found["total"].not_finite,
        **({"teacher_kl_mean": mean_and_spread(teacher_kl).mean} if teacher_kl else {}),
        "reward_parts": {name: _known(mean_and_spread(parts[name]).mean) for name in sorted(parts)},
        "errors": {
            kind: {"episodes": count, "example": examples[kind]} for kind, count in errors.most_common(_MOST_ERRORS)
        },
        "metrics": dict(metrics),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary to `path`, whose earlier content stays until the new one is complete. Raises `OSError`."""
    with replaced_file(path) as file:
        file.write((json.dumps(summary, indent=2) + "\n").encode())


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table, and the errors below it. Texts of environments and rewards are on one line each."""
    names = [name for name, value in summary.items() if name != "complete" and not isinstance(value, dict)]
    rows = [[name.replace("_", " "), _figure(summary[name])] for name in names]
    rows += [[f"reward part {printable_line(name)}", _figure(value)] for name, value in summary["reward_parts"].items()]
    for name, value in summary["metrics"].items():
        kind, _, reason = name.partition("/")
        if kind in ("groups_skipped", "groups_stale"):
            rows.append([f"{kind.replace('_', ' ')}: {printable_line(reason)}", _figure(int(value))])
    print_table([Column("figure", wraps=True), Column("value", align_right=True)], rows, console)
    if warning := length_stops_warning(summary["length_stops"], summary["turns"]):
        console.print()
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    if summary["errors"]:
        errors = [[f"{error['episodes']:,}", printable_line(error["example"])] for error in summary["errors"].values()]
        console.print()
        print_table([Column("episodes", align_right=True), Column("first error", wraps=True)], errors, console)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < _MOST_WITHOUT_EXPONENT else f"{value:.4g}"
    return f"{value:,}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
