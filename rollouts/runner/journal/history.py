"""What the entries of a journal say about each task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollouts.runner.journal.entries import (
    Entry,
    JournalAttempted,
    JournalBegun,
    JournalClosed,
    JournalFinished,
    JournalStarted,
    JournalWeights,
)
from rollouts.trajectory.tree import Trajectory


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """The last attempt at an episode of an unfinished group. After a `final` one the episode is not run again."""

    attempt: int
    final: bool
    episode: Trajectory


@dataclass(slots=True)
class OpenTask:
    """A task whose group is not finished: the position of the task, and by episode index the attempts in their order.

    `episodes` has the episodes of the last attempts, as the objects that the runner has.
    """

    record: int
    attempts: dict[int, list[JournalAttempted]] = field(default_factory=dict)
    episodes: dict[int, Trajectory] = field(default_factory=dict)


class History:
    """The state of every task. Of a closed task only the id is kept."""

    def __init__(self) -> None:
        self.configuration: dict[str, Any] | None = None
        self.open: dict[str, OpenTask] = {}  # in the order in which they were started
        self.undelivered: dict[str, JournalFinished] = {}  # in the order in which they were finished
        self.closed: set[str] = set()
        self.versions: list[str] = []  # of the weights, in the order in which they came into use first

    def __len__(self) -> int:
        return len(self.closed) + len(self.open) + len(self.undelivered)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.closed or task_id in self.open or task_id in self.undelivered

    def apply(self, entry: Entry) -> None:
        """Take an entry into account. An attempt at a task that is not open changes nothing.

        A task is started again only if its earlier records cannot be read; they are forgotten.
        """
        match entry:
            case JournalBegun(configuration):
                self.configuration = configuration
            case JournalStarted(task_id, record):
                if task_id not in self.closed:
                    self.undelivered.pop(task_id, None)
                    self.open.pop(task_id, None)
                    self.open[task_id] = OpenTask(record)
            case JournalAttempted(task_id, index):
                if (task := self.open.get(task_id)) is not None:
                    task.attempts.setdefault(index, []).append(entry)
                    task.episodes.pop(index, None)
            case JournalFinished(task_id):
                if task_id not in self.closed:
                    self.open.pop(task_id, None)
                    self.undelivered[task_id] = entry
            case JournalClosed(task_id):
                self.open.pop(task_id, None)
                self.undelivered.pop(task_id, None)
                self.closed.add(task_id)
            case JournalWeights(version):
                if version not in self.versions:
                    self.versions.append(version)
