"""The record of a run on disk, from which the run continues after its process was killed."""

from rollouts.runner.journal.errors import (
    JournalClosedError,
    JournalDamagedError,
    JournalError,
    JournalInUseError,
    JournalOfAnotherRunError,
    JournalWriteError,
)
from rollouts.runner.journal.history import RecordedAttempt
from rollouts.runner.journal.journal import Journal
from rollouts.runner.journal.recorder import ResumedRun

__all__ = [
    "Journal",
    "JournalClosedError",
    "JournalDamagedError",
    "JournalError",
    "JournalInUseError",
    "JournalOfAnotherRunError",
    "JournalWriteError",
    "RecordedAttempt",
    "ResumedRun",
]
