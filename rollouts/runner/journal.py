"""The journal of a run: tasks, attempts and finished groups, from which a run continues after its process was killed.

A group is finished once, and it is delivered when the consumer has asked for the next one. A process that
is killed in between leaves the group undelivered: the next process delivers the identical group, read from
the journal, and does not run its episodes again. Of an unfinished group, the next process runs only those
episodes that have no final attempt. What is delivered is the consumer's: of it the journal keeps the id of
the task alone.

What a call has recorded when it returns survives the end of the process in every form, `kill -9` included.
After a power cut the journal has, with `fsync=True`, everything up to the last group or delivery; without
it, what the system had written of the last seconds. What it has lost is run or delivered again.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

from rollouts.errors import ArgumentError
from rollouts.runner.errors import JournalError
from rollouts.runner.group import Group
from rollouts.runner.journal_file import RecordedAttempt, Recorder, ResumedRun
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport.wire.codec import is_plain

P = ParamSpec("P")
T = TypeVar("T")


class Journal:
    """The journal in a directory. Pass it to a `Runner`, which continues the run that it records.

        runner = Runner(..., journal=Journal.open("run/journal"))

    `task_id in journal` says whether a task was started. The coroutine methods may be called at any time
    after `resume`, in any order and concurrently; they write on a thread of the journal, in the order of
    the calls. A call that is cancelled is carried out nevertheless. They raise `JournalError`, also where
    another program has changed or deleted the files.
    """

    def __init__(self, recorder: Recorder, configuration: Mapping[str, Any]) -> None:
        self.path = recorder.path
        self._recorder = recorder
        self._configuration = configuration
        self._resumed = False
        self._closed = False
        # One thread: the file has the order of the calls, and the event loop does not wait for the disk.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, Any] = MappingProxyType({}),
        fsync: bool = False,
    ) -> Self:
        """Open the journal in the directory `path`, or begin one there.

        `configuration` holds plain values that must not change while the run continues, such as the name of
        the model and of the file of tasks; `resume` compares them. With `fsync`, finished groups and
        deliveries are on the disk when they count as such.

        Raises `JournalOfAnotherRunError` if another process has the journal open, `JournalError` for files that cannot
        be read or made, and `ArgumentError`.
        """
        is_mapping = isinstance(configuration, Mapping) and all(isinstance(key, str) for key in configuration)
        if not is_mapping or not is_plain(dict(configuration)):
            rule = "pass a mapping from names to text, numbers, None, and lists and dicts of them"
            raise ArgumentError("configuration", configuration, rule)
        return cls(Recorder(Path(path), fsync=fsync), dict(configuration))

    def count_as_delivered(self, task_ids: Collection[str], *, lost: Collection[str] = ()) -> None:
        """Say of which tasks the consumer has the groups. They and no others count as delivered, as recorded or not.

        For a consumer that stores the groups and may have lost some, or have stored one whose delivery was
        not recorded any more. A group that it has is not delivered again. A task whose group was delivered
        and is lost is run again, because the journal does not keep what was delivered. Discarded groups
        stay discarded. `lost` are tasks of which the consumer knows that it had the groups. Called before
        the runner begins.

        Raises `JournalError` after `resume`.
        """
        if self._resumed:
            raise JournalError(self.path, "a runner uses it already; call count_as_delivered before the runner begins")
        self._recorder.count_as_delivered(task_ids, lost)

    def run_failed_again(self) -> None:
        """Have failed episodes of groups that were not delivered run again. Called before the runner begins."""
        self._recorder.runs_failed_again = True

    @property
    def lost(self) -> frozenset[str]:
        """After `resume`, tasks whose groups the consumer had and `count_as_delivered` did not name.

        Those that are run and delivered again, or discarded, are no longer among them.
        """
        return frozenset(self._recorder.lost)

    async def resume(self, configuration: Mapping[str, Any] = MappingProxyType({})) -> ResumedRun:
        """What is left of earlier processes. Called once, by the runner, before anything else.

        `configuration` is the runner's part of the configuration: group size, seed and so on. What a
        defective disk has changed is logged and counts as not recorded.

        Raises `JournalOfAnotherRunError` where the journal was begun with other values, and `JournalError`,
        also on a second call.
        """
        if self._resumed:
            raise JournalError(self.path, "a runner uses it already; open it again for another one")
        self._resumed = True
        return await self._on_thread(self._recorder.resume, {**configuration, "configuration": self._configuration})

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._recorder

    async def started(self, task: Task) -> None:
        """Record once that a task is run. Raises `JournalError` for data that cannot be stored."""
        await self._on_thread(self._recorder.start, task)

    async def attempted(self, task_id: str, index: int, attempt: int, episode: Trajectory, *, final: bool) -> None:
        """Record the end of an attempt, from 0, at episode `index`; `final`: there is no further one."""
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

    async def task(self, task_id: str) -> tuple[Task, dict[int, RecordedAttempt]]:
        """An unfinished task of `ResumedRun`, and the last attempt at each of its episodes, by index."""
        return await self._on_thread(self._recorder.read_task, task_id)

    async def group(self, task_id: str) -> Group:
        """An undelivered group of `ResumedRun`."""
        return await self._on_thread(self._recorder.read_group, task_id)

    async def close(self) -> None:
        """Carry out the calls that were made, and close the files. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._on_thread(self._recorder.close)
        finally:
            self._thread.shutdown(wait=False)

    def close_unused(self) -> None:
        """Close the files, without an event loop, unless a runner uses the journal: `resume` was called."""
        if not self._resumed:
            self._closed = True
            self._recorder.close()
            self._thread.shutdown(wait=False)

    async def _on_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the journal's thread. It is called even if the caller is cancelled."""
        try:
            work = self._thread.submit(function, *args, **kwargs)
        except RuntimeError:  # after `close`
            raise JournalError(self.path, "it is closed; open it again with Journal.open") from None
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
