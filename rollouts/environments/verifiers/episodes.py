"""Episodes of verifiers environments as trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from verifiers.v1.clients import ModelContext
from verifiers.v1.env import Env
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

from renderers import Renderer, RendererPool
from rollouts.calls import gathered
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.environments.verifiers.client import EngineClient, EngineClientConfig
from rollouts.episodes.episode import EpisodeSpec, OnEnd, check_on_end
from rollouts.errors import ArgumentError, describe_exception
from rollouts.trajectory.traces import record_outcome
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer


async def run_verifiers_episodes(
    env: Env,
    specs: Sequence[EpisodeSpec],
    *,
    engine: Engine,
    renderer: Renderer | RendererPool,
    sampling: SamplingParams,
    model: str = "policy",
    concurrency: int = 1024,
    on_end: OnEnd | None = None,
) -> list[Trajectory]:
    """Run episodes of a verifiers environment; return a trajectory for each agent that the engine plays.

    `seed` of a spec is the index of its task in `env.taskset`; `sampling_seed` is the seed of its samples. The order is
    that of `specs`, so an environment with one agent gives one trajectory for each spec; the id of a further agent's
    trajectory is that of the episode with "-1", "-2"... behind it. Roles with a client of their own (a judge) have
    none. `model` is the name that harnesses send. Turns, tokens and time are limited by the configuration of the
    agents.

    A failed episode has `error` and its completed turns. `on_end` is called with each trajectory as soon as its episode
    has ended, also when it is cancelled. Raises `ArgumentError` for an invalid argument.
    """
    check_on_end(on_end)
    check_integer("concurrency", concurrency)
    tasks = _tasks(env, specs)
    semaphore = asyncio.Semaphore(concurrency)
    ended: list[list[Trajectory]] = [[] for _ in specs]

    async def run(spec: EpisodeSpec, client: EngineClient, trajectories: list[Trajectory]) -> None:
        context = ModelContext(model=model, client=client.config, sampling=SamplingConfig(seed=spec.sampling_seed))
        begun: list[Trace] = []
        traces, error = begun, ""
        (slot,) = env.slots(tasks[spec.seed])
        try:
            episode = await env.run_slot(slot, context, semaphore, on_trace=begun.append)
            traces = episode.traces
            if not episode.ok and episode.errors:
                error = f"{episode.errors[-1].type}: {episode.errors[-1].message}"
        except BaseException as failure:
            error = describe_exception(failure)
            raise
        finally:
            own = [trace for trace in traces if isinstance(trace.agent.config.client, EngineClientConfig)]
            trajectories += [_ended(spec, client.forget(trace.id), trace, error) for trace in own]
            for trace in begun:  # those that verifiers has discarded for a new attempt
                client.forget(trace.id)
            if not trajectories:
                trajectories.append(_ended(spec, spec.new_trajectory(), None, error or "no agent was run"))
            for number, trajectory in enumerate(trajectories):
                if number:
                    trajectory.episode_id = f"{trajectories[0].episode_id}-{number}"
                trajectory.finish()
            if on_end is not None:
                with ExitStack() as handing_over:  # all of them, also where `on_end` raises for one
                    for trajectory in reversed(trajectories):
                        handing_over.callback(on_end, trajectory)

    with EngineClient(engine, renderer, sampling=sampling) as client:
        async with env.serving():
            await gathered(run(spec, client, trajectories) for spec, trajectories in zip(specs, ended, strict=True))
    return [trajectory for trajectories in ended for trajectory in trajectories]


def _tasks(env: Env, specs: Sequence[EpisodeSpec]) -> dict[int, Task]:
    """The tasks of the specs by index. Raises `ArgumentError`."""
    missing = {spec.seed for spec in specs}
    tasks: dict[int, Task] = {}
    for index, task in enumerate(env.taskset if missing else ()):
        if index in missing:
            tasks[index] = task
            missing.remove(index)
        if not missing or index >= max(missing):
            break
    if missing:
        raise ArgumentError("seed", min(missing), "pass the index of a task of the environment's taskset")
    return tasks


def _ended(spec: EpisodeSpec, trajectory: Trajectory, trace: Trace | None, error: str) -> Trajectory:
    trajectory.seed, trajectory.group_id = spec.seed, spec.group_id
    if spec.episode_id is not None:
        trajectory.episode_id = spec.episode_id
    if trace is not None:
        record_outcome(trajectory, trace)
    if error and (trace is None or trace.ok or not trace.errors):
        trajectory.error, trajectory.done = error, False
    return trajectory
