"""Gives jobs to workers that come and go: a job of a worker that is lost runs again on another one."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from renderers import RendererError
from rollouts.engines.protocol import InFlight
from rollouts.episodes.errors import EpisodeError, ends_task
from rollouts.errors import RolloutsError, describe_exception
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer
from rollouts.workers.episode_worker import EpisodeJob, EpisodeOutcome
from rollouts.workers.protocol import JobObserver, WorkerGoneError, WorkersClosedError
from transport import TransportError

log = logging.getLogger("rollouts.workers")


class RemoteWorker(Protocol):
    """A worker as its pool sees it: a process that can be reached."""

    async def run(self, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome:
        """Run a job there; cancelling cancels it. `WorkerGoneError` where the worker cannot be reached."""

    def set_update(self, in_flight: InFlight | None) -> None:
        """An update of the weights begins, or all have ended (None). A worker that is gone ignores it."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker in the pool. `removed` is why it was removed, empty while it is there; `is_lost`: it ended by itself."""

    name: str
    slots: int
    remote: RemoteWorker
    used: int = 0
    removed: str = ""
    is_lost: bool = True
    calls: dict[asyncio.Task[EpisodeOutcome], None] = field(default_factory=dict)  # in order: so they run again


class WorkerPool:
    """Runs the episodes of a `Runner` in other processes: workers that are added and removed while episodes run.

    One event loop uses a pool. A worker may be of any kind that has the methods of `RemoteWorker`. A job runs on the
    worker with the largest free share of its slots; jobs wait in the order in which they came. A job whose worker is
    removed is the first to run on another one. Jobs of one episode id, of two streams of the same tasks for example,
    run one after the other, because a worker runs one job of an episode id at a time. After `max_losses` lost workers a
    job is given up with `RolloutsError`, so that an environment that ends its process does not end all workers. Raises
    `ArgumentError`.
    """

    def __init__(self, *, max_losses: int = 3) -> None:
        self._max_losses = check_integer("max_losses", max_losses)
        self._members: dict[str, _Member] = {}
        self._waiting: deque[asyncio.Future[_Member]] = deque()
        self._id_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # kept by the jobs of an id
        self._listeners: list[Callable[[], object]] = []
        self._updates = 0  # in progress, each of another runner
        self._update: InFlight | None = None  # the one that began last; None while there is none
        self._lost = 0
        self._jobs_moved = 0
        self._is_closed = False

    # Workers.

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers."""
        return tuple(self._members)

    @property
    def num_slots(self) -> int:
        """How many episodes can run at once; 0 while there is no worker. It may change at any time."""
        return sum(member.slots for member in self._members.values())

    @property
    def is_closed(self) -> bool:
        """Whether the pool is closed: no worker ever comes."""
        return self._is_closed

    def on_slots_changed(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` when `num_slots` or `is_closed` changes. Returns the function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def add(self, name: str, slots: int, worker: RemoteWorker) -> None:
        """Add a worker, of a name of its own, that runs at most `slots` jobs at a time. Raises `WorkersClosedError`."""
        if self._is_closed:
            raise WorkersClosedError
        self._members[name] = _Member(name, slots, worker)
        if self._update is not None:
            worker.set_update(self._update)
        self._slots_changed()

    def remove(self, name: str, reason: str, *, is_lost: bool = True) -> None:
        """Remove a worker; its jobs run again on other workers. Has no effect where there is none of the name.

        `is_lost` says whether it ended by itself, which counts for `max_losses` of its jobs.
        """
        member = self._members.pop(name, None)
        if member is None:
            return
        member.removed, member.is_lost = reason, is_lost
        if is_lost:
            self._lost += 1
            log.warning(
                "worker %.80s is lost (%s); its %d episodes run again on another one", name, reason, len(member.calls)
            )
        for call in member.calls:
            call.cancel()
        self._slots_changed()

    # Jobs.

    async def run(self, job: EpisodeJob, observer: JobObserver) -> Trajectory:
        """Run an attempt on a worker, on another one if that is lost, and return its finished trajectory.

        Waits while there is no free slot, or another job of its episode id runs. Cancelling the call cancels the
        attempt on its worker, and its requests to the engine. Raises `EpisodeError` with the completed turns: its
        cause is a `RemoteFailureError`, or a `RolloutsError` where worker after worker was lost; and
        `WorkersClosedError`.
        """
        async with self._id_locks.setdefault(job.episode_id, asyncio.Lock()):
            return await self._run(job, observer)

    async def _run(self, job: EpisodeJob, observer: JobObserver) -> Trajectory:
        losses: list[str] = []
        while True:
            member = await self._take_slot(first=bool(losses))
            try:
                outcome = await self._call(member, job, observer)
            finally:
                self._give_back(member)
            if outcome is not None:
                return outcome.result()
            if self._is_closed:
                raise WorkersClosedError
            self._jobs_moved += 1
            if member.is_lost:
                losses.append(f"{member.name}: {member.removed}")
            if len(losses) >= self._max_losses:
                raise _failed(
                    job,
                    RolloutsError(
                        f"episode {job.episode_id:.80} lost {len(losses)} workers ({'; '.join(losses)}) and "
                        "is not run again; see the logs of the workers: its environment may end its process, or use "
                        "more memory than there is"
                    ),
                )

    def set_update(self, in_flight: InFlight | None) -> None:
        """Tell all workers of an update of the weights, also those that come before it ends.

        The time for which requests wait for an update does not count for the deadlines of episodes. Runners that share
        the workers may update at one time: for the workers an update ends when the last one has.
        """
        self._updates = max(0, self._updates + (-1 if in_flight is None else 1))
        if in_flight is None and self._updates:
            return
        self._update = in_flight
        for member in list(self._members.values()):
            member.remote.set_update(in_flight)

    def metrics(self) -> dict[str, float]:
        """Counts by name; `rollouts.observability.METRICS` has their meanings."""
        return {
            "workers": len(self._members),
            "worker_slots": self.num_slots,
            "worker_slots_used": sum(member.used for member in self._members.values()),
            "workers_lost": self._lost,
            "worker_jobs_waiting": sum(1 for waiting in self._waiting if not waiting.done()),
            "worker_jobs_moved": self._jobs_moved,
        }

    async def close(self) -> None:
        """End all jobs with `WorkersClosedError`; return when none runs. The processes go on."""
        self._is_closed = True
        # Before `remove`, which takes the workers and their calls out of the pool.
        calls = [call for member in self._members.values() for call in member.calls]
        for name in self.names:
            self.remove(name, "its pool was closed", is_lost=False)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(WorkersClosedError())
        self._waiting.clear()
        self._slots_changed()  # what waits for workers learns that none comes, also where there was none
        if calls:
            await asyncio.wait(calls)

    async def _call(self, member: _Member, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome | None:
        """How a job ended; None where its worker was removed. Raises `EpisodeError` for a job that cannot be sent."""
        if member.removed:  # since it was given the job
            return None
        observer.assigned(member.name)
        call = asyncio.ensure_future(member.remote.run(job, observer))
        member.calls[call] = None
        try:
            return await call
        except WorkerGoneError as error:
            # A worker that has come back may have the name by now.
            if self._members.get(member.name) is member:
                self.remove(member.name, error.reason)
            member.removed = member.removed or error.reason
            return None
        except asyncio.CancelledError as error:
            # `remove` has cancelled the call; a cancellation of the caller itself goes on.
            if member.removed and not ends_task(error):
                return None
            raise
        except (RolloutsError, RendererError, TransportError) as error:
            raise _failed(job, error) from error
        finally:
            del member.calls[call]

    # Slots.

    async def _take_slot(self, *, first: bool) -> _Member:
        """A slot of a worker, when one is free; `first`: before all that wait. Raises `WorkersClosedError`."""
        if self._is_closed:
            raise WorkersClosedError
        slot: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft(slot)
        else:
            self._waiting.append(slot)
        self._assign()
        try:
            return await slot
        except asyncio.CancelledError:
            if not slot.cancelled() and slot.exception() is None:  # it came at the same time
                self._give_back(slot.result())
            raise

    def _give_back(self, member: _Member) -> None:
        member.used -= 1
        self._assign()

    def _assign(self) -> None:
        """Give free slots to those that wait."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            free = [member for member in self._members.values() if member.used < member.slots]
            if not free:
                return
            member = min(free, key=lambda each: each.used / each.slots)
            member.used += 1
            self._waiting.popleft().set_result(member)

    def _slots_changed(self) -> None:
        self._assign()
        for listener in list(self._listeners):
            listener()


def _failed(job: EpisodeJob, error: Exception) -> EpisodeError:
    """The error of an attempt that no worker has run."""
    trajectory = job.new_trajectory()
    trajectory.error = describe_exception(error)
    trajectory.finish()
    failure = EpisodeError(str(error), trajectory)
    failure.__cause__ = error
    return failure
