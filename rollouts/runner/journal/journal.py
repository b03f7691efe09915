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
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

from rollouts.errors import ArgumentError
from rollouts.runner.group import Group
from rollouts.runner.journal.configuration import plain_configuration
from rollouts.runner.journal.errors import JournalClosedError, JournalError
from rollouts.runner.journal.files import JournalFiles
from rollouts.runner.journal.history import RecordedAttempt
from rollouts.runner.journal.recorder import Recorder, ResumedRun
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory

P = ParamSpec("P")
T = TypeVar("T")


class Journal:
    """The journal in a directory. Pass it to a `Runner`, which continues the run that it records.

        runner = Runner(..., journal=Journal.open("run/journal"))

    `task_id in journal` says whether a task was started. The coroutine methods may be called at any time after
    `resume`, in any order and concurrently; they write on a thread of the journal, in the order of the calls. A call
    that is cancelled is carried out nevertheless. They raise `JournalWriteError`,
    and `JournalDamagedError` where another program has changed or deleted the files.
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

        Raises `JournalInUseError` if another process has the journal open, `JournalDamagedError`, `JournalWriteError`,
        `JournalError` where the directory cannot be made, and `ArgumentError`.
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

        Raises `JournalOfAnotherRunError` where the journal was begun with other values, `JournalDamagedError`,
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
