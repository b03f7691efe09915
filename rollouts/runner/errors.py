"""Errors of runners."""

from __future__ import annotations

import os
import socket
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


class JournalInUseError(JournalError):
    """Another runner has the journal open. `pid` and `host` name its process; None if unknown.

    Cure: wait until the other run has ended, or give this run a directory of its own; close a runner of this process.
    """

    def __init__(self, path: str, pid: int | None, host: str | None) -> None:
        self.pid = pid
        self.host = host
        if (pid, host) == (os.getpid(), socket.gethostname()):
            reason = "another Runner of this process has it open; close that one first"
        else:
            holder = "another process" if pid is None else f"process {pid} on {host}"
            reason = f"{holder} has it open. Wait until that run has ended, or give this run a directory of its own"
        super().__init__(path, reason)


class JournalOfAnotherRunError(JournalError):
    """The journal was begun with another configuration. `differences` has a sentence for each value that differs.

    Cure: continue that run with its own configuration, or give this run a directory of its own.
    """

    def __init__(self, path: str, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        shown = "; ".join(self.differences[:5])
        more = f"; {len(self.differences) - 5} more values differ" if len(self.differences) > 5 else ""
        super().__init__(
            path,
            f"it belongs to a run with another configuration: {shown}{more}. Continue that run with its own values, or "
            "give this run a directory of its own",
        )
