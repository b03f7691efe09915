"""Groups of episodes for the tasks of a run."""

from rollouts.episodes.limits import EpisodeLimits
from rollouts.runner.errors import (
    GroupFailedError,
    RunnerArgumentError,
    RunnerBusyError,
    RunnerClosedError,
    TaskSourceError,
)
from rollouts.runner.group import Group
from rollouts.runner.journal import (
    Journal,
    JournalDamagedError,
    JournalError,
    JournalInUseError,
    JournalOfAnotherRunError,
    JournalWriteError,
)
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import GroupStream, Runner
from rollouts.runner.task import Task

__all__ = [
    "EpisodeLimits",
    "Group",
    "GroupFailedError",
    "GroupStream",
    "Journal",
    "JournalDamagedError",
    "JournalError",
    "JournalInUseError",
    "JournalOfAnotherRunError",
    "JournalWriteError",
    "RetryPolicy",
    "Runner",
    "RunnerArgumentError",
    "RunnerBusyError",
    "RunnerClosedError",
    "Task",
    "TaskSourceError",
]
