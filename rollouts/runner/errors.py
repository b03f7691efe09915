"""Errors of runners."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.error_texts import describe_exception
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.trajectory.tree import Trajectory


class RunnerArgumentError(ArgumentError):
    """An argument of `Runner` or of one of its methods has a wrong value. `name` is the argument.

    Cure: pass a value as the text says.
    """


class RunnerBusyError(RolloutsError):
    """Two consumers wait for the same groups.

    Cure: await the other call first, or make a stream for each consumer with `runner.stream(tasks)`.
    """

    def __init__(self) -> None:
        super().__init__(
            "another call waits for the next groups; await it first, or make a stream for each consumer: "
            "`runner.stream(tasks)`"
        )


class RunnerClosedError(RolloutsError):
    """The runner was closed.

    Cure: make another `Runner`, with the same journal to continue the run.
    """

    def __init__(self) -> None:
        super().__init__("this Runner is closed; make another one, with the same journal to continue the run")


class TaskSourceError(RolloutsError):
    """The source of tasks failed. `position` counts its tasks from 0. The groups before it were delivered.

    Cure: yield `Task` objects, each with an id of its own; if the source raised, its exception is chained.
    """

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        super().__init__(f"task {position} of the source: {reason}")


class GroupFailedError(RolloutsError):
    """The episodes of a task ended, and no group could be made of them. `episodes` holds them; the cause is chained.

    Cure: correct the function that failed, such as a group reward; the episodes are in `episodes`.
    """

    def __init__(self, task_id: str, episodes: Sequence[Trajectory], step: str, error: BaseException) -> None:
        self.task_id = task_id
        self.episodes = list(episodes)
        super().__init__(
            f"task {task_id:.80}: {step} failed after its {len(episodes)} episodes had ended: "
            f"{describe_exception(error)}"
        )
