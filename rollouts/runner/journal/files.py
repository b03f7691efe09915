"""The two files of a journal: their entries, and the state of each task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from rollouts.errors import ArgumentError, short_repr
from rollouts.runner.errors import JournalError, JournalInUseError
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import (
    DecodeError,
    FileChangedError,
    FileDeletedError,
    FileLockedError,
    RecordReader,
    RecordWriter,
    TransportError,
    encode,
    wire_type,
)
from transport.wire.codec import is_plain

# The entries of a journal: small records, which refer to tasks and episodes by their position in another file.
#
# Each entry is complete in itself: to lose one changes what is known about its own task only.


@wire_type("rollouts.JournalBegun")
@dataclass(frozen=True, slots=True)
class JournalBegun:
    """The first entry: the configuration of the run, as names and plain values."""

    configuration: dict[str, Any]


@wire_type("rollouts.JournalStarted")
@dataclass(frozen=True, slots=True)
class JournalStarted:
    """A task was started. `record` is the position of the `Task`."""

    task_id: str
    record: int


@wire_type("rollouts.JournalAttempted")
@dataclass(frozen=True, slots=True)
class JournalAttempted:
    """An attempt at episode `index` of a task ended. `attempt` counts from 0; after a `final` one there is no other.

    `record` is the position of the episode. The entry is written before the episode, so that every episode has an
    entry; it counts only if the record at this position is the episode `episode_id`.
    """

    task_id: str
    index: int
    attempt: int
    episode_id: str
    final: bool
    record: int


@wire_type("rollouts.JournalFinished")
@dataclass(frozen=True, slots=True)
class JournalFinished:
    """A group is complete. `values` are the fields of the `Group` other than task and episodes.

    `task_record` and `records` are the positions of its task and of its episodes, in order of their index.
    """

    task_id: str
    values: dict[str, Any]
    task_record: int
    records: tuple[int, ...]
    episode_ids: tuple[str, ...]


@wire_type("rollouts.JournalClosed")
@dataclass(frozen=True, slots=True)
class JournalClosed:
    """Nothing is left to do for a task: its group was delivered, or discarded for a `reason` that is not empty."""

    task_id: str
    reason: str = ""


@wire_type("rollouts.JournalWeights")
@dataclass(frozen=True, slots=True)
class JournalWeights:
    """The weights of `version` came into use."""

    version: str


Entry: TypeAlias = JournalBegun | JournalStarted | JournalAttempted | JournalFinished | JournalClosed | JournalWeights


def plain_configuration(name: str, configuration: object) -> dict[str, Any]:
    """A copy of a configuration. Raises `ArgumentError` unless it is a mapping from names to plain values."""
    if not isinstance(configuration, Mapping) or not is_plain(dict(configuration)):
        rule = "pass a mapping from names to text, numbers, None, and lists and dicts of them"
        raise ArgumentError(name, configuration, rule)
    if not all(isinstance(key, str) for key in configuration):
        raise ArgumentError(name, configuration, "pass a mapping whose keys are text")
    return dict(configuration)


def differences(recorded: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A sentence for each value that differs, with its name in dotted form."""
    found: list[str] = []
    for key in [*recorded, *(key for key in given if key not in recorded)]:
        name = f"{prefix}{key}"
        if key not in given:
            found.append(f"{name} is not given, and the journal has {short_repr(recorded[key])}")
        elif key not in recorded:
            found.append(f"{name} is {short_repr(given[key])}, and the journal has none")
        elif isinstance(recorded[key], dict) and isinstance(given[key], dict):
            found += differences(recorded[key], given[key], f"{name}.")
        elif not _same(recorded[key], given[key]):
            found.append(f"{name} is {short_repr(given[key])}, and the journal has {short_repr(recorded[key])}")
    return found


def _same(first: object, second: object) -> bool:
    return first == second or encode(first) == encode(second)  # nan differs from itself


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """The last attempt at an episode of an unfinished group. After a `final` one the episode is not run again."""

    attempt: int
    final: bool
    episode: Trajectory


@dataclass(slots=True)
class OpenTask:
    """A task whose group is not finished: the position of the task, and by episode index the attempts in their order.

    `episodes` has the episodes of the last attempts, as the objects that the runner has.
    """

    record: int
    attempts: dict[int, list[JournalAttempted]] = field(default_factory=dict)
    episodes: dict[int, Trajectory] = field(default_factory=dict)


class History:
    """The state of every task. Of a closed task only the id is kept."""

    def __init__(self) -> None:
        self.configuration: dict[str, Any] | None = None
        self.open: dict[str, OpenTask] = {}  # in the order in which they were started
        self.undelivered: dict[str, JournalFinished] = {}  # in the order in which they were finished
        self.closed: set[str] = set()
        self.versions: list[str] = []  # of the weights, in the order in which they came into use first

    def __len__(self) -> int:
        return len(self.closed) + len(self.open) + len(self.undelivered)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.closed or task_id in self.open or task_id in self.undelivered

    def apply(self, entry: Entry) -> None:
        """Take an entry into account. An attempt at a task that is not open changes nothing.

        A task is started again only if its earlier records cannot be read; they are forgotten.
        """
        match entry:
            case JournalBegun(configuration):
                self.configuration = configuration
            case JournalStarted(task_id, record):
                if task_id not in self.closed:
                    self.undelivered.pop(task_id, None)
                    self.open.pop(task_id, None)
                    self.open[task_id] = OpenTask(record)
            case JournalAttempted(task_id, index):
                if (task := self.open.get(task_id)) is not None:
                    task.attempts.setdefault(index, []).append(entry)
                    task.episodes.pop(index, None)
            case JournalFinished(task_id):
                if task_id not in self.closed:
                    self.open.pop(task_id, None)
                    self.undelivered[task_id] = entry
            case JournalClosed(task_id):
                self.open.pop(task_id, None)
                self.undelivered.pop(task_id, None)
                self.closed.add(task_id)
            case JournalWeights(version):
                if version not in self.versions:
                    self.versions.append(version)


