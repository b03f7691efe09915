"""A runner plays groups of episodes for the tasks of a run."""

from rollouts.episodes.limits import EpisodeLimits
from rollouts.runner.errors import (
    GroupFailedError,
    JournalError,
    JournalOfAnotherRunError,
    TaskSourceError,
)
from rollouts.runner.group import Group
from rollouts.runner.journal import Journal
from rollouts.runner.modes import Asynchronous, OneStepOffPolicy, Synchronous
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import GroupStream, Runner
from rollouts.task import Task

__all__ = [
    "Asynchronous",
    "EpisodeLimits",
    "Group",
    "GroupFailedError",
    "GroupStream",
    "Journal",
    "JournalError",
    "JournalOfAnotherRunError",
    "OneStepOffPolicy",
    "RetryPolicy",
    "Runner",
    "Synchronous",
    "Task",
    "TaskSourceError",
]
