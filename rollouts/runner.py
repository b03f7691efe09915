"""Many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.environment import Environment
from rollouts.episode import EpisodeSetting, OnEnd, check_on_end, new_trajectory, play_episode
from rollouts.episode_errors import EpisodeError, EpisodesError
from rollouts.episode_renderer import renderer_pool
from rollouts.error_texts import is_unicode
from rollouts.errors import EpisodeArgumentError
from rollouts.trajectory.tree import Trajectory
from rollouts.user_code.numbers import whole_number


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play: the environment's seed, the sampler's seed, and the group it is compared within.

    Seeds may be numpy integers. Raises `EpisodeArgumentError` for anything else.
    """

    seed: int
    sampling_seed: int | None = None
    group_id: str = ""
    episode_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "sampling_seed"):
            value = getattr(self, name)
            if value is None and name == "sampling_seed":
                continue
            number = whole_number(value)
            if number is None:
                raise EpisodeArgumentError(name, value, "pass an integer")
            object.__setattr__(self, name, number)
        for name in ("group_id", "episode_id"):
            value = getattr(self, name)
            if (value is not None or name == "group_id") and not (isinstance(value, str) and is_unicode(value)):
                raise EpisodeArgumentError(name, value, "pass text that UTF-8 can hold")


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
    """Play all `specs`, at most `concurrency` at a time, each in an environment of its own; results in their order.

    There is one trajectory a spec. An episode that fails, or whose environment cannot be made, is one with the
    completed turns and `error`; the others go on. With `on_error="raise"` the first failure stops the others, and
    `EpisodesError` is raised, which holds a trajectory a spec too.

    `sampling.seed` is replaced by the `sampling_seed` of each spec. `renderer` may be a `RendererPool`; of any other
    one pool is made for the run.

    `on_end` is called with each trajectory as soon as its episode has ended, however it ended; what it raises stops
    the run. A run that is cancelled raises `CancelledError`; `on_end` has had the finished episodes then, and gets
    those that the cancellation broke off, with their completed turns. Raises `EpisodeArgumentError` before anything is
    played for an argument that is not what it has to be.
    """
    _check_arguments(specs, concurrency, on_error)
    check_on_end(on_end)
    EpisodeSetting(engine, renderer, sampling, max_turns).check()  # type: ignore[arg-type]  # the pool comes below
    places = asyncio.Semaphore(concurrency)
    trajectories = [new_trajectory(seed=s.seed, group_id=s.group_id, episode_id=s.episode_id) for s in specs]
    failures: list[EpisodeError] = []

    async def play(spec: EpisodeSpec, trajectory: Trajectory, setting: EpisodeSetting) -> None:
        async with places:
            try:
                seeded = replace(setting, sampling=replace(sampling, seed=spec.sampling_seed))
                await play_episode(make_environment, trajectory, seeded, on_end)
            except EpisodeError as failure:
                if on_error == "raise":
                    failures.append(failure)
                    raise

    with renderer_pool(renderer) as pool:
        setting = EpisodeSetting(engine, pool, sampling, max_turns)
        try:
            async with asyncio.TaskGroup() as group:
                for spec, trajectory in zip(specs, trajectories, strict=True):
                    group.create_task(play(spec, trajectory, setting))
        except BaseExceptionGroup as raised:
            others = [error for error in raised.exceptions if not isinstance(error, EpisodeError)]
            if others:
                raise others[0] from None
    if failures:
        for trajectory in trajectories:
            _finish_unplayed(trajectory)
        raise EpisodesError(failures, trajectories) from failures[0]
    return trajectories


def _check_arguments(specs: Sequence[EpisodeSpec], concurrency: int, on_error: str) -> None:
    if not isinstance(specs, Sequence) or not all(isinstance(spec, EpisodeSpec) for spec in specs):
        raise EpisodeArgumentError("specs", specs, "pass a list of EpisodeSpec")
    if (whole_number(concurrency) or 0) < 1:
        raise EpisodeArgumentError("concurrency", concurrency, "pass an integer from 1")
    if on_error not in ("return", "raise"):
        raise EpisodeArgumentError("on_error", on_error, 'pass "return" or "raise"')


def _finish_unplayed(trajectory: Trajectory) -> None:
    """An episode that never began, for others were failing."""
    if not trajectory.finished:
        trajectory.error = "never began: another episode of the run failed before"
        trajectory.finish()
