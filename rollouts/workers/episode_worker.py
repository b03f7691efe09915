"""Runs episodes in the process of their environments: that of the runner, or a worker's."""

import asyncio
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import ChatEngine, Engine, InFlight, SamplingParams, check_engine
from rollouts.episodes.activity import EpisodeObserver
from rollouts.episodes.calls import renderer_pool
from rollouts.episodes.deadlines import UpdatePauses
from rollouts.episodes.episode import check_renderer, record_episode
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EpisodeError,
    EpisodeFailure,
    RemoteFailureError,
    RendererFailedError,
    error_kind,
    is_outage,
)
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.turns import EpisodeSettings
from rollouts.errors import as_unicode
from rollouts.task import MakeEnvironment, Task, check_make_environment, for_one_episode
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer
from transport import wire_type


@wire_type("rollouts.EpisodeJob")
@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One attempt at an episode: all that a worker needs to know of it.

    `episode_id` identifies the attempt within a run: running a job twice gives two recordings of one attempt, of which
    the runner uses one. `index` is the place of the episode in its group, `attempt` counts from 0. `seed` goes to the
    environment, `sampling.seed` to the sampler.
    """

    episode_id: str
    task: Task
    index: int
    attempt: int
    seed: int
    sampling: SamplingParams
    limits: EpisodeLimits
    group_id: str = ""

    def new_trajectory(self) -> Trajectory:
        """The empty trajectory into which the attempt is recorded."""
        return Trajectory(self.episode_id, seed=self.seed, group_id=self.group_id)


#: Characters of a traceback that are sent: its end, where the exception was raised.
MOST_TRACE: Final = 16_000


@wire_type("rollouts.EpisodeOutcome")
@dataclass(frozen=True, slots=True, eq=False)
class EpisodeOutcome:
    """A finished trajectory and, if the attempt failed, the reason. A failed one holds the completed turns."""

    episode: Trajectory
    failure: EpisodeFailure | None = None

    @classmethod
    def of_error(cls, error: EpisodeError) -> Self:
        """The outcome of an attempt that failed with `error`."""
        cause = error.__cause__ or error
        failure = EpisodeFailure(
            type(cause).__name__, as_unicode(error.reason), error_kind(cause), _trace(cause), is_outage(cause)
        )
        return cls(error.trajectory, failure)

    def result(self) -> Trajectory:
        """The trajectory. Raises `EpisodeError`, with a `RemoteFailureError` as its cause, if the attempt failed."""
        if self.failure is None:
            return self.episode
        raise EpisodeError(self.failure.reason, self.episode) from RemoteFailureError(self.failure)


def _trace(error: BaseException) -> str:
    # The code of a user, in which the traceback of an exception shows the line to correct.
    if not isinstance(error, EnvironmentFailedError | RendererFailedError) or error.__cause__ is None:
        return ""
    return as_unicode("".join(traceback.format_exception(error.__cause__)))[-MOST_TRACE:]


class EpisodeWorker:
    """Runs jobs with environments, an engine and a renderer of its own, at most `slots` at a time.

    `make_environment(task)`, `async` or not, returns a new environment for each job. `renderer` may be a
    `RendererPool`; for any other renderer one is made, whose threads do all rendering. The engine, and a pool that was
    given, are not closed. One event loop uses a worker. Raises `ArgumentError`.
    """

    def __init__(
        self,
        make_environment: MakeEnvironment,
        engine: Engine | ChatEngine,
        renderer: Renderer | RendererPool | None,
        *,
        slots: int = 64,
    ) -> None:
        check_make_environment(make_environment)
        check_integer("slots", slots)
        check_engine(engine)
        check_renderer(renderer, engine)
        self._make_environment = make_environment
        self._resources = ExitStack()
        pool = self._resources.enter_context(renderer_pool(renderer))
        pauses = UpdatePauses.of(engine)
        self._settings = EpisodeSettings(engine, pool, SamplingParams(), EpisodeLimits(), pauses=pauses)
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self._running: dict[str, set[asyncio.Task[Any]]] = {}  # by episode id; all but the newest are cancelled

    async def run(self, job: EpisodeJob, observer: EpisodeObserver | None = None) -> EpisodeOutcome:
        """Run a job, when fewer than `slots` run, and return how it ended. Cancelling the call cancels the episode.

        A job whose episode runs already cancels that run: its runner no longer waits for it.
        """
        task = asyncio.current_task()
        assert task is not None
        runs = self._running.setdefault(job.episode_id, set())
        earlier = list(runs)
        runs.add(task)
        try:
            for run in earlier:
                if not run.cancelling():  # a second cancellation would interrupt its cleanup
                    run.cancel()
            if earlier:
                await asyncio.wait(earlier)
            async with self._free:
                return EpisodeOutcome(await self.record(job, job.new_trajectory(), observer))
        except EpisodeError as error:
            return EpisodeOutcome.of_error(error)
        finally:
            runs.discard(task)
            if not runs:
                del self._running[job.episode_id]

    async def record(
        self, job: EpisodeJob, trajectory: Trajectory, observer: EpisodeObserver | None = None
    ) -> Trajectory:
        """Run a job at once into `job.new_trajectory()`, which grows turn by turn. Raises `EpisodeError`."""
        settings = replace(self._settings, sampling=job.sampling, limits=job.limits)
        return await record_episode(
            lambda: self._make_environment(for_one_episode(job.task)), trajectory, settings, observer=observer
        )

    def set_update(self, in_flight: InFlight | None) -> None:
        """An update of the weights begins, or has ended (None); deadlines do not count it."""
        self._settings.pauses.set_update(self, in_flight)

    async def cancel_all(self) -> None:
        """Cancel what runs, and wait for it."""
        tasks = [task for runs in self._running.values() for task in runs]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cancel what runs, and end the threads of the renderer. A second call does nothing."""
        await self.cancel_all()
        self.release()

    def release(self) -> None:
        """End the threads of the renderer, without waiting for a call that is under way."""
        self._resources.close()
