"""The record of a run on disk, from which the run continues after its process was killed."""

from rollouts.runner.errors import JournalClosedError, JournalError, JournalInUseError, JournalOfAnotherRunError
from rollouts.runner.journal.files import RecordedAttempt
from rollouts.runner.journal.journal import Journal, ResumedRun

__all__ = [
    "Journal",
    "JournalClosedError",
    "JournalError",
    "JournalInUseError",
    "JournalOfAnotherRunError",
    "RecordedAttempt",
    "ResumedRun",
]
