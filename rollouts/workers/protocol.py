"""The interface between a runner and the processes that run its episodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

from rollouts.engines.protocol import InFlight
from rollouts.episodes.activity import EpisodeObserver, Part, TurnCounts, TurnSeconds
from rollouts.errors import RolloutsError
from rollouts.trajectory.tree import Trajectory
from rollouts.values import has_members
from rollouts.workers.episode_worker import EpisodeJob


class JobObserver(EpisodeObserver, Protocol):
    """Is called with the progress of a job, on the event loop of the runner."""

    def assigned(self, worker: str) -> None:
        """A worker begins the episode, from its first turn. Called again when another worker begins it."""


@runtime_checkable
class Workers(Protocol):
    """Runs the episodes of a `Runner` in other processes. One event loop uses it.

    `WorkerPool` is an implementation for any kind of worker.
    """

    @property
    def num_slots(self) -> int:
        """How many episodes can run at once; 0 while there is no worker. It may change at any time."""

    @property
    def is_closed(self) -> bool:
        """Whether the workers are closed, by `close` or because they cannot be reached any more: none ever comes."""

    def on_slots_changed(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` whenever `num_slots` or `is_closed` has changed. Returns the function that ends this."""

    async def run(self, job: EpisodeJob, observer: JobObserver) -> Trajectory:
        """Run an attempt on a worker, on another one if that is lost, and return its finished trajectory.

        Waits while there is no free slot. Cancelling the call cancels the attempt on its worker, and its requests to
        the engine. Raises `EpisodeError` with the completed turns: its cause is a `RemoteFailureError`, or a
        `RolloutsError` where worker after worker was lost; and `WorkersClosedError`.
        """

    def set_update(self, in_flight: InFlight | None) -> None:
        """An update of the weights begins (what happens to running requests), or has ended (None).

        The time for which requests wait for an update does not count for the deadlines of episodes. Each runner that
        shares the workers calls this for its own updates, one None for each update that began.
        """

    def metrics(self) -> dict[str, float]:
        """Counts by name; `rollouts.observability.METRICS` has their meanings."""

    async def close(self) -> None:
        """Cancel what runs, and release the workers. A second call does nothing."""


def are_workers(value: object) -> TypeGuard[Workers]:
    """Whether an object has the members of `Workers`, also by `__getattr__` from an object that it wraps."""
    return has_members(value, Workers)


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


class ProgressObserver:
    """An `EpisodeObserver` in a worker: passes what the episode reports to `send`, as `Progress`."""

    def __init__(self, send: Callable[[Progress], object]) -> None:
        self._send = send

    def waiting(self, turn: int, part: Part) -> None:
        self._send(("waiting", turn, part))

    def requesting(self) -> AbstractContextManager[object]:
        return nullcontext()  # the runner counts the tokens of a job from its beginning

    def turn_finished(self, turn: int, counts: TurnCounts, seconds: TurnSeconds, failed: bool) -> None:
        self._send(("turn_finished", turn, counts, seconds, failed))


def report_progress(progress: Progress, observer: EpisodeObserver) -> None:
    """Make the call of an observer in a worker at another observer."""
    name, *arguments = progress
    getattr(observer, name)(*arguments)
