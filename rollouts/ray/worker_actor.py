"""What an actor runs: the episodes of a worker, for the process that made the actor."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeAlias

import ray

from renderers import MediaSource, Renderer, RendererError, RendererPool
from rollouts.engines.protocol import ChatEngine, Engine, InFlight
from rollouts.episodes.activity import EpisodeObserver
from rollouts.episodes.environment import resolve
from rollouts.errors import RolloutsError, describe_exception
from rollouts.ray.object_media import ObjectFrames, ObjectMedia, frames_and_media
from rollouts.task import MakeEnvironment
from rollouts.workers import EpisodeJob, EpisodeWorker, Progress, ProgressObserver, report_progress
from transport import TransportError, decode_frames


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


MakeEngine: TypeAlias = Callable[[], Engine | ChatEngine | Awaitable[Engine | ChatEngine]]
MakeRenderer: TypeAlias = Callable[[], Renderer | RendererPool | Awaitable[Renderer | RendererPool | None] | None]


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call of `WorkerActor.run` ended.

    `outcome` is the encoded `EpisodeOutcome` without its media, whose digests are `media`; `progress` is all that was
    reported, because it is not known which batches have arrived. `error` is why the job could not be run at all. A job
    that was cancelled has neither.
    """

    outcome: ObjectFrames | None = None
    media: tuple[str, ...] = ()
    progress: ProgressBatch | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StartedActor:
    """Where an actor runs, its version of mmrollouts, and why its parts cannot be made, empty if they can."""

    node_id: str
    pid: int
    version: str
    error: str


class WorkerActor:
    """Runs episodes in an actor. All methods run on the event loop of the actor.

    A call of `run` has a number that no other call has: the caller names it to cancel the job, and to fetch the media
    of the episode, which are kept until the number is among the `released` of `progress`.
    """

    def __init__(
        self, make_environment: MakeEnvironment, make_engine: MakeEngine, make_renderer: MakeRenderer, slots: int
    ) -> None:
        # What may fail is in `start`: Ray begins an actor whose constructor fails again and again.
        self._make_environment = make_environment
        self._make_engine = make_engine
        self._make_renderer = make_renderer
        self._slots = slots
        self._engine: Engine | None = None
        self._renderer: Any = None
        self._worker: EpisodeWorker | None = None
        self._starting: asyncio.Task[None] | None = None
        self._jobs: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: dict[int, None] = {}  # calls that were cancelled before they arrived
        self._media: dict[int, dict[str, MediaSource]] = {}  # of ended episodes, by call
        self._received = ObjectMedia(recent_bytes=0)  # media of the jobs
        self._logs: dict[int, ProgressLog] = {}
        self._has_progress = asyncio.Event()

    async def start(self) -> StartedActor:
        """Make the parts, where they are not there; cancel jobs of which the caller has lost the calls.

        An update of the weights whose end the caller could not report is over.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._make_parts())
        error = ""
        try:
            await asyncio.shield(self._starting)
        except Exception as failure:  # noqa: BLE001  functions of a user may raise anything
            self._starting = None
            error = describe_exception(failure)
        if self._worker is not None:
            await self._worker.cancel_all()
            self._worker.set_update(None)  # the caller tells of an update that is in progress when this has returned
        self._media.clear()
        return StartedActor(ray.get_runtime_context().get_node_id(), os.getpid(), version("mmrollouts"), error)

    async def run(self, call: int, job: ObjectFrames, media: Mapping[str, Any]) -> CallResult:
        """Run an encoded `EpisodeJob`. `media` are the objects of its media, by digest."""
        if call in self._cancelled:
            del self._cancelled[call]
            return CallResult()
        assert self._worker is not None
        try:
            sources = await self._received.receive(media, lambda digests: [media[digest] for digest in digests])
            decoded: EpisodeJob = decode_frames(job.frames, find_media=sources.get)
        except (RolloutsError, RendererError, TransportError) as error:
            return CallResult(error=describe_exception(error))
        return await self._run(call, self._worker, decoded)

    async def cancel(self, call: int) -> None:
        """Cancel a job, and return when it has ended; forget its media if it had ended already."""
        job = self._jobs.get(call)
        if job is not None:
            job.cancel()
            await asyncio.wait([job])
        elif self._media.pop(call, None) is None:
            self._cancelled[call] = None
            if len(self._cancelled) > 4096:  # most are of calls that had ended
                del self._cancelled[next(iter(self._cancelled))]

    async def media(self, call: int, digests: Sequence[str]) -> Any:
        """The bytes of media of an ended episode, each as a result of its own."""
        sources = self._media[call]
        values = tuple(ObjectFrames([sources[digest].data]) for digest in digests)
        return values[0] if len(values) == 1 else values

    async def progress(self, released: Sequence[int]) -> dict[int, ProgressBatch]:
        """The progress of jobs since the last call, as soon as there is some.

        Forgets the media of the calls `released`.
        """
        for call in released:
            self._media.pop(call, None)
        batches: dict[int, ProgressBatch] = {}
        while not batches:  # jobs that ended meanwhile took their progress with them
            await self._has_progress.wait()
            await asyncio.sleep(0.1)  # the calls of a busy actor are bounded
            self._has_progress.clear()
            batches = {call: batch for call, log in self._logs.items() if (batch := log.batch()) is not None}
        return batches

    async def set_update(self, in_flight: InFlight | None) -> None:
        """Note that an update of the weights begins, or has ended (None)."""
        if self._worker is not None:
            self._worker.set_update(in_flight)

    async def stop(self) -> None:
        """Cancel what runs; close the engine and the renderer."""
        if self._worker is not None:
            await self._worker.close()
        if self._engine is not None:
            await self._engine.close()
        if isinstance(self._renderer, RendererPool):
            self._renderer.close()

    async def _make_parts(self) -> None:
        self._engine = await resolve(self._make_engine())
        self._renderer = await resolve(self._make_renderer())
        self._worker = EpisodeWorker(self._make_environment, self._engine, self._renderer, slots=self._slots)

    async def _run(self, call: int, worker: EpisodeWorker, job: EpisodeJob) -> CallResult:
        log = self._logs[call] = ProgressLog()

        def note(event: Progress) -> None:
            log.events.append(event)
            self._has_progress.set()

        task = self._jobs[call] = asyncio.ensure_future(worker.run(job, ProgressObserver(note)))
        try:
            outcome = await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return CallResult()
        finally:
            del self._jobs[call], self._logs[call]
        frames, media = frames_and_media(outcome)
        if media:
            self._media[call] = media
        return CallResult(frames, tuple(media), ProgressBatch(0, tuple(log.events)))