# The two record files of a journal. All calls block, and are made from one thread at a time.
#
# `episodes.mmr` has the tasks and the episodes, each media source once, and is a trajectory file like any other.
# `entries.mmr` has the entries, which are small, so that it is read quickly when a run continues.


ENTRIES: Final = "entries.mmr"
EPISODES: Final = "episodes.mmr"


class JournalFiles:
    """The files of the journal in `directory`, which is made if it does not exist, open for this process alone.

    Raises `JournalInUseError`, and `JournalError` for files that cannot be read or made.
    """

    def __init__(self, directory: Path) -> None:
        self._path = str(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"the directory cannot be made: {error.strerror or error}. Name another one"
            raise JournalError(self._path, reason) from error
        self._directory = directory
        if (directory / EPISODES).exists() and not (directory / ENTRIES).exists():
            raise JournalError(
                self._path, f"there is {EPISODES} and no {ENTRIES}; restore it, or name a directory without them"
            )
        with contextlib.ExitStack() as opened:
            self.entries = opened.enter_context(self._writer(ENTRIES))
            self.episodes = opened.enter_context(self._writer(EPISODES))
            opened.pop_all()
        self._reader: RecordReader | None = None

    def append_entry(self, entry: Entry) -> None:
        """Append an entry. The operating system has it when this returns.

        Raises `JournalError`, also where another program has changed or deleted the file.
        """
        with self._name_errors():
            self.entries.append(entry)

    def append(self, value: object, make_entry: Callable[[int], Entry]) -> int:
        """Append a task or an episode, after the entry for its position; return the position."""
        with self._name_errors():
            expected = self.episodes.next_index
            self.entries.append(make_entry(expected))
            record = self.episodes.append(value)
            if record != expected:  # the file has a record of an earlier, interrupted call
                self.entries.append(make_entry(record))
            return record

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        with self._name_errors():
            self.episodes.flush()
            self.entries.flush()

    def flush_names(self) -> None:
        """Wait until the names of new files are on the disk."""
        if hasattr(os, "O_DIRECTORY"):
            with self._name_errors():
                descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def read_entries(self) -> Iterator[Entry]:
        """The entries in order. Raises `JournalError`."""
        cure = f"call transport.repair_record_file on {ENTRIES}, which drops what is damaged, and continue the run"
        with RecordReader(self._directory / ENTRIES) as reader:
            for index in range(len(reader)):
                try:
                    entry = reader[index]
                except DecodeError as error:
                    raise JournalError(self._path, f"entry {index} cannot be read: {error}; {cure}") from error
                if not isinstance(entry, Entry):
                    reason = f"entry {index} of {ENTRIES} is a {type(entry).__name__}; restore the file of the journal"
                    raise JournalError(self._path, reason)
                yield entry

    def read_task(self, record: int, task_id: str) -> Task | None:
        """The task at a position; None where it is not there or damaged."""
        value = self._read(record)
        return value if isinstance(value, Task) and value.task_id == task_id else None

    def read_episode(self, record: int, episode_id: str) -> Trajectory | None:
        """The episode at a position; None where it is not there or damaged."""
        value = self._read(record)
        return value if isinstance(value, Trajectory) and value.episode_id == episode_id else None

    def _read(self, record: int) -> object:
        if self._reader is None:
            self._reader = RecordReader(self._directory / EPISODES)
        if not 0 <= record < len(self._reader):
            return None
        try:
            return self._reader[record]
        except DecodeError:
            return None

    def close_reader(self) -> None:
        """Release the memory for reading: some hundred bytes for each episode of the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        self.close_reader()
        with self._name_errors():
            try:
                self.episodes.close()
            finally:
                self.entries.close()

    def _writer(self, name: str) -> RecordWriter:
        try:
            return RecordWriter(self._directory / name)
        except FileLockedError as error:
            raise JournalInUseError(self._path, error.pid, error.host) from error
        except TransportError as error:
            raise JournalError(self._path, f"{name}: {error}") from error
        except OSError as error:
            raise self._not_written(f"{name}: {error.strerror or error}") from error

    def _not_written(self, reason: str) -> JournalError:
        intact = "What was recorded before is intact: correct the cause and start the run again with this journal"
        return JournalError(self._path, f"it cannot be written: {reason}. {intact}")

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._not_written(error.strerror or str(error)) from error
        except (FileDeletedError, FileChangedError) as error:
            reason = f"another program has deleted or changed its files during the run: {error}"
            raise JournalError(self._path, f"{reason} Restore them, or begin a new run") from error
