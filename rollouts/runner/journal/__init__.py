"""The record of a run on disk, from which the run continues after its process was killed."""

from rollouts.runner.errors import (
    JournalClosedError,
    JournalDamagedError,
    JournalError,
    JournalInUseError,
    JournalOfAnotherRunError,
    JournalWriteError,
)
from rollouts.runner.journal.files import RecordedAttempt
from rollouts.runner.journal.journal import Journal, ResumedRun

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
