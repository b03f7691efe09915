"""The tasks of a run, one after the other, from any iterable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rollouts.error_texts import describe_exception
from rollouts.runner.errors import RunnerArgumentError, TaskSourceError
from rollouts.runner.task import Task

#: A finite or infinite number of tasks.
Tasks: TypeAlias = Iterable[Task] | AsyncIterable[Task]


class TaskSource:
    """Takes tasks from an iterable or async iterable and checks them.

    `ids` are those that no further task may have; it grows. Tasks for which `is_recorded(task_id)` are left out. A call
    of `next` that is cancelled loses no task: the next call returns it. An iterable that is not async is advanced on
    the event loop.
    """

    def __init__(self, tasks: Tasks, ids: set[str], is_recorded: Callable[[str], bool]) -> None:
        self._iterator: AsyncIterator[Task] | None = None
        self._blocking: Iterator[Task] | None = None
        if isinstance(tasks, AsyncIterable):
            self._iterator = aiter(tasks)
        elif isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes):
            self._blocking = iter(tasks)
        else:
            raise RunnerArgumentError("tasks", tasks, "pass an iterable or async iterable of Task")
        self._position = 0
        self._ids = ids
        self._is_recorded = is_recorded
        self._advancing: asyncio.Task[Any] | None = None

    async def next(self) -> Task:
        """The next task. Raises `StopAsyncIteration` at the end, and `TaskSourceError`."""
        while True:
            task = await self._next()
            if not self._is_recorded(task.task_id):
                return task
            await asyncio.sleep(0)  # many tasks may be recorded

    async def _next(self) -> Task:
        position = self._position
        try:
            task = await self._advance()
        except (StopAsyncIteration, asyncio.CancelledError):
            raise
        except Exception as error:  # the iterator of a user may raise anything
            raise TaskSourceError(position, f"the source raised {describe_exception(error)}") from error
        self._position += 1
        if not isinstance(task, Task):
            raise TaskSourceError(position, f"it is a {type(task).__name__}; yield Task(task_id, data)")
        if task.task_id in self._ids:
            rule = "give each task of a run an id of its own; for several epochs, put the epoch into the id"
            raise TaskSourceError(position, f"the id {task.task_id!r:.80} was used before; {rule}")
        self._ids.add(task.task_id)
        return task

    async def close(self) -> None:
        """Stop waiting for an async iterable."""
        if self._advancing is not None:
            self._advancing.cancel()
            await asyncio.wait([self._advancing])
            self._advancing = None

    async def _advance(self) -> Any:
        if self._blocking is not None:
            for task in self._blocking:
                return task
            raise StopAsyncIteration
        if self._advancing is None:
            self._advancing = asyncio.ensure_future(_next_of(self._iterator))
        # A generator that is cancelled while it waits is at its end: what waits for it is cancelled instead.
        await asyncio.wait([self._advancing])
        advanced, self._advancing = self._advancing, None
        found = advanced.result()
        if not found:
            raise StopAsyncIteration
        return found[0]


async def _next_of(iterator: Any) -> tuple[Any, ...]:
    """The next value in a tuple, which is empty at the end: a task cannot end with StopAsyncIteration."""
    try:
        return (await anext(iterator),)
    except StopAsyncIteration:
        return ()
