"""The tasks of a run, one after the other, from any iterable."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rollouts.episodes.environment_calls import CLOSE_SECONDS
from rollouts.errors import ArgumentError, describe_exception
from rollouts.runner.errors import TaskSourceError
from rollouts.task import Task

log = logging.getLogger("rollouts.runner")

#: A finite or infinite number of tasks.
Tasks: TypeAlias = Iterable[Task] | AsyncIterable[Task]


class TaskSource:
    """Takes tasks from an iterable or async iterable and checks them.

    `ids` are those that no further task may have; it grows. Tasks for which `is_recorded(task_id)` are left out. A call
    of `next` that is cancelled loses no task: the next call returns it. An iterable that is not async is advanced on
    the event loop. `close` closes a generator.
    """

    def __init__(self, tasks: Tasks, ids: set[str], is_recorded: Callable[[str], bool]) -> None:
        self._iterator: AsyncIterator[Task] | None = None
        self._blocking: Iterator[Task] | None = None
        if isinstance(tasks, AsyncIterable):
            self._iterator = aiter(tasks)
        elif isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes):
            self._blocking = iter(tasks)
        else:
            raise ArgumentError("tasks", tasks, "pass an iterable or async iterable of Task")
        self._position = 0
        self._ids = ids
        self._is_recorded = is_recorded
        self._advancing: asyncio.Task[Any] | None = None
        self._is_closed = False

    async def next(self) -> Task:
        """The next task. Raises `StopAsyncIteration` at the end, and `TaskSourceError`."""
        while True:
            position = self._position
            task = await self._advance()
            self._position += 1
            if not isinstance(task, Task):
                raise TaskSourceError(position, f"it is a {type(task).__name__}; yield Task(task_id, data)")
            if task.task_id in self._ids:
                rule = "give each task of a run an id of its own; for several epochs, put the epoch into the id"
                raise TaskSourceError(position, f"the id {task.task_id!r:.80} was used before; {rule}")
            self._ids.add(task.task_id)
            if not self._is_recorded(task.task_id):
                return task
            await asyncio.sleep(0)  # many tasks may be recorded

    async def close(self) -> None:
        """Stop waiting, and close a generator; its errors, and a close past `CLOSE_SECONDS`, are logged."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._advancing is not None:
            self._advancing.cancel()
            await asyncio.wait([self._advancing], timeout=CLOSE_SECONDS)
            self._advancing = None
        try:
            if isinstance(self._blocking, Generator):
                self._blocking.close()
            elif isinstance(self._iterator, AsyncGenerator):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._iterator.aclose()
        except Exception as error:  # noqa: BLE001  the generator of a user may raise anything
            log.warning("the source of tasks failed when it was closed: %s", describe_exception(error))

    async def _advance(self) -> Any:
        if self._is_closed:
            raise StopAsyncIteration
        if self._blocking is not None:
            with self._source_errors():
                # In a tuple, which tells the end of the source from whatever it yields.
                found = next(((task,) for task in self._blocking), ())
        else:
            if self._advancing is None:
                self._advancing = asyncio.ensure_future(_next_of(self._iterator))
            # A generator that is cancelled while it waits is at its end: what waits for it is cancelled instead.
            await asyncio.wait([self._advancing])
            advanced, self._advancing = self._advancing, None
            with self._source_errors():
                found = advanced.result()
                if isinstance(found, SystemExit):
                    raise found
        if not found:
            raise StopAsyncIteration
        return found[0]

    @contextmanager
    def _source_errors(self) -> Iterator[None]:
        """Replace what the iterator raises by `TaskSourceError`, `CancelledError` too: the block does not wait."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the iterator of a user may raise anything
            raise TaskSourceError(self._position, f"the source raised {describe_exception(error)}") from error


async def _next_of(iterator: Any) -> tuple[Any, ...] | SystemExit:
    """The next value in a tuple, empty at the end; a `SystemExit`, which would end the event loop."""
    try:
        return (await anext(iterator),)
    except StopAsyncIteration:
        return ()
    except SystemExit as error:
        return error
