"""Progress of the jobs of a worker: sent in batches while they run, with nothing lost and nothing counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.episodes.activity import EpisodeObserver
from rollouts.ray.object_frames import ObjectFrames
from rollouts.workers import Progress
from transport import decode_frames, encode_frames


@dataclass(frozen=True, slots=True)
class ProgressBatch:
    """Encoded progress of one job. `first` is the number of the first event; the events of a job count from 0."""

    first: int
    events: ObjectFrames


@dataclass(slots=True)
class ProgressLog:
    """The events of a job that its reader may not have. `first` is the number of the first of them."""

    first: int = 0
    events: list[Progress] = field(default_factory=list)
    sent: int = 0  # events of the last batch

    def batch(self) -> ProgressBatch | None:
        """All of them; None if there are none but those of the last batch."""
        if len(self.events) == self.sent:
            return None
        self.sent = len(self.events)
        return ProgressBatch(self.first, ObjectFrames(encode_frames(self.events)))

    def confirm(self) -> None:
        """The reader has the last batch."""
        del self.events[: self.sent]
        self.first += self.sent
        self.sent = 0


class ProgressReader:
    """Passes the events of one job to its observer, each of them once."""

    def __init__(self, observer: EpisodeObserver) -> None:
        self._observer = observer
        self._read = 0

    def read(self, batch: ProgressBatch) -> None:
        """Report the events of a batch that earlier batches did not have. Raises `DecodeError`."""
        events: Sequence[Any] = decode_frames(batch.events.frames)
        for event in events[max(0, self._read - batch.first) :]:
            event.report(self._observer)
        self._read = max(self._read, batch.first + len(events))
