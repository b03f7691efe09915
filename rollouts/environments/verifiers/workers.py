"""Episodes of verifiers environments in a `Runner`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from verifiers.v1.env import Env
from verifiers.v1.trace import Error, Trace

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import ChatEngine, Engine, InFlight
from rollouts.environments.verifiers.client import EngineClient, Rollout
from rollouts.environments.verifiers.episodes import EpisodeRun, VerifiersTasks
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EpisodeError,
    EpisodeFailure,
    ErrorKind,
    ends_task,
    error_kind,
    is_outage,
)
from rollouts.errors import as_unicode
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer
from rollouts.workers.episode_worker import MOST_TRACE, EpisodeJob, EpisodeOutcome
from rollouts.workers.protocol import JobObserver
from rollouts.workers.worker_pool import WorkerPool


class VerifiersWorkers(WorkerPool):
    """Workers of a `Runner` that play a verifiers environment in this process, with verifiers' harnesses and scoring.

        async with VerifiersWorkers(env, engine, renderer) as workers:
            async with Runner(None, engine, None, sampling=sampling, group_size=4, workers=workers) as runner:
                async for group in runner.stream(VerifiersTasks(env)):
                    ...

    At most `slots` episodes run at once. The tasks are `VerifiersTasks(env)`, or others whose seed is an
    index in `env.taskset`. `model` is the name that harnesses send. The engine, and a pool that was given,
    are not closed. A `ChatEngine` has no renderer (None).

    The limits of the runner count the turns and tokens of each agent's rollout by itself. A rollout that
    reaches one ends there and is scored; one whose `turn_seconds` or `episode_seconds` pass is not:
    verifiers' own `agent.timeout.rollout` ends a rollout that is scored. What verifiers or a task raises is
    of the kind "environment" for `RetryPolicy`, a failure of the engine of the kind of its error. Retries
    that are configured in verifiers come before those of the runner.

    An episode is one trajectory. Where several agents sampled from the engine, or one several times, it has
    their turns one rollout after the other, each with the name of its agent; rewards and metrics are sums,
    and the names of the metrics begin with that of the agent. Raises `ArgumentError`.
    """

    def __init__(
        self,
        env: Env,
        engine: Engine | ChatEngine,
        renderer: Renderer | RendererPool | None,
        *,
        model: str = "policy",
        slots: int = 1024,
    ) -> None:
        super().__init__()
        self._env = env
        self._client = EngineClient(engine, renderer)
        self._model = model
        self._slots = check_integer("slots", slots)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            client = opened.enter_context(self._client)
            await opened.enter_async_context(self._env.serving())
            self.add("verifiers", self._slots, _Player(self._env, client, self._model))
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs, and end the environment's servers. Called by the task that has entered the context."""
        await super().close()
        await self._opened.aclose()


class _Player:
    """A `RemoteWorker` of this process."""

    def __init__(self, env: Env, client: EngineClient, model: str) -> None:
        self._env = env
        self._tasks = VerifiersTasks(env)
        self._client = client
        self._model = model

    async def run(self, job: EpisodeJob, observer: JobObserver) -> EpisodeOutcome:
        task = self._tasks.verifiers_task(job.seed)
        settings = replace(self._client.settings, sampling=job.sampling, limits=job.limits)
        episode = EpisodeRun(self._env, self._client, settings, observer)
        raised: EnvironmentFailedError | None = None
        try:
            await episode.play(task, self._model)
        except BaseException as error:  # an environment may raise anything
            if ends_task(error):
                raise
            raised = EnvironmentFailedError(type(self._env).__name__, "run", error)
            raised.__cause__ = error
        finally:
            rollouts = episode.end("" if raised is None else str(raised))
        trajectory = _joined(rollouts) if rollouts else job.new_trajectory()
        trajectory.episode_id, trajectory.seed, trajectory.group_id = job.episode_id, job.seed, job.group_id
        if raised is not None:
            trajectory.error = str(raised)
        elif not rollouts:
            trajectory.error = "no agent was run"
        elif episode.is_complete:
            trajectory.error = ""
        trajectory.finish()
        if raised is not None:
            failed = EpisodeError(str(raised), trajectory)
            failed.__cause__ = raised
            return EpisodeOutcome.of_error(failed)
        return EpisodeOutcome(trajectory, _failure(rollouts, trajectory.error) if trajectory.error else None)

    def set_update(self, in_flight: InFlight | None) -> None:
        self._client.settings.pauses.set_update(self, in_flight)


def _joined(rollouts: Sequence[tuple[Trace, Rollout]]) -> Trajectory:
    """The trajectory of an episode: that of its rollout, or the first with those of the others after it."""
    trajectories = [rollout.trajectory for _, rollout in rollouts]
    first, *others = trajectories
    if not others:
        return first
    names = [trace.agent.name for trace, _ in rollouts]
    end = max(one.started_at + one.seconds for one in trajectories)
    metrics: dict[str, float] = {}
    for name, one in zip(names, trajectories, strict=True):
        for metric, value in one.metrics.items():
            metrics[f"{name}/{metric}"] = metrics.get(f"{name}/{metric}", 0.0) + value
    first.turns = [replace(turn, agent=names[0]) for turn in first.turns]
    for name, one in zip(names[1:], others, strict=True):
        start = len(first.nodes)
        first.nodes = [
            *first.nodes,
            *(replace(node, parent=-1 if node.parent < 0 else node.parent + start) for node in one.nodes),
        ]
        first.turns = [*first.turns, *(replace(turn, node=turn.node + start, agent=name) for turn in one.turns)]
    first.forks = sum(one.forks for one in trajectories)
    first.done = all(one.done for one in trajectories)
    first.truncated = any(one.truncated for one in trajectories)
    first.truncation_reason = next((one.truncation_reason for one in trajectories if one.truncation_reason), "")
    first.error = next((one.error for one in trajectories if one.error), "")
    first.metrics = metrics
    first.started_at = min(one.started_at for one in trajectories)
    first.seconds = max(end - first.started_at, 0.0)
    return first


def _failure(rollouts: Sequence[tuple[Trace, Rollout]], reason: str) -> EpisodeFailure:
    """Why an episode failed: the error of the engine where that is what verifiers has recorded, else verifiers'."""
    for trace, rollout in rollouts:
        last = trace.errors[-1] if trace.errors else None
        if not rollout.trajectory.error or last is None or trace.ok:
            continue
        cause = rollout.failure
        if last.type == "ProviderError" and cause is not None:
            return EpisodeFailure(type(cause).__name__, reason, error_kind(cause), is_outage=is_outage(cause))
        return EpisodeFailure(last.type, reason, _kind(last), as_unicode(last.traceback or "")[-MOST_TRACE:])
    return EpisodeFailure("EnvError", reason, "environment")


def _kind(error: Error) -> ErrorKind | None:
    """The kind of an error of verifiers; a `ProviderError` here is that of a judge's own client."""
    if error.type != "ProviderError":
        return "environment"
    status = error.status_code or 0  # 429: too many requests
    return "engine" if status == 429 or status >= 500 else None
