"""Many episodes at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.episodes.environment import Environment
from rollouts.episodes.episode import EpisodeSpec, OnEnd, check_on_end, check_settings, record_episode
from rollouts.episodes.errors import EpisodeArgumentError, EpisodeError, EpisodesError
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.renderer_calls import renderer_pool
from rollouts.episodes.turns import EpisodeSettings
from rollouts.numbers import whole_number
from rollouts.signatures import call_error
from rollouts.trajectory.tree import Trajectory


async def run_episodes(
    make_environment: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    *,
    engine: Engine,
    renderer: Renderer | RendererPool,
    sampling: SamplingParams,
    max_turns: int,
    concurrency: int = 1024,
    on_error: Literal["return", "raise"] = "return",
    on_end: OnEnd | None = None,
) -> list[Trajectory]:
    """Run all `specs`, at most `concurrency` at a time, each in a new environment; one trajectory per spec, in order.

    If an episode fails, or its environment cannot be made, its trajectory has the completed turns and `error`, and the
    other episodes continue. With `on_error="raise"` the first failure stops the other episodes and raises
    `EpisodesError`, which also holds one trajectory per spec.

    `sampling.seed` is replaced by the `sampling_seed` of each spec. `renderer` may be a `RendererPool`; for any other
    renderer one pool is made for the run.

    `on_end` is called with each trajectory as soon as its episode has ended, also when it failed; an exception from
    `on_end` stops the run. A cancelled run raises `CancelledError`; `on_end` receives every episode that had begun,
    the cancelled ones with their completed turns. Raises `EpisodeArgumentError` for an invalid argument, before any
    episode begins.
    """
    _check_arguments(make_environment, specs, concurrency, on_error)
    check_on_end(on_end)
    check_settings(engine, renderer, sampling, max_turns)
    semaphore = asyncio.Semaphore(concurrency)
    trajectories = [spec.new_trajectory() for spec in specs]
    failures: list[EpisodeError] = []

    async def run(spec: EpisodeSpec, trajectory: Trajectory, settings: EpisodeSettings) -> None:
        async with semaphore:
            try:
                seeded = replace(settings, sampling=replace(sampling, seed=spec.sampling_seed))
                await record_episode(make_environment, trajectory, seeded, on_end)
            except EpisodeError as failure:
                if on_error == "raise":
                    failures.append(failure)
                    raise

    with renderer_pool(renderer) as pool:
        settings = EpisodeSettings(engine, pool, sampling, EpisodeLimits(max_turns=max_turns))
        try:
            async with asyncio.TaskGroup() as group:
                for spec, trajectory in zip(specs, trajectories, strict=True):
                    group.create_task(run(spec, trajectory, settings))
        except BaseExceptionGroup as raised:
            others = [error for error in raised.exceptions if not isinstance(error, EpisodeError)]
            if others:
                raise others[0] from None
    if failures:
        for trajectory in trajectories:
            if not trajectory.finished:
                trajectory.error = "did not begin: another episode of the run failed first"
                trajectory.finish()
        raise EpisodesError(failures, trajectories) from failures[0]
    return trajectories


def _check_arguments(
    make_environment: Callable[[], Environment], specs: Sequence[EpisodeSpec], concurrency: int, on_error: str
) -> None:
    if not callable(make_environment):
        rule = "pass a class or a function that returns a new environment for each episode"
        raise EpisodeArgumentError("make_environment", make_environment, rule)
    if (reason := call_error(make_environment, [])) is not None:
        rule = "pass a function without arguments; `Runner` is for environments of tasks"
        raise EpisodeArgumentError("make_environment", make_environment, f"{reason}; {rule}")
    if not isinstance(specs, Sequence) or not all(isinstance(spec, EpisodeSpec) for spec in specs):
        raise EpisodeArgumentError("specs", specs, "pass a list of EpisodeSpec")
    ids = Counter(spec.episode_id for spec in specs if spec.episode_id is not None)
    if ids and (most := ids.most_common(1)[0])[1] > 1:
        rule = f"{most[1]} specs have it: give each its own, or None for a random one, and the same group_id to a group"
        raise EpisodeArgumentError("episode_id", most[0], rule)
    if (whole_number(concurrency) or 0) < 1:
        raise EpisodeArgumentError("concurrency", concurrency, "pass an integer of at least 1")
    if on_error not in ("return", "raise"):
        raise EpisodeArgumentError("on_error", on_error, 'pass "return" or "raise"')
