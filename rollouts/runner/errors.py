"""Errors of runners."""

from collections.abc import Sequence

from rollouts.errors import RolloutsError, describe_exception
from rollouts.trajectory.tree import Trajectory


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


class JournalError(RolloutsError):
    """A journal cannot be used. `path` is its directory.

    Cure: correct the cause that the text names, such as a full disk, and start the run again with the same journal;
    restore damaged files from a copy, or begin the run in another directory.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        super().__init__(f"journal {path}: {reason}")


class JournalOfAnotherRunError(JournalError):
    """The journal is that of another run: of one that has it open, or of one with another configuration.

    Cure: wait until the other run has ended, continue it with its own configuration, or give this run a directory of
    its own; close a runner of this process.
    """
