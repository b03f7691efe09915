"""Once its workers are closed, a runner that has no finished group raises an error each time, and never waits."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest
from local_workers import local_pool
from runner_world import Counting, HeldEngine, tasks

from rollouts import SamplingParams, Task
from rollouts.runner import Asynchronous, Runner
from rollouts.runner.events import GroupFinished
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeWorker, WorkersClosedError


def new_runner(workers, **options):
    return Runner(None, None, None, sampling=SamplingParams(max_tokens=8), workers=workers, **options)


async def raises_each_time(call):
    for _ in range(3):
        with pytest.raises(WorkersClosedError):
            await asyncio.wait_for(call(), 10)


async def test_a_stream_whose_workers_are_closed_while_its_groups_run_raises_each_time(renderer):
    engine = HeldEngine(renderer)
    pool, _ = local_pool(lambda: EpisodeWorker(Counting, engine, renderer), 1, slots=2)
    async with new_runner(pool) as runner:
        stream = runner.stream(tasks(6))
        first = asyncio.ensure_future(anext(stream))
        await engine.wait_for_in_flight(2)
        await pool.close()
        with pytest.raises(WorkersClosedError):
            await first
        await raises_each_time(lambda: anext(stream))


async def test_groups_that_had_finished_before_the_workers_were_closed_can_be_collected(renderer):
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    pool, _ = local_pool(lambda: EpisodeWorker(Counting, engine, renderer), 1)
    source = (Task(str(number)) for number in itertools.count())
    events, third = [], asyncio.Event()

    def listen(event):
        events.append(event)
        if sum(isinstance(one, GroupFinished) for one in events) == 3:
            third.set()

    async with new_runner(pool, tasks=source, mode=Asynchronous(1), listeners=[listen]) as runner:
        await runner.collect(2)
        await third.wait()
        await pool.close()
        finished = 0
        with suppress(WorkersClosedError):  # of the groups that ran; it comes after those that had finished
            while True:
                finished += len(await runner.collect(1))
        assert finished >= 1
        for _ in range(10):  # one error for each group that ran, and then one for each call
            with pytest.raises(WorkersClosedError):
                await asyncio.wait_for(runner.collect(1), 10)
