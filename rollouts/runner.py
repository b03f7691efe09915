"""Many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from renderers import MultimodalRenderer
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.environment import Environment
from rollouts.episode import run_episode
from rollouts.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play: the environment's seed, the sampler's seed, and the group it is compared within."""

    seed: int
    sampling_seed: int | None = None
    group_id: str = ""
    episode_id: str | None = None


async def run_episodes(
    make_environment: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    *,
    engine: Engine,
    renderer: MultimodalRenderer,
    sampling: SamplingParams,
    max_turns: int,
    concurrency: int = 1024,
) -> list[Trajectory]:
    """Play all `specs`, at most `concurrency` at a time, each in an environment of its own; results in their order.

    If one fails, the others are cancelled and its `EpisodeError` is raised.
    """
    places = asyncio.Semaphore(concurrency)

    async def play(spec: EpisodeSpec) -> Trajectory:
        async with places:
            return await run_episode(
                make_environment(),
                engine=engine,
                renderer=renderer,
                sampling=replace(sampling, seed=spec.sampling_seed),
                max_turns=max_turns,
                seed=spec.seed,
                group_id=spec.group_id,
                episode_id=spec.episode_id,
            )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(spec)) for spec in specs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
