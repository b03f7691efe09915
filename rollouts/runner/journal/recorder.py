"""Writes the entries of a journal, and reads back what earlier processes recorded. All calls block."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from rollouts.errors import ArgumentError
from rollouts.runner.group import Group
from rollouts.runner.journal.configuration import differences
from rollouts.runner.journal.entries import (
    JournalAttempted,
    JournalBegun,
    JournalClosed,
    JournalFinished,
    JournalStarted,
    JournalWeights,
)
from rollouts.runner.journal.errors import JournalDamagedError, JournalError, JournalOfAnotherRunError
from rollouts.runner.journal.files import ENTRIES, JournalFiles
from rollouts.runner.journal.history import History, OpenTask, RecordedAttempt
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import EncodeError

log = logging.getLogger("rollouts")

#: The fields of a group that its entry holds; the task and the episodes are records of their own.
_GROUP_VALUES: Final = tuple(
    field.name for field in dataclasses.fields(Group) if field.init and field.name not in ("task", "episodes")
)


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """What earlier processes left, as ids of tasks.

    `undelivered` groups are finished and were not delivered, in the order in which they were finished. `unfinished`
    tasks were started, in this order. `num_closed` tasks were delivered or discarded. `versions` of the weights were in
    use, each in the place of its first use.
    """

    undelivered: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    num_closed: int = 0
    versions: tuple[str, ...] = ()


class Recorder:
    """The history of a run with the files that hold it. One thread calls its methods; `history` may be read by any."""

    def __init__(self, path: str, files: JournalFiles, *, fsync: bool) -> None:
        self.path = path
        self.history = History()
        self._files = files
        self._fsync = fsync
        self._to_read: set[str] = set()  # tasks of earlier processes whose records may still be read
        self._received: frozenset[str] | None = None  # what the consumer has, where it has said so
        self._lost: set[str] = set()  # what was delivered, and the consumer does not have

    def count_as_delivered(self, task_ids: Collection[str], lost: Collection[str]) -> None:
        self._received = frozenset(task_ids)
        self._lost.update(lost)

    @property
    def lost(self) -> frozenset[str]:
        return frozenset(self._lost - self.history.closed)

    def resume(self, configuration: dict[str, Any]) -> ResumedRun:
        for entry in self._files.read_entries():
            if isinstance(entry, JournalClosed) and self._is_lost(entry):
                self._lost.add(entry.task_id)
            else:
                self.history.apply(entry)
        recorded = self.history.configuration
        if recorded is None:
            self._check_begun()
            self._files.append_entry(JournalBegun(configuration))
            if self._fsync:
                self._files.flush_names()
            self.history.configuration = configuration
        elif found := differences(recorded, configuration):
            raise JournalOfAnotherRunError(self.path, found)
        for task_id in self._received or ():
            self.history.apply(JournalClosed(task_id))
        self._forget_unreadable()
        resumed = ResumedRun(
            tuple(self.history.undelivered),
            tuple(self.history.open),
            len(self.history.closed),
            tuple(self.history.versions),
        )
        self._to_read = {*resumed.undelivered, *resumed.unfinished}
        self._release_reader()
        return resumed

    def _is_lost(self, entry: JournalClosed) -> bool:
        """Whether a group was delivered, as an entry says, to a consumer that does not have it."""
        return not entry.reason and self._received is not None and entry.task_id not in self._received

    # Recording.

    def start(self, task: Task) -> None:
        if task.task_id in self.history:
            return
        try:
            record = self._files.append(task, lambda record: JournalStarted(task.task_id, record))
        except EncodeError as error:
            raise JournalError(
                self.path, f"task {task.task_id!r:.80} cannot be recorded: {error} (`data` is stored with the task)"
            ) from error
        self.history.apply(JournalStarted(task.task_id, record))

    def attempt(self, task_id: str, index: int, attempt: int, episode: Trajectory, final: bool) -> None:
        task = self._open_task(task_id)

        def entry(record: int) -> JournalAttempted:
            return JournalAttempted(task_id, index, attempt, episode.episode_id, final, record)

        record = self._files.append(episode, entry)
        self.history.apply(entry(record))
        task.episodes[index] = episode

    def finish(self, group: Group) -> None:
        task_id = group.task.task_id
        task = self._open_task(task_id)
        for index, episode in enumerate(group.episodes):
            if task.episodes.get(index) is not episode:
                self.attempt(task_id, index, max(0, group.attempts[index] - 1), episode, True)
        entry = JournalFinished(
            task_id=task_id,
            values={name: getattr(group, name) for name in _GROUP_VALUES},
            task_record=task.record,
            records=tuple(task.attempts[index][-1].record for index in range(len(group.episodes))),
            episode_ids=tuple(episode.episode_id for episode in group.episodes),
        )
        self._files.append_entry(entry)
        self._flush()
        self.history.apply(entry)

    def close_task(self, task_id: str, reason: str) -> None:
        if task_id not in self.history:
            raise JournalError(self.path, f"task {task_id!r:.80} was not started; call started(task) first")
        if task_id in self.history.closed:
            return
        entry = JournalClosed(task_id, reason)
        self._files.append_entry(entry)
        self._flush()
        self.history.apply(entry)
        self._was_read(task_id)

    def use_weights(self, version: str) -> None:
        if version not in self.history.versions:
            entry = JournalWeights(version)
            self._files.append_entry(entry)
            self._flush()
            self.history.apply(entry)

    def close(self) -> None:
        self._files.close()

    # Reading.

    def read_task(self, task_id: str) -> Task:
        task = self._files.read_task(self._open_task(task_id).record, task_id)
        if task is None:
            raise self._unreadable(f"task {task_id!r:.80}")
        return task

    def read_attempts(self, task_id: str) -> dict[int, RecordedAttempt]:
        task = self._open_task(task_id)
        found: dict[int, RecordedAttempt] = {}
        for index, attempts in sorted(task.attempts.items()):
            entry = attempts[-1]
            episode = task.episodes.get(index) or self._files.read_episode(entry.record, entry.episode_id)
            if episode is None:
                raise self._unreadable(f"episode {entry.episode_id}")
            task.episodes[index] = episode
            found[index] = RecordedAttempt(entry.attempt, entry.final, episode)
        self._was_read(task_id)
        return found

    def read_group(self, task_id: str) -> Group:
        entry = self.history.undelivered.get(task_id)
        if entry is None:
            raise JournalError(self.path, f"there is no undelivered group of task {task_id!r:.80}")
        group = self._group(entry)
        if group is None:
            raise self._unreadable(f"the group of task {task_id!r:.80}")
        self._was_read(task_id)
        return group

    def _group(self, entry: JournalFinished) -> Group | None:
        """The group of an entry; None where the file does not have its task or one of its episodes."""
        task = self._files.read_task(entry.task_record, entry.task_id)
        references = zip(entry.records, entry.episode_ids, strict=True)
        found = [self._files.read_episode(record, episode_id) for record, episode_id in references]
        episodes = tuple(episode for episode in found if episode is not None)
        if task is None or len(episodes) < len(found):
            return None
        try:
            return Group(task=task, episodes=episodes, **entry.values)
        except (TypeError, ArgumentError) as error:
            reason = f"the entry of the group of task {entry.task_id!r:.80} does not fit this installation: {error}"
            raise JournalDamagedError(
                self.path, f"{reason}. Continue the run with the version that began it"
            ) from error

    def _is_readable(self, entry: JournalAttempted) -> bool:
        return self._files.read_episode(entry.record, entry.episode_id) is not None

    def _open_task(self, task_id: str) -> OpenTask:
        task = self.history.open.get(task_id)
        if task is not None:
            return task
        state = "its group is finished" if task_id in self.history else "it was not started; call started(task) first"
        raise JournalError(self.path, f"task {task_id!r:.80} is not open: {state}")

    def _unreadable(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(
            self.path, f"{what} can no longer be read. Start the run again: what cannot be read is then run again"
        )

    def _check_begun(self) -> None:
        """Raise `JournalDamagedError` unless there is nothing in the files before the first entry."""
        if len(self.history) or self._files.episodes.next_index:
            raise JournalDamagedError(
                self.path,
                f"{ENTRIES} has lost its first entry; restore the file, or name a directory without a journal",
            )

    def _forget_unreadable(self) -> None:
        """Forget open tasks, attempts and undelivered groups whose records are missing or damaged.

        A process that is killed between an entry and its record leaves one such entry, a power cut may leave several.
        """
        forgotten: list[str] = []
        for task_id, entry in list(self.history.undelivered.items()):
            if self._group(entry) is None:
                forgotten.append(f"the group of task {task_id!r:.80}")
                reopened = JournalStarted(task_id, entry.task_record)
                self._files.append_entry(reopened)
                self.history.apply(reopened)
        for task_id, task in list(self.history.open.items()):
            if self._files.read_task(task.record, task_id) is None:
                forgotten.append(f"task {task_id!r:.80}")
                self.history.open.pop(task_id)
                continue
            for index, attempts in list(task.attempts.items()):
                while attempts and not self._is_readable(attempts[-1]):
                    forgotten.append(f"episode {attempts.pop().episode_id!r:.80}")
                if not attempts:
                    task.attempts.pop(index)
        if forgotten:
            shown = ", ".join(forgotten[:5]) + (", ..." if len(forgotten) > 5 else "")
            log.warning(
                "journal %s: %d records were not complete when the process or the machine stopped and count as not "
                "recorded: %s", self.path, len(forgotten), shown
            )  # fmt: skip

    def _flush(self) -> None:
        if self._fsync:
            self._files.flush()

    def _was_read(self, task_id: str) -> None:
        self._to_read.discard(task_id)
        self._release_reader()

    def _release_reader(self) -> None:
        if not self._to_read:
            self._files.close_reader()
