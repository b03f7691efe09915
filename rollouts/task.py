"""The tasks of a run."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rollouts.episodes.environment import Environment
from rollouts.errors import ArgumentError, is_unicode
from rollouts.values import call_error, whole_number
from transport import wire_type


@wire_type("rollouts.Task")
@dataclass(frozen=True, slots=True)
class Task:
    """One task: the episodes of a group are attempts at it.

    `task_id` identifies the task within a run. `data` is for the environment and may hold whatever `transport.encode`
    accepts; each episode gets its own copy of the lists, dicts and sets in it (the values in them are shared). `seed`,
    an integer of 64 bits, goes to `reset` of the environment of every episode; None: the runner derives one from its
    own seed and `task_id`. Raises `ArgumentError` for other values.
    """

    task_id: str
    data: Any = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.task_id, str) or not self.task_id or not is_unicode(self.task_id):
            raise ArgumentError("task_id", self.task_id, "pass text that is not empty and that UTF-8 can encode")
        if self.seed is None:
            return
        seed = whole_number(self.seed)
        if seed is None or not -(2**63) <= seed < 2**63:
            raise ArgumentError("seed", self.seed, f"pass an integer of 64 bits or None for task {self.task_id!r:.80}")
        object.__setattr__(self, "seed", seed)


#: Makes the environment of each episode of a task.
MakeEnvironment: TypeAlias = Callable[[Task], Environment | Awaitable[Environment]]


def check_make_environment(make_environment: object) -> None:
    """Raises `ArgumentError` unless it can be called with a task."""
    name, rule = "make_environment", "pass a function of a Task that returns a new environment"
    if not callable(make_environment):
        raise ArgumentError(name, make_environment, rule)
    reason = call_error(make_environment, ["task"])
    if reason is not None:
        raise ArgumentError(name, make_environment, f"{reason}; {rule}, such as lambda task: MyEnvironment()")


def for_one_episode(task: Task) -> Task:
    """The task with containers of its own: what an environment does to its data is not seen by another episode."""
    data = _copied(task.data, {})
    return task if data is task.data else replace(task, data=data)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of lists, dicts, sets and tuples at every depth; other values, such as images and arrays, are shared."""
    kind = type(value)
    if kind not in (list, dict, set, tuple):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind is tuple:
        return tuple(_copied(each, copies) for each in value)
    if kind is set:
        return set(value)
    copy: Any = copies.setdefault(id(value), kind())
    if kind is dict:
        copy.update((key, _copied(each, copies)) for key, each in value.items())
    else:
        copy.extend(_copied(each, copies) for each in value)
    return copy
