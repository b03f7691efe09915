"""The two record files of a journal. All calls block, and are made from one thread at a time.

`episodes.mmr` has the tasks and the episodes, each media source once, and is a trajectory file like any other.
`entries.mmr` has the entries, which are small, so that it is read quickly when a run continues.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rollouts.runner.journal.entries import Entry
from rollouts.runner.journal.errors import JournalDamagedError, JournalError, JournalInUseError, JournalWriteError
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
)

ENTRIES: Final = "entries.mmr"
EPISODES: Final = "episodes.mmr"


class JournalFiles:
    """The files of the journal in `directory`, which is made if it does not exist, open for this process alone.

    Raises `JournalInUseError`, `JournalDamagedError`, `JournalWriteError`, and `JournalError` where the directory
    cannot be made.
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
            raise JournalDamagedError(
                self._path, f"there is {EPISODES} and no {ENTRIES}; restore it, or name a directory without them"
            )
        with contextlib.ExitStack() as opened:
            self.entries = opened.enter_context(self._writer(ENTRIES))
            self.episodes = opened.enter_context(self._writer(EPISODES))
            opened.pop_all()
        self._reader: RecordReader | None = None

    def append_entry(self, entry: Entry) -> None:
        """Append an entry. The operating system has it when this returns.

        Raises `JournalWriteError`, and `JournalDamagedError` where another program has changed or deleted the file.
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
        """The entries in order. Raises `JournalDamagedError`."""
        cure = f"call transport.repair_record_file on {ENTRIES}, which drops what is damaged, and continue the run"
        with RecordReader(self._directory / ENTRIES) as reader:
            for index in range(len(reader)):
                try:
                    entry = reader[index]
                except DecodeError as error:
                    raise JournalDamagedError(self._path, f"entry {index} cannot be read: {error}; {cure}") from error
                if not isinstance(entry, Entry):
                    reason = f"entry {index} of {ENTRIES} is a {type(entry).__name__}; restore the file of the journal"
                    raise JournalDamagedError(self._path, reason)
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
            raise JournalDamagedError(self._path, f"{name}: {error}") from error
        except OSError as error:
            raise JournalWriteError(self._path, f"{name}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalWriteError(self._path, error.strerror or str(error)) from error
        except (FileDeletedError, FileChangedError) as error:
            reason = f"another program has deleted or changed its files during the run: {error}"
            raise JournalDamagedError(self._path, f"{reason} Restore them, or begin a new run") from error
