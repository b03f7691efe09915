"""Progress of the jobs of a worker: sent in batches while they run, and as a whole with the result."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollouts.episodes.activity import EpisodeObserver
from rollouts.workers import Progress, report_progress


@dataclass(frozen=True, slots=True)
class ProgressBatch:
    """Progress of one job. `first` is the number of the first event; the events of a job count from 0."""

    first: int
    events: tuple[Progress, ...]


@dataclass(slots=True)
class ProgressLog:
    """The events of a job, of which the first `sent` are in earlier batches."""

    events: list[Progress] = field(default_factory=list)
    sent: int = 0

    def batch(self) -> ProgressBatch | None:
        """The events that are in no earlier batch; None if there are none."""
        first, self.sent = self.sent, len(self.events)
        return ProgressBatch(first, tuple(self.events[first:])) if first < self.sent else None


class ProgressReader:
    """Passes the events of one job to its observer, each of them once."""

    def __init__(self, observer: EpisodeObserver) -> None:
        self._observer = observer
        self._read = 0

    def read(self, batch: ProgressBatch) -> None:
        """Report the events of a batch that earlier batches did not have."""
        for event in batch.events[max(0, self._read - batch.first) :]:
            report_progress(event, self._observer)
        self._read = max(self._read, batch.first + len(batch.events))
