"""The file of a journal: a record file to which everything is appended, and what of it still counts."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rollouts.errors import short_repr
from rollouts.runner.errors import JournalError, JournalOfAnotherRunError
from rollouts.runner.group import Group
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import (
    ChecksumError,
    EncodeError,
    FileLockedError,
    RecordReader,
    RecordWriter,
    TransportError,
    encode,
)

log = logging.getLogger("rollouts")

JOURNAL_FILE: Final = "journal.mmr"
#: The file is written anew, without what no longer counts, when it is larger than twice what it was then, and this.
_SLACK_BYTES: Final = 4 << 20

_CURE: Final = "Restore it, or delete it and start the run again: what the consumer has stored is not lost"

#: The fields of a group that are stored with it; the task and the episodes are stored already.
_GROUP_VALUES: Final = tuple(each.name for each in fields(Group) if each.init and each.name not in ("task", "episodes"))


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

    `undelivered` groups are finished and were not delivered, in the order in which they were finished.
    `unfinished` tasks were started, in this order. `versions` of the weights were in use, each in the place
    of its first use.
    """

    undelivered: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


@dataclass(slots=True)
class _Attempt:
    """The last attempt at an episode of an open task; `record` is the index of its record."""

    record: int
    episode_id: str
    failed: bool


@dataclass(slots=True)
class _OpenTask:
    """A task whose group is not delivered; `record` is the index of its record."""

    record: int
    attempts: dict[int, _Attempt] = field(default_factory=dict)

    @property
    def episode_ids(self) -> list[str]:
        return [self.attempts[place].episode_id for place in sorted(self.attempts)]


