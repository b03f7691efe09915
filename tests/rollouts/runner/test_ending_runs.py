"""What ends a run ends it: closed runners and streams start nothing, and no environment holds up the end."""

import asyncio
import gc
from contextlib import suppress

import pytest
from runner_world import Counting, HeldEngine, assert_no_task_is_left, groups_of, make_runner, tasks

from rollouts.errors import RolloutsError


async def test_closing_a_runner_ends_the_wait_of_its_consumer_and_starts_no_episode(renderer):
    made = []

    class Made(Counting):
        def __init__(self, task):
            super().__init__(task)
            made.append(task.task_id)

    engine = HeldEngine(renderer)
    runner = make_runner(renderer, Made, engine)
    consumer = asyncio.create_task(groups_of(runner, tasks(3)))
    await engine.wait_for_in_flight(3)
    await runner.close()
    with pytest.raises(RolloutsError, match="this Runner is closed"):
        await asyncio.wait_for(consumer, 5)
    assert_no_task_is_left()
    assert sorted(made) == ["t0", "t1", "t2"]


class Stubborn(Counting):
    """Ignores that `stays_in`, its `step` or its `close`, is cancelled."""

    stays_in = "step"

    async def step(self, assistant):
        await self._stay("step")
        return super().step(assistant)

    async def close(self):
        await self._stay("close")

    async def _stay(self, method):
        if method == self.stays_in:
            self.staying.set()
        while method == self.stays_in and not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await self.released.wait()


class StubbornInClose(Stubborn):
    stays_in = "close"


def run_with_stubborn(monkeypatch, world):
    """Run `world()`. Only then may the environments end: `asyncio.run` waits for the tasks that are left."""
    monkeypatch.setattr("rollouts.episodes.environment_calls.CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("rollouts.episodes.episode.END_SECONDS", 0.3)

    async def run():
        monkeypatch.setattr(Stubborn, "staying", asyncio.Event(), raising=False)
        monkeypatch.setattr(Stubborn, "released", asyncio.Event(), raising=False)
        try:
            await asyncio.wait_for(world(), 30)
        finally:
            Stubborn.released.set()

    asyncio.run(run())


def test_an_environment_that_ignores_its_cancellation_does_not_hold_up_the_end(renderer, monkeypatch, caplog):
    async def world():
        async with make_runner(renderer, Stubborn) as runner:
            consumer = asyncio.create_task(groups_of(runner, tasks(2)))
            await Stubborn.staying.wait()
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer

    run_with_stubborn(monkeypatch, world)
    assert "episode t0/0.0 is left" in caplog.text


@pytest.mark.slow
def test_an_environment_that_does_not_end_its_close_gives_its_place_to_other_episodes(renderer, monkeypatch, caplog):
    async def world():
        async with make_runner(renderer, StubbornInClose, concurrency=1) as runner:
            groups = await groups_of(runner, tasks(2))
        assert [(group.task.task_id, group.rewards.tolist()) for group in groups] == [("t0", [2.0]), ("t1", [2.0])]

    run_with_stubborn(monkeypatch, world)
    assert "episode t1/0.0 is left" in caplog.text


async def test_an_environment_has_its_time_to_close_whoever_cancels_meanwhile(renderer, caplog):
    closing, closed = asyncio.Event(), []

    class ClosesSlowly(Counting):
        async def close(self):
            closing.set()
            await asyncio.sleep(0.3)
            closed.append(self.task.task_id)

    async with make_runner(renderer, ClosesSlowly) as runner:
        consumer = asyncio.create_task(groups_of(runner, tasks(2)))
        await closing.wait()
        consumer.cancel()
        await asyncio.sleep(0.05)
        await runner.close()
        assert sorted(closed) == ["t0", "t1"]
        with pytest.raises(asyncio.CancelledError):
            await consumer
    assert_no_task_is_left()
    assert "is left" not in caplog.text


@pytest.mark.slow
def test_a_runner_that_has_begun_groups_and_is_not_closed_warns_of_it_when_it_is_collected(renderer):
    async def world():
        runner = make_runner(renderer, tasks=tasks(3))
        assert len(await runner.collect(1)) == 1

    def forget_the_runner():
        asyncio.run(world())
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"Runner .* not closed; use `async with .* `await runner.close\(\)`$"):
        forget_the_runner()
