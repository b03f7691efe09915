"""What passes between a runner and the processes that run its episodes."""

from collections.abc import Callable
from typing import Any, TypeAlias

from rollouts.episodes.activity import EpisodeObserver, Part, TurnFinished
from rollouts.errors import RolloutsError


class JobObserver(EpisodeObserver):
    """Is called with the progress of a job, on the event loop of the runner."""

    def assigned(self, worker: str) -> None:
        """A worker begins the episode, from its first turn. Called again when another worker begins it."""


class WorkerGoneError(RolloutsError):
    """A worker ended, or cannot be reached, while it ran an episode. The episode runs again on another worker.

    Cure: none is needed: the episode runs again on another worker. If it happens often, read the worker's log.
    """

    def __init__(self, worker: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"worker {worker:.80}: {reason}")


class WorkersClosedError(RolloutsError):
    """The workers of a runner were closed.

    Cure: make new workers, and pass them to a new `Runner`.
    """

    def __init__(self) -> None:
        super().__init__("these workers are closed; make new ones, and pass them to a new Runner")


#: A call of an `EpisodeObserver`, as a worker reports it: the name of the method and its arguments.
Progress: TypeAlias = tuple[Any, ...]


class ProgressObserver(EpisodeObserver):
    """In a worker: passes what the episode reports to `send`, as `Progress`.

    It passes no requests: the runner counts the tokens of a job from its beginning.
    """

    def __init__(self, send: Callable[[Progress], object]) -> None:
        self._send = send

    def waiting(self, turn: int, part: Part) -> None:
        self._send(("waiting", turn, part))

    def turn_finished(self, turn: TurnFinished) -> None:
        self._send(("turn_finished", turn))


def report_progress(progress: Progress, observer: EpisodeObserver) -> None:
    """Make the call of an observer in a worker at another observer."""
    name, *arguments = progress
    getattr(observer, name)(*arguments)
