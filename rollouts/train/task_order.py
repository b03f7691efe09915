"""The order in which training takes its tasks, pass after pass, and which of them are done."""

import itertools
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sized
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.run_config.tasks import FileTaskSource, TaskSource
from rollouts.task import Task


class TaskOrder(AsyncIterable[Task]):
    """Passes over `tasks`, each shuffled by `seed` and its number. A position counts the tasks of all passes.

    From the second pass on, the ids of tasks end with "#" and the number of the pass, those that end so by
    themselves in the first one too: a runner takes an id once. A source without a length, which may have no
    end, is not shuffled. Of the tasks whose last group solved them, a pass takes the share `revisit`.
    `first`, `done` and `solved` are those of `state`, of an earlier process.
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        seed: int,
        shuffle: bool,
        revisit: float = 1.0,
        first: int = 0,
        done: Iterable[int] = (),
        solved: Iterable[str] = (),
    ) -> None:
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle and isinstance(tasks, FileTaskSource | Sized)
        self._first = first
        self._done = set(done)
        self._revisit = revisit
        self._solved = set(solved)
        self._taken: dict[str, tuple[int, str]] = {}  # positions and ids in the source, by id

    async def __aiter__(self) -> AsyncIterator[Task]:
        position = 0
        for number in itertools.count(1):
            before = position
            async for task in self._pass(number):
                if position >= self._first and position not in self._done:
                    if self._is_left_out(task, number, position):
                        self._finish(position)
                    else:
                        is_own = number == 1 and not re.search(r"#\d+$", task.task_id)
                        task_id = task.task_id if is_own else f"{task.task_id}#{number}"
                        self._taken[task_id] = (position, task.task_id)
                        yield replace(task, task_id=task_id)
                position += 1
            if position == before:
                return

    def position(self, task_id: str) -> int:
        """The position of a task that was taken and is not done."""
        return self._taken[task_id][0]

    def end(self, task_id: str, *, is_solved: bool = False) -> None:
        """Count a task as done: trained on, or left out."""
        position, own = self._taken.pop(task_id)
        self._finish(position)
        if is_solved:
            self._solved.add(own)
        else:
            self._solved.discard(own)

    def state(self) -> dict[str, Any]:
        """What is done: `first`, the first position that is not, positions behind it, ids of solved tasks."""
        return {"first": self._first, "done": sorted(self._done), "solved": sorted(self._solved)}

    def _is_left_out(self, task: Task, number: int, position: int) -> bool:
        if task.task_id not in self._solved:
            return False
        return float(np.random.default_rng([self._seed, number, position]).random()) >= self._revisit

    def _finish(self, position: int) -> None:
        self._done.add(position)
        while self._first in self._done:
            self._done.remove(self._first)
            self._first += 1

    async def _pass(self, number: int) -> AsyncIterator[Task]:
        if isinstance(self._tasks, AsyncIterable):
            async for task in self._tasks:
                yield task
        elif self._shuffle:
            tasks = list(self._tasks)
            for index in np.random.default_rng([self._seed, number]).permutation(len(tasks)):
                yield tasks[index]
        else:
            for task in self._tasks:
                yield task