class Recorder:
    """The file of a journal, open for this process alone. All calls block; one thread at a time makes them.

    A record is a tuple that begins with its kind:

        ("run", configuration)                                  the first one
        ("version", name)                                       weights of this version are in use
        ("task", task)                                          it was started
        ("attempt", task_id, place, attempt, final, episode)    in place of an earlier one at the same place
        ("group", task_id, ids of its episodes, other values)   it is finished
        ("closed", reason by task_id)                           delivered (""), or discarded
        ("opened", task_ids)                                    delivered, and lost by the consumer

    `lost` has the ids of tasks that were delivered and that the consumer does not have; any thread may read it, and ask
    whether a task is in the journal. Raises `JournalOfAnotherRunError`, and `JournalError` for files that cannot be
    read or made.
    """

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self.path = str(directory)
        self.lost: set[str] = set()
        self.runs_failed_again = False
        self._fsync = fsync
        self._file = directory / JOURNAL_FILE
        self._received: Collection[str] | None = None  # what the consumer has, where it has said so
        self._configuration: dict[str, Any] | None = None
        self._versions: dict[str, None] = {}
        self._closed: dict[str, str] = {}
        self._tasks: dict[str, _OpenTask] = {}  # in the order of their start
        self._finished: dict[str, int] = {}  # open tasks with the records of their groups, in the order of these
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"the directory cannot be made: {error.strerror or error}. Name another one"
            raise JournalError(self.path, reason) from error
        with self._name_errors(), contextlib.ExitStack() as opened:
            self._writer = opened.enter_context(RecordWriter(self._file))
            self._reader = opened.enter_context(RecordReader(self._file))
            opened.pop_all()
        self._rewritten = 0  # the size of the file when it was written anew

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._closed or task_id in self._tasks

    # What earlier processes left.

    def count_as_delivered(self, task_ids: Collection[str], lost: Collection[str]) -> None:
        self._received = frozenset(task_ids)
        self.lost.update(lost)

    def resume(self, configuration: dict[str, Any]) -> ResumedRun:
        with self._name_errors():
            damage: list[str] = []
            for index in range(len(self._reader)):
                try:
                    self._apply(index, self._reader.without_media(index))
                except ChecksumError as error:
                    damage.append(str(error))
            if not len(self._reader):
                self._append("run", configuration)
            elif self._configuration is None:
                reason = "does not begin with the configuration of a run: it is no journal, or damaged"
                raise JournalError(self.path, f"{JOURNAL_FILE} {reason}. {_CURE}")
            elif differing := differences(self._configuration, configuration):
                shown = "; ".join(differing[:5])
                more = f"; {len(differing) - 5} more values differ" if len(differing) > 5 else ""
                raise JournalOfAnotherRunError(
                    self.path,
                    f"it belongs to a run with another configuration: {shown}{more}. Continue that run with its own "
                    "values, or give this run a directory of its own",
                )
            if self._received is not None:
                self._close_received(self._received)
            self._forget_damaged(damage)
            if damage:
                shown = "; ".join(damage[:5]) + ("; ..." if len(damage) > 5 else "")
                log.warning("journal %s: the disk has damaged, and it counts as not recorded: %s", self.path, shown)
            if self.runs_failed_again:
                for task_id in self._tasks:
                    self._forget(task_id, lambda each: each.failed)
            if damage or self.runs_failed_again:
                self._rewrite()
            self.lost.difference_update(self._closed)
            unfinished = tuple(task_id for task_id in self._tasks if task_id not in self._finished)
            return ResumedRun(tuple(self._finished), unfinished, tuple(self._versions))

    def _apply(self, index: int, record: tuple[Any, ...]) -> None:
        """Take record `index` into account. What belongs to a damaged record before it does not count."""
        match record:
            case ("run", configuration):
                self._configuration = configuration
            case ("version", name):
                self._versions.setdefault(name)
            case ("task", task):
                self._tasks[task.task_id] = _OpenTask(index)
            case ("attempt", task_id, place, _, _, episode):
                if task_id in self._tasks:
                    self._tasks[task_id].attempts[place] = _Attempt(index, episode.episode_id, bool(episode.error))
            case ("group", task_id, episode_ids, _):
                # Episodes that are damaged, or were run again, make another group than the one recorded.
                if task_id in self._tasks and self._tasks[task_id].episode_ids == episode_ids:
                    self._finished[task_id] = index
            case ("closed", reasons):
                for task_id, reason in reasons.items():
                    self._closed.setdefault(task_id, reason)  # before it leaves the others: it is always in one of them
                    self._tasks.pop(task_id, None)
                    self._finished.pop(task_id, None)
            case ("opened", task_ids):
                for task_id in task_ids:
                    self._closed.pop(task_id, None)

    def _close_received(self, received: Collection[str]) -> None:
        """Close the tasks whose groups the consumer has, and open those of which it has lost the groups."""
        lost = [task_id for task_id, reason in self._closed.items() if not reason and task_id not in received]
        self.lost.update(lost)
        if lost:
            self._append("opened", lost)
        if new := {task_id: "" for task_id in received if task_id not in self._closed}:
            self._append("closed", new)

    def _forget_damaged(self, damage: list[str]) -> None:
        """Forget tasks and attempts whose media the disk has changed; `damage` gets the errors."""
        for task_id, task in list(self._tasks.items()):
            if self._is_whole(task.record, damage):
                self._forget(task_id, lambda each: not self._is_whole(each.record, damage))
            else:
                del self._tasks[task_id]
                self._finished.pop(task_id, None)

    def _is_whole(self, record: int, damage: list[str]) -> bool:
        try:
            self._reader.stored(record)
        except ChecksumError as error:
            damage.append(str(error))
            return False
        return True

    def _forget(self, task_id: str, condition: Callable[[_Attempt], bool]) -> None:
        """Forget attempts, and the group that they are in. They are run again."""
        task = self._tasks[task_id]
        for place in [place for place, each in task.attempts.items() if condition(each)]:
            del task.attempts[place]
            self._finished.pop(task_id, None)

    # Recording.

    def start(self, task: Task) -> None:
        if task.task_id in self:
            return
        try:
            self._record("task", task)
        except EncodeError as error:
            raise JournalError(
                self.path, f"task {task.task_id!r:.80} cannot be recorded: {error} (`data` is stored with the task)"
            ) from error

    def attempt(self, task_id: str, index: int, attempt: int, episode: Trajectory, final: bool) -> None:
        self._unfinished(task_id)
        # Not durable: a lost attempt is run again, while groups and deliveries must be what was reported.
        self._record("attempt", task_id, index, attempt, final, episode, durable=False)

    def finish(self, group: Group) -> None:
        task_id = group.task.task_id
        recorded = self._unfinished(task_id).attempts
        for index, episode in enumerate(group.episodes):
            if index not in recorded or recorded[index].episode_id != episode.episode_id:
                self.attempt(task_id, index, max(0, group.attempts[index] - 1), episode, True)
        episode_ids = [episode.episode_id for episode in group.episodes]
        self._record("group", task_id, episode_ids, {name: getattr(group, name) for name in _GROUP_VALUES})

    def close_task(self, task_id: str, reason: str) -> None:
        if task_id not in self:
            raise JournalError(self.path, f"task {task_id!r:.80} was not started; call started(task) first")
        if task_id not in self._closed:
            self._record("closed", {task_id: reason})
            with self._name_errors():
                # When it has doubled: all rewriting together then writes about as much as was appended.
                if self._writer.size > 2 * self._rewritten + _SLACK_BYTES:
                    self._rewrite()
        self.lost.discard(task_id)

    def use_weights(self, version: str) -> None:
        if version not in self._versions:
            self._record("version", version)

    def close(self) -> None:
        with self._name_errors():
            self._reader.close()
            self._writer.close()

    def _record(self, *record: Any, durable: bool = True) -> None:
        """Append a record; with fsync, it is on the disk at the end where it is `durable`."""
        with self._name_errors():
            self._append(*record)
            if self._fsync and durable:
                self._writer.flush()

    def _append(self, *record: Any) -> None:
        # In this order: what could not be written does not count.
        self._apply(self._writer.append(record), record)

    def _rewrite(self) -> None:
        """Put a file in place of this one that has what still counts; it is complete and on the disk before.

        The new file is locked before it has the name of the old one, which is locked until then.
        """
        partial = self._file.with_name(f".{JOURNAL_FILE}.partial")
        partial.unlink(missing_ok=True)  # of a process that was killed
        self._reader.refresh()
        writer = RecordWriter(partial)
        try:
            for record in (("run", self._configuration), *(("version", name) for name in self._versions)):
                writer.append(record)
            writer.append(("closed", self._closed))
            counting: list[_OpenTask | _Attempt] = []
            for task in self._tasks.values():
                counting += [task, *task.attempts.values()]
            indices = [*(each.record for each in counting), *self._finished.values()]
            moved = {index: writer.copy(self._reader, index) for index in indices}
            writer.replace(self._file)
        except BaseException:
            writer.close()
            partial.unlink(missing_ok=True)
            raise
        self._reader.close()
        with contextlib.suppress(OSError):  # that it has no name any more
            self._writer.close()
        self._writer, self._rewritten = writer, writer.size
        self._finished = {task_id: moved[index] for task_id, index in self._finished.items()}
        for each in counting:
            each.record = moved[each.record]
        self._reader = RecordReader(self._file)

    # Reading.

    def read_task(self, task_id: str) -> tuple[Task, dict[int, RecordedAttempt]]:
        task = self._unfinished(task_id)
        attempts = {place: RecordedAttempt(*self._read(each.record)[2:]) for place, each in task.attempts.items()}
        return self._read(task.record)[0], attempts

    def read_group(self, task_id: str) -> Group:
        task = self._tasks[task_id]
        episodes = tuple(self._read(task.attempts[place].record)[-1] for place in sorted(task.attempts))
        return Group(task=self._read(task.record)[0], episodes=episodes, **self._read(self._finished[task_id])[-1])

    def _unfinished(self, task_id: str) -> _OpenTask:
        assert task_id not in self._finished, f"the group of task {task_id!r:.80} is finished"
        return self._tasks[task_id]

    def _read(self, index: int) -> tuple[Any, ...]:
        """What record `index` holds after its kind."""
        with self._name_errors():
            # It was appended after the reader had looked at the file.
            if index >= len(self._reader):
                self._reader.refresh()
            held: tuple[Any, ...] = self._reader[index][1:]
            return held

    # Errors.

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Raise `JournalError` in place of the errors of files and of decoding."""
        try:
            yield
        except EncodeError:
            raise
        except FileLockedError as error:
            reason = "another run has it open, or a Runner of this process that was not closed"
            cure = "Wait until that one has ended, or give this run a directory of its own"
            raise JournalOfAnotherRunError(self.path, f"{reason}. {cure}") from error
        except OSError as error:
            intact = "What was recorded before is intact: correct the cause and start the run again with this journal"
            reason = f"it cannot be written: {error.strerror or error}. {intact}"
            raise JournalError(self.path, reason) from error
        except TransportError as error:
            raise JournalError(self.path, f"{JOURNAL_FILE} cannot be used: {error} {_CURE}") from error
