"""Runs episodes in the process of their environments: that of the runner, or a worker's."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import Engine, InFlight, SamplingParams
from rollouts.episodes.activity import EpisodeObserver
from rollouts.episodes.deadlines import UpdatePauses
from rollouts.episodes.episode import check_engine, check_renderer, record_episode
from rollouts.episodes.errors import EpisodeError
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.renderer_calls import renderer_pool
from rollouts.episodes.turns import EpisodeSettings
from rollouts.errors import ArgumentError
from rollouts.numbers import whole_number
from rollouts.task import MakeEnvironment, check_make_environment, for_one_episode
from rollouts.trajectory.tree import Trajectory
from rollouts.workers.episode_job import EpisodeJob
from rollouts.workers.episode_outcome import EpisodeOutcome


class EpisodeWorker:
    """Runs jobs with environments, an engine and a renderer of its own, at most `slots` at a time.

    `make_environment(task)`, `async` or not, returns a new environment for each job. `renderer` may be a
    `RendererPool`; for any other renderer one is made, whose threads do all rendering. The engine, and a pool that was
    given, are not closed. One event loop uses a worker. Raises `ArgumentError`.
    """

    def __init__(
        self,
        make_environment: MakeEnvironment,
        engine: Engine,
        renderer: Renderer | RendererPool,
        *,
        slots: int = 64,
    ) -> None:
        check_make_environment(make_environment)
        if (whole_number(slots) or 0) < 1:
            raise ArgumentError("slots", slots, "pass an integer of at least 1")
        check_engine(engine)
        check_renderer(renderer)
        self._make_environment = make_environment
        self._resources = ExitStack()
        pool = self._resources.enter_context(renderer_pool(renderer))
        pauses = UpdatePauses.of(engine)
        self._settings = EpisodeSettings(engine, pool, SamplingParams(), EpisodeLimits(), pauses=pauses)
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self._running: dict[str, set[asyncio.Task[Any]]] = {}  # by episode id; all but the newest are cancelled

    @property
    def running(self) -> tuple[str, ...]:
        """The ids of the episodes that run, or wait until another one ends."""
        return tuple(self._running)

    async def run(self, job: EpisodeJob, observer: EpisodeObserver | None = None) -> EpisodeOutcome:
        """Run a job, when fewer than `slots` run, and return how it ended. Cancelling the call cancels the episode.

        A job whose episode runs already cancels that run: its orchestrator no longer waits for it.
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
        """An update of the weights begins (what happens to running requests), or has ended (None).

        The time for which requests wait for an update does not count for the deadlines of episodes.
        """
        if in_flight is None:
            self._settings.pauses.end(self)
        else:
            self._settings.pauses.begin(self, in_flight)

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
