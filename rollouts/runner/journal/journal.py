"""The journal of a run: tasks, attempts and finished groups, from which a run continues after its process was killed.

A group is finished once, and it is delivered when the consumer has asked for the next one. A process that is killed in
between leaves the group undelivered: the next process delivers the identical group, read from the journal, and does not
run its episodes again. Of an unfinished group, the next process runs only those episodes that have no final attempt.

What a call has recorded when it returns survives the end of the process in every form, `kill -9` included. With
`fsync=True` finished groups and deliveries survive a power cut too; without it, and for single episodes of unfinished
groups, a power cut can lose what was recorded in the last seconds, which is then run or delivered again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, ParamSpec, Self, TypeVar

from rollouts.errors import ArgumentError
from rollouts.runner.errors import JournalClosedError, JournalError, JournalOfAnotherRunError
from rollouts.runner.group import Group
from rollouts.runner.journal.files import (
    ENTRIES,
    Entry,
    History,
    JournalAttempted,
    JournalBegun,
    JournalClosed,
    JournalFiles,
    JournalFinished,
    JournalStarted,
    JournalWeights,
    OpenTask,
    RecordedAttempt,
    differences,
    plain_configuration,
)
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import EncodeError

# Writes the entries of a journal, and reads back what earlier processes recorded. All calls block.


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
        self._record(entry)

    def close_task(self, task_id: str, reason: str) -> None:
        if task_id not in self.history:
            raise JournalError(self.path, f"task {task_id!r:.80} was not started; call started(task) first")
        if task_id in self.history.closed:
            return
        self._record(JournalClosed(task_id, reason))
        self._was_read(task_id)

    def use_weights(self, version: str) -> None:
        if version not in self.history.versions:
            self._record(JournalWeights(version))

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
            raise JournalError(self.path, f"{reason}. Continue the run with the version that began it") from error

    def _open_task(self, task_id: str) -> OpenTask:
        task = self.history.open.get(task_id)
        if task is not None:
            return task
        state = "its group is finished" if task_id in self.history else "it was not started; call started(task) first"
        raise JournalError(self.path, f"task {task_id!r:.80} is not open: {state}")

    def _unreadable(self, what: str) -> JournalError:
        return JournalError(
            self.path, f"{what} can no longer be read. Start the run again: what cannot be read is then run again"
        )

    def _check_begun(self) -> None:
        """Raise `JournalError` unless there is nothing in the files before the first entry."""
        if len(self.history) or self._files.episodes.next_index:
            raise JournalError(
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
                while attempts and self._files.read_episode(attempts[-1].record, attempts[-1].episode_id) is None:
                    forgotten.append(f"episode {attempts.pop().episode_id!r:.80}")
                if not attempts:
                    task.attempts.pop(index)
        if forgotten:
            shown = ", ".join(forgotten[:5]) + (", ..." if len(forgotten) > 5 else "")
            log.warning(
                "journal %s: %d records were not complete when the process or the machine stopped and count as not "
                "recorded: %s", self.path, len(forgotten), shown
            )  # fmt: skip

    def _record(self, entry: Entry) -> None:
        self._files.append_entry(entry)
        if self._fsync:
            self._files.flush()
        self.history.apply(entry)

    def _was_read(self, task_id: str) -> None:
        self._to_read.discard(task_id)
        self._release_reader()

    def _release_reader(self) -> None:
        if not self._to_read:
            self._files.close_reader()


P = ParamSpec("P")
T = TypeVar("T")


class Journal:
    """The journal in a directory. Pass it to a `Runner`, which continues the run that it records.

        runner = Runner(..., journal=Journal.open("run/journal"))

    `task_id in journal` says whether a task was started. The coroutine methods may be called at any time after
    `resume`, in any order and concurrently; they write on a thread of the journal, in the order of the calls. A call
    that is cancelled is carried out nevertheless. They raise `JournalError`,
    also where another program has changed or deleted the files.
    """

    def __init__(self, recorder: Recorder, configuration: Mapping[str, Any]) -> None:
        self.path = recorder.path
        self._recorder = recorder
        self._configuration = configuration
        self._resumed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, Any] = MappingProxyType({}),
        fsync: bool = False,
    ) -> Self:
        """Open the journal in the directory `path`, or begin one there. An incomplete last record is cut off.

        `configuration` holds plain values that must not change while the run continues, such as the name of the model
        and of the file of tasks; `resume` compares them. With `fsync`, finished groups and deliveries are on the disk
        when they count as such.

        Raises `JournalInUseError` if another process has the journal open, `JournalError` for files that cannot be read
        or made, and `ArgumentError`.
        """
        plain = plain_configuration("configuration", configuration)
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError("path", path, "pass the path of the journal's directory")
        directory = Path(path)
        return cls(Recorder(str(directory), JournalFiles(directory), fsync=fsync), plain)

    def count_as_delivered(self, task_ids: Collection[str], *, lost: Collection[str] = ()) -> None:
        """Say of which tasks the consumer has the groups. They and no others count as delivered, as recorded or not.

        For a consumer that stores the groups: after a power cut, journal and store may have lost different ones. A
        group that only the store has is not delivered again. One that only the journal has is delivered again; where
        the journal has lost it too, its task is run again. Discarded groups stay discarded. `lost` are tasks of which
        the consumer knows that it had the groups. Called before the runner begins.

        Raises `JournalError` after `resume`.
        """
        if self._resumed:
            raise JournalError(self.path, "a runner uses it already; call count_as_delivered before the runner begins")
        self._recorder.count_as_delivered(task_ids, lost)

    @property
    def lost(self) -> frozenset[str]:
        """After `resume`, tasks whose groups the consumer had and `count_as_delivered` did not name.

        Those that are delivered again, or discarded, are no longer among them.
        """
        return self._recorder.lost

    async def resume(self, configuration: Mapping[str, Any] = MappingProxyType({})) -> ResumedRun:
        """What is left of earlier processes. Called once, by the runner, before anything else.

        `configuration` is the runner's part of the configuration: group size, seed and so on. An unreadable episode,
        which only a power cut or a damaged disk can leave, is logged and counts as not recorded.

        Raises `JournalOfAnotherRunError` where the journal was begun with other values, `JournalError`,
        `ArgumentError`, and `JournalError` on a second call.
        """
        given = {**plain_configuration("configuration", configuration), "configuration": self._configuration}
        if self._resumed:
            raise JournalError(self.path, "a runner uses it already; open it again for another one")
        self._resumed = True
        return await self._on_thread(self._recorder.resume, given)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._recorder.history

    async def started(self, task: Task) -> None:
        """Record that a task is run. Does nothing if that is recorded already.

        Raises `JournalError` for a task with data that cannot be stored.
        """
        await self._on_thread(self._recorder.start, task)

    async def attempted(self, task_id: str, index: int, attempt: int, episode: Trajectory, *, final: bool) -> None:
        """Record the end of an attempt at episode `index` of a task; `final` says that there is no further attempt.

        `attempt` counts from 0.
        """
        await self._on_thread(self._recorder.attempt, task_id, index, attempt, episode, final)

    async def finished(self, group: Group) -> None:
        """Record a finished group. Its episodes that were recorded by `attempted` are not written again."""
        await self._on_thread(self._recorder.finish, group)

    async def delivered(self, task_id: str) -> None:
        """Record that the consumer has a group and will not receive it again."""
        await self._on_thread(self._recorder.close_task, task_id, "")

    async def uses_weights(self, version: str) -> None:
        """Record that the weights of this version are in use. Does nothing if that is recorded already."""
        await self._on_thread(self._recorder.use_weights, version)

    async def discarded(self, task_id: str, reason: str) -> None:
        """Record that a group will not be delivered, because it is too old, for example."""
        await self._on_thread(self._recorder.close_task, task_id, reason or "discarded")

    async def task(self, task_id: str) -> Task:
        """An unfinished task of `ResumedRun`. Raises `JournalError` for another one."""
        return await self._on_thread(self._recorder.read_task, task_id)

    async def attempts(self, task_id: str) -> dict[int, RecordedAttempt]:
        """The last attempt at each episode of an unfinished task, by episode index. Raises as `task`."""
        return await self._on_thread(self._recorder.read_attempts, task_id)

    async def group(self, task_id: str) -> Group:
        """An undelivered group of `ResumedRun`. Raises `JournalError` for another one."""
        return await self._on_thread(self._recorder.read_group, task_id)

    async def close(self) -> None:
        """Carry out the calls that were made, and close the files. May be called again."""
        try:
            await self._on_thread(self._recorder.close)
        except JournalClosedError:
            return
        finally:
            self._thread.shutdown(wait=False)

    def close_unused(self) -> None:
        """Close the files, without an event loop, unless a runner uses the journal: `resume` was called."""
        if not self._resumed:
            self._recorder.close()
            self._thread.shutdown(wait=False)

    async def _on_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the journal's thread. It is called even if the caller is cancelled."""
        try:
            work = self._thread.submit(function, *args, **kwargs)
        except RuntimeError:  # after `close`
            raise JournalClosedError(self.path) from None
        called = asyncio.wrap_future(work)
        try:
            # Not `asyncio.shield`, which from Python 3.14 on logs an error that nobody waits for any more.
            await asyncio.wait([called])
            return called.result()
        except asyncio.CancelledError:
            called.add_done_callback(_retrieve_error)
            raise
        finally:
            del called  # its error refers to this frame


def _retrieve_error(called: asyncio.Future[Any]) -> None:
    """Retrieve the error of a call whose caller was cancelled; asyncio would log it with a traceback.

    What could not be recorded is run or delivered again, and the next call raises while the cause lasts.
    """
    if not called.cancelled():
        called.exception()
