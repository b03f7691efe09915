"""Once its workers are closed, a runner that has no finished group raises an error each time, and never waits."""

from __future__ import annotations

import asyncio

import pytest
from local_workers import local_pool
from runner_world import Counting, HeldEngine, tasks

from rollouts import SamplingParams
from rollouts.runner import Runner
from rollouts.workers import EpisodeWorker, WorkersClosedError


async def test_a_stream_whose_workers_are_closed_while_its_groups_run_raises_each_time(renderer):
    engine = HeldEngine(renderer)
    pool, _ = local_pool(lambda: EpisodeWorker(Counting, engine, renderer), 1, slots=2)
    async with Runner(None, None, None, sampling=SamplingParams(max_tokens=8), workers=pool) as runner:
        stream = runner.stream(tasks(6))
        first = asyncio.ensure_future(anext(stream))
        await engine.wait_for_in_flight(2)
        await pool.close()
        with pytest.raises(WorkersClosedError):
            await first
        for _ in range(3):
            with pytest.raises(WorkersClosedError):
                await asyncio.wait_for(anext(stream), 10)
