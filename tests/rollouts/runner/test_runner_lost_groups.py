"""No group is lost silently, whatever the parts of a run raise: base exceptions, cancellations of something else."""

import asyncio

import pytest
from misbehaviour import PanicError
from runner_world import Counting, make_runner, run_groups, tasks

from rollouts import ThreadedEnvironment
from rollouts.rewards import GroupReward
from rollouts.runner import GroupFailedError


async def wait_for_something_cancelled():
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


@pytest.mark.parametrize("group_size", [1, 2])
def test_an_environment_whose_close_awaits_what_it_has_cancelled_loses_no_group(renderer, group_size):
    class Background(Counting):
        async def close(self):
            await wait_for_something_cancelled()

    groups, _ = run_groups(renderer, tasks(3), Background, group_size=group_size)
    assert sorted(groups) == ["t0", "t1", "t2"]
    assert all(episode.done for group in groups.values() for episode in group.episodes)


@pytest.mark.parametrize("place", ["on the event loop", "in a thread"])
@pytest.mark.parametrize(
    "error",
    [GeneratorExit(), SystemExit("bad argv"), BaseExceptionGroup("of two", [GeneratorExit(), ValueError("x")])],
)
def test_an_exit_of_an_environment_fails_its_episode_and_no_other_of_the_group(renderer, error, place):
    class Exits(Counting):
        number = 0

        def step(self, assistant):
            Exits.number += 1
            if Exits.number == 1:
                raise error
            return super().step(assistant)

    def make(task):
        return Exits(task) if place == "on the event loop" else ThreadedEnvironment(Exits(task))

    groups, _ = run_groups(renderer, tasks(1), make, group_size=3)
    errors = [episode.error for episode in groups["t0"].episodes]
    assert sorted(map(bool, errors)) == [False, False, True]
    assert type(error).__name__ in max(errors) or "of two" in max(errors)


@pytest.mark.parametrize("error", [PanicError, asyncio.CancelledError, GeneratorExit, SystemExit])
@pytest.mark.parametrize("part", ["skip_group", "a group reward"])
async def test_a_base_exception_of_skip_group_or_a_group_reward_is_raised_in_place_of_the_group(renderer, part, error):
    def fail_for_t0(is_t0):
        if is_t0:
            raise error("of a library")
        return False

    async def reward(episodes):
        return [float(fail_for_t0(episodes[0].group_id == "t0"))] * len(episodes)

    options = {"group_rewards": [GroupReward("r", 1.0, reward)]}
    if part == "skip_group":
        options = {"skip_group": lambda group: fail_for_t0(group.task.task_id == "t0")}

    async with make_runner(renderer, concurrency=1, **options) as runner:
        stream = runner.stream(tasks(2))
        with pytest.raises(GroupFailedError, match=f"t0: .*({error.__name__}|something that was cancelled)"):
            await anext(stream)
        assert [group.task.task_id async for group in stream] == ["t1"]


@pytest.mark.parametrize("group_size", [1, 2])
def test_an_environment_that_cancels_its_own_task_fails_its_episode_and_no_other(renderer, group_size):
    class CancelsItself(Counting):
        async def step(self, assistant):
            if self.task.task_id == "t0":
                asyncio.current_task().cancel()
                await asyncio.Event().wait()
            return super().step(assistant)

    groups, _ = run_groups(renderer, tasks(2), CancelsItself, concurrency=1, group_size=group_size)
    assert all("cancelled the task of its episode" in episode.error for episode in groups["t0"].episodes)
    assert all(episode.done for episode in groups["t1"].episodes)
