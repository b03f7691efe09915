"""Cancelling a consumer aborts requests on the engine, leaves no task behind, and loses no group."""

import asyncio
import gc

import pytest
from runner_world import Counting, HeldEngine, assert_no_task_is_left, groups_of, make_runner, tasks

from rollouts.errors import RolloutsError
from rollouts.rewards import GroupReward
from rollouts.runner import RetryPolicy, Task
from rollouts.testing import ScriptedEngine


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def ended(engine):
    while engine.in_flight:
        engine.changed.clear()
        await engine.changed.wait()


@pytest.mark.parametrize("point", ["make", "reset", "step", "engine", "retry", "source", "reward", "capacity"])
async def test_closing_leaves_no_task_wherever_the_work_waits(renderer, point):
    concurrency = 1 if point == "capacity" else 64
    point = "engine" if point == "capacity" else point  # the second episode of the group waits for the first

    reached = asyncio.Event()

    async def stop(at):
        if at == point:
            reached.set()
            await asyncio.Event().wait()

    class Environment(Counting):
        async def reset(self, seed):
            await stop("reset")
            return super().reset(seed)

        async def step(self, assistant):
            await stop("step")
            return super().step(assistant)

    async def make(task):
        await stop("make")
        return Environment(task)

    async def generate(request):
        await stop("engine")
        if point == "retry":
            reached.set()
            raise ConnectionError("gone")
        return "yes"

    async def source():
        for task in tasks(3):
            yield task
        await stop("source")

    async def reward(episodes):
        await stop("reward")
        return [0.0] * len(episodes)

    options = {
        "group_size": 2,
        "concurrency": concurrency,
        "retry": RetryPolicy(first_delay=3600, max_delay=3600),
        "group_rewards": [GroupReward("r", 1.0, reward)],
    }
    runner = make_runner(renderer, make, ScriptedEngine(generate, renderer=renderer), **options)
    stream = runner.stream(source())

    async def consume():
        async for _ in stream:
            pass

    consuming = asyncio.create_task(consume())
    await reached.wait()
    await cancelled(consuming)
    await runner.close()
    assert_no_task_is_left()
    assert runner.metrics()["episodes_running"] == 0


@pytest.mark.slow
async def test_a_stream_that_is_left_by_break_cancels_its_episodes(renderer):
    async def groups_of_released(engine, runner):
        engine.release.set()
        return await groups_of(runner, [Task("a"), Task("b")])

    engine = HeldEngine(renderer)
    async with make_runner(renderer, engine=engine, concurrency=3) as runner:
        engine.release.set()
        async for _ in runner.stream(tasks(1000)):
            engine.release.clear()
            break
        gc.collect()
        await ended(engine)
        for _ in range(100):  # whatever would start further groups has time to
            await asyncio.sleep(0)
        assert not engine.in_flight
        again = await groups_of_released(engine, runner)
        assert len(again) == 2
    assert_no_task_is_left()


async def test_a_second_wait_for_the_same_groups_is_an_error_and_another_stream_is_not(renderer):
    engine = HeldEngine(renderer)
    async with make_runner(renderer, engine=engine, tasks=tasks(2)) as runner:
        collecting = asyncio.create_task(runner.collect(2))
        await engine.wait_for_in_flight(1)
        with pytest.raises(RolloutsError, match="another call waits for the next groups"):
            await runner.collect(1)
        streaming = asyncio.create_task(groups_of(runner, tasks(2)))
        engine.release.set()
        assert len(await collecting) == len(await streaming) == 2


async def test_a_second_cancellation_during_the_first_loses_no_group(renderer):
    both_step, first_ends, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stepping, made = [], []

    class SlowToEnd(Counting):
        async def step(self, assistant):
            stepping.append(self.task.task_id)
            if len(stepping) == 2:
                both_step.set()
            try:
                await asyncio.Event().wait()
            finally:
                first_ends.set()
                await may_end.wait()

    def make(task):
        made.append(task.task_id)
        return (SlowToEnd if len(made) <= 2 else Counting)(task)

    async with make_runner(renderer, make, concurrency=2, tasks=tasks(3)) as runner:
        collecting = asyncio.create_task(runner.collect(3))
        await both_step.wait()
        collecting.cancel()
        await first_ends.wait()
        await cancelled(collecting)
        may_end.set()
        groups = await runner.collect(3)
        assert sorted(group.task.task_id for group in groups) == ["t0", "t1", "t2"]
