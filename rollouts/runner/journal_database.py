"""The database of a journal: SQLite, with each medium once, and the errors of files that it can have."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import socket
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from renderers.media.item import MediaSource
from rollouts.errors import short_repr
from rollouts.runner.errors import (
    JournalError,
    JournalOfAnotherRunError,
)
from rollouts.runner.group import Group
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import (
    DecodeError,
    EncodeError,
    FileChangedError,
    FileLockedError,
    RecordWriter,
    TransportError,
    decode,
    encode,
)
from transport.wire.decoding import build_media

log = logging.getLogger("rollouts")

DATABASE: Final = "journal.sqlite3"
#: Marks the database as a journal of this form.
_FORM: Final = 0x6D6D7201

# Tasks are numbered in the order of their start, groups in that of their end. A `content` is encoded without its media,
# which are stored once, as long as a task uses them. SQLite finds no damage inside of its pages: `crc` does.
_SCHEMA: Final = """
CREATE TABLE run (configuration BLOB NOT NULL);
CREATE TABLE versions (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE closed (task_id TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (number INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, content BLOB, crc INTEGER);
CREATE TABLE attempts (
    task INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    place INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    final INTEGER NOT NULL,
    episode_id TEXT NOT NULL,
    content BLOB NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (task, place)
);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    task INTEGER NOT NULL UNIQUE REFERENCES tasks ON DELETE CASCADE,
    content BLOB NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE media (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE uses (
    task INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    digest TEXT NOT NULL,
    PRIMARY KEY (task, digest)
) WITHOUT ROWID;
CREATE INDEX uses_by_digest ON uses (digest);
CREATE TRIGGER unused_media AFTER DELETE ON uses WHEN NOT EXISTS (SELECT 1 FROM uses WHERE digest = OLD.digest)
BEGIN DELETE FROM media WHERE digest = OLD.digest; END;
"""

#: The fields of a group that are stored with it; the task and the episodes are stored already.
_GROUP_VALUES: Final = tuple(
    field.name for field in dataclasses.fields(Group) if field.init and field.name not in ("task", "episodes")
)


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
        elif recorded[key] != given[key] and encode(recorded[key]) != encode(given[key]):  # nan differs from itself
            found.append(f"{name} is {short_repr(given[key])}, and the journal has {short_repr(recorded[key])}")
    return found


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """The last attempt at an episode of an unfinished group. After a `final` one the episode is not run again."""

    attempt: int
    final: bool
    episode: Trajectory


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """What earlier processes left, as ids of tasks.

    `undelivered` groups are finished and were not delivered, in the order in which they were finished. `unfinished`
    tasks were started, in this order. `versions` of the weights were in use, each in the place of its first use.
    """

    undelivered: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


class Recorder:
    """The database of a journal, open for this process alone. All calls block; one thread at a time makes them.

    `known` has the ids of all tasks that were started, and `lost` those that were delivered and that the consumer does
    not have; any thread may read them. Raises `JournalOfAnotherRunError`, and `JournalError` for files that cannot be
    read or made.
    """

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self.path = str(directory)
        self.known: set[str] = set()
        self.lost: set[str] = set()
        self._fsync = fsync
        self._received: Collection[str] | None = None  # what the consumer has, where it has said so
        self.runs_failed_again = False
        self._file = directory / DATABASE
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"the directory cannot be made: {error.strerror or error}. Name another one"
            raise JournalError(self.path, reason) from error
        with contextlib.ExitStack() as opened:
            # An empty record file, whose writer names its process to others. A lock of the database would not do: the
            # system releases the locks of SQLite when any descriptor of the file is closed.
            self._lock = opened.enter_context(self._locked(directory / "lock"))
            with self._name_errors():
                # Calls are made from the thread of the journal, and not from the one that opens it.
                self._database = sqlite3.connect(self._file, check_same_thread=False)
                opened.callback(self._database.close)
                self._begin()
                self._status = os.stat(self._file)
            opened.pop_all()

    def _locked(self, path: Path) -> RecordWriter:
        try:
            return RecordWriter(path)
        except FileLockedError as error:
            holder = "another process" if error.pid is None else f"process {error.pid} on {error.host}"
            reason = f"{holder} has it open. Wait until that run has ended, or give this run a directory of its own"
            if (error.pid, error.host) == (os.getpid(), socket.gethostname()):
                reason = "another Runner of this process has it open; close that one first"
            raise JournalOfAnotherRunError(self.path, reason) from error
        except TransportError as error:
            raise JournalError(self.path, str(error)) from error
        except OSError as error:
            raise self._not_written(error.strerror or str(error)) from error

    def _begin(self) -> None:
        """Make the tables of a new database, and the settings of every connection."""
        execute = self._database.execute
        (form,) = execute("PRAGMA user_version").fetchone()
        if form != _FORM:
            if form or execute("SELECT 1 FROM sqlite_schema").fetchone():
                reason = (
                    f"{DATABASE} is that of another program, or of another version: finish the run with that version"
                )
                raise JournalError(self.path, f"{reason}, or begin anew in another directory")
            execute("PRAGMA journal_mode = WAL")
            self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_FORM}; COMMIT")
        execute("PRAGMA wal_autocheckpoint = 4000")  # pages of 4 KiB; each time waits for the disk
        execute("PRAGMA cache_size = -32000")  # KiB: a group that leaves is read before, to free its pages
        execute("PRAGMA foreign_keys = ON")
        self._database.create_function("crc32", 1, zlib.crc32, deterministic=True)
        self._database.create_function("sha256", 1, lambda data: hashlib.sha256(data).hexdigest(), deterministic=True)
        execute("PRAGMA secure_delete = OFF")  # delivered episodes are not overwritten with zeros

    # What earlier processes left.

    def count_as_delivered(self, task_ids: Collection[str], lost: Collection[str]) -> None:
        self._received = frozenset(task_ids)
        self.lost.update(lost)

    def resume(self, configuration: dict[str, Any]) -> ResumedRun:
        with self._transaction():
            found = self._database.execute("SELECT configuration FROM run").fetchone()
            if found is None:
                self._database.execute("INSERT INTO run VALUES (?)", (encode(configuration),))
            elif differing := differences(decode(found[0]), configuration):
                shown = "; ".join(differing[:5])
                more = f"; {len(differing) - 5} more values differ" if len(differing) > 5 else ""
                raise JournalOfAnotherRunError(
                    self.path,
                    f"it belongs to a run with another configuration: {shown}{more}. Continue that run with its own "
                    "values, or give this run a directory of its own",
                )
            if self._received is not None:
                self._close_received(self._received)
            self._forget_damaged()
            if self.runs_failed_again:
                self._forget_failed()
            closed = self._column("SELECT task_id FROM closed")
            self.lost.difference_update(closed)
            self.known.update(closed, self._column("SELECT task_id FROM tasks"))
            return ResumedRun(
                self._column("SELECT task_id FROM groups JOIN tasks ON task = tasks.number ORDER BY groups.number"),
                self._column("SELECT task_id FROM tasks WHERE number NOT IN (SELECT task FROM groups) ORDER BY number"),
                self._column("SELECT name FROM versions ORDER BY number"),
            )

    def _close_received(self, received: Collection[str]) -> None:
        """Close the tasks whose groups the consumer has, and open those of which it has lost the groups."""
        lost = set(self._column("SELECT task_id FROM closed WHERE reason = ''")).difference(received)
        self.lost.update(lost)
        self._database.executemany("DELETE FROM closed WHERE task_id = ?", [(task_id,) for task_id in lost])
        for task_id in received:
            self._close(task_id, "")

    def _forget_damaged(self) -> None:
        """Delete tasks and attempts that the disk has changed, and groups that need them. They are run again."""
        self._database.execute("DELETE FROM media WHERE digest <> sha256(data)")
        damaged = {
            "task": self._column(
                "SELECT task_id FROM tasks WHERE crc <> crc32(content)"
                " OR number IN (SELECT task FROM uses WHERE digest NOT IN (SELECT digest FROM media))"
            ),
            "episode": self._column("SELECT episode_id FROM attempts WHERE crc <> crc32(content)"),
            "the group of task": self._column(
                "SELECT task_id FROM groups JOIN tasks ON task = tasks.number WHERE groups.crc <> crc32(groups.content)"
            ),
        }
        forgotten = [f"{kind} {name!r:.80}" for kind, names in damaged.items() for name in names]
        if forgotten:
            shown = ", ".join(forgotten[:5]) + (", ..." if len(forgotten) > 5 else "")
            log.warning("journal %s: the disk has damaged, and it counts as not recorded: %s", self.path, shown)
            self._database.executemany("DELETE FROM tasks WHERE task_id = ?", [(name,) for name in damaged["task"]])
            self._database.execute(
                "DELETE FROM groups WHERE crc <> crc32(content)"
                " OR task IN (SELECT task FROM attempts WHERE crc <> crc32(content))"
            )
            self._database.execute("DELETE FROM attempts WHERE crc <> crc32(content)")

    def _forget_failed(self) -> None:
        """Delete the attempts with an error, and the groups that they are in. They are run again."""
        rows = self._database.execute("SELECT task, place, content FROM attempts WHERE final")
        failed = [(task, place) for task, place, content in rows if self._decoded(content, {}).error]
        self._database.executemany("DELETE FROM groups WHERE task = ?", [(task,) for task, _ in failed])
        self._database.executemany("DELETE FROM attempts WHERE task = ? AND place = ?", failed)

    # Recording.

    def start(self, task: Task) -> None:
        if task.task_id in self.known:
            return
        try:
            content, media = _encoded(task)
        except EncodeError as error:
            raise JournalError(
                self.path, f"task {task.task_id!r:.80} cannot be recorded: {error} (`data` is stored with the task)"
            ) from error
        with self._transaction():
            values = (task.task_id, content, zlib.crc32(content))
            added = self._database.execute("INSERT INTO tasks (task_id, content, crc) VALUES (?, ?, ?)", values)
            self._add_media(added.lastrowid, media)
        self.known.add(task.task_id)

    def attempt(self, task_id: str, index: int, attempt: int, episode: Trajectory, final: bool) -> None:
        number = self._open_task(task_id)
        content, media = _encoded(episode)
        with self._transaction(durable=False):
            values = (number, index, attempt, final, episode.episode_id, content, zlib.crc32(content))
            self._database.execute("REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            self._add_media(number, media)

    def finish(self, group: Group) -> None:
        task_id = group.task.task_id
        number = self._open_task(task_id)
        with self._name_errors():
            recorded = dict(self._database.execute("SELECT place, episode_id FROM attempts WHERE task = ?", (number,)))
        for index, episode in enumerate(group.episodes):
            if recorded.get(index) != episode.episode_id:
                self.attempt(task_id, index, max(0, group.attempts[index] - 1), episode, True)
        content = encode({name: getattr(group, name) for name in _GROUP_VALUES})
        with self._transaction():
            values = (number, content, zlib.crc32(content))
            self._database.execute("INSERT INTO groups (task, content, crc) VALUES (?, ?, ?)", values)

    def close_task(self, task_id: str, reason: str) -> None:
        if task_id not in self.known:
            raise JournalError(self.path, f"task {task_id!r:.80} was not started; call started(task) first")
        with self._transaction():
            self._close(task_id, reason)
        self.lost.discard(task_id)

    def use_weights(self, version: str) -> None:
        with self._transaction():
            self._database.execute("INSERT OR IGNORE INTO versions (name) VALUES (?)", (version,))

    def close(self) -> None:
        with self._name_errors():
            try:
                self._database.close()
            finally:
                self._lock.close()

    def _add_media(self, task: int | None, media: Mapping[str, MediaSource]) -> None:
        for digest, source in media.items():
            self._database.execute("INSERT OR IGNORE INTO uses VALUES (?, ?)", (task, digest))
            if not self._database.execute("SELECT 1 FROM media WHERE digest = ?", (digest,)).fetchone():
                self._database.execute("INSERT INTO media VALUES (?, ?)", (digest, source.data))

    def _close(self, task_id: str, reason: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO closed VALUES (?, ?)", (task_id, reason))
        self._database.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))

    # Reading.

    def read_task(self, task_id: str) -> Task:
        with self._name_errors():
            return self._read_task(self._open_task(task_id), {})

    def read_attempts(self, task_id: str) -> dict[int, RecordedAttempt]:
        with self._name_errors():
            return self._read_attempts(self._open_task(task_id), {})

    def read_group(self, task_id: str) -> Group:
        with self._name_errors():
            query = "SELECT task, groups.content FROM groups JOIN tasks ON task = tasks.number WHERE task_id = ?"
            found = self._database.execute(query, (task_id,)).fetchone()
            assert found is not None, f"there is no undelivered group of task {task_id!r:.80}"
            number, content = found
            media: dict[str, MediaSource] = {}
            episodes = tuple(each.episode for each in self._read_attempts(number, media).values())
            return Group(task=self._read_task(number, media), episodes=episodes, **self._decoded(content, media))

    def _open_task(self, task_id: str) -> int:
        """The number of a task whose group is not finished."""
        with self._name_errors():
            query = "SELECT number FROM tasks WHERE task_id = ? AND number NOT IN (SELECT task FROM groups)"
            found = self._database.execute(query, (task_id,)).fetchone()
        assert found is not None, f"task {task_id!r:.80} was not started, or its group is finished"
        number: int = found[0]
        return number

    def _read_task(self, number: int, media: dict[str, MediaSource]) -> Task:
        (content,) = self._database.execute("SELECT content FROM tasks WHERE number = ?", (number,)).fetchone()
        task: Task = self._decoded(content, media)
        return task

    def _read_attempts(self, number: int, media: dict[str, MediaSource]) -> dict[int, RecordedAttempt]:
        query = "SELECT place, attempt, final, content FROM attempts WHERE task = ? ORDER BY place"
        return {
            index: RecordedAttempt(attempt, bool(final), self._decoded(content, media))
            for index, attempt, final, content in self._database.execute(query, (number,))
        }

    def _decoded(self, content: bytes, media: dict[str, MediaSource]) -> Any:
        """What `content` holds. Its media are taken from `media`, or read and added."""

        def find(digest: str) -> MediaSource | None:
            if digest not in media:
                row = self._database.execute("SELECT data FROM media WHERE digest = ?", (digest,)).fetchone()
                if row is None:
                    return None
                media[digest] = build_media(digest, memoryview(row[0]))
            return media[digest]

        return decode(content, find_media=find)

    def _column(self, query: str) -> tuple[str, ...]:
        return tuple(value for (value,) in self._database.execute(query))

    # Errors.

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All statements of the block, or none of them; with fsync, on the disk at the end where they are `durable`."""
        with self._name_errors():
            # SQLite would go on writing to a file that has no name any more.
            if not os.path.samestat(os.stat(self._file), self._status):
                raise FileNotFoundError(f"{self._file} is another file now")
            self._database.execute(f"PRAGMA synchronous = {'FULL' if self._fsync and durable else 'NORMAL'}")
            with self._database:
                yield

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Raise `JournalError` in place of the errors of files, of SQLite and of decoding."""
        try:
            yield
        except (FileNotFoundError, FileChangedError) as error:
            reason = f"another program has deleted or changed its files during the run: {error}"
            raise JournalError(self.path, f"{reason}. Restore them, or begin a new run") from error
        except OSError as error:
            raise self._not_written(error.strerror or str(error)) from error
        except DecodeError as error:
            reason = f"a record cannot be read: {error}. Continue the run with the version that began it"
            raise JournalError(self.path, reason) from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                cure = "Restore it, or delete it and start the run again: what the consumer has stored is not lost"
                raise JournalError(self.path, f"{DATABASE} cannot be read: {error}. {cure}") from error
            reason = str(error)
            if code == sqlite3.SQLITE_FULL:
                reason = os.strerror(errno.ENOSPC)
            elif code == sqlite3.SQLITE_IOERR:
                reason += f" ({error.sqlite_errorname}); the disk may be full"
            raise self._not_written(reason) from error

    def _not_written(self, reason: str) -> JournalError:
        intact = "What was recorded before is intact: correct the cause and start the run again with this journal"
        return JournalError(self.path, f"it cannot be written: {reason}. {intact}")


def _encoded(value: object) -> tuple[bytes, dict[str, MediaSource]]:
    """A value without its media, and these by digest. Raises `EncodeError`."""
    media: dict[str, MediaSource] = {}

    def omit(source: MediaSource) -> bool:
        media[source.digest] = source
        return True

    return encode(value, omit_media=omit), media
