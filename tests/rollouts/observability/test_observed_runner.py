"""The listeners in a real `Runner`, with a real renderer."""

import asyncio

import pytest

from rollouts import SamplingParams, StepResult, ThreadedEnvironment
from rollouts.observability import RendererStats, RunMetrics
from rollouts.runner import EpisodeLimits, RetryPolicy, Runner, Task
from rollouts.runner.events import EpisodeEnded, EpisodeWaiting
from rollouts.testing import ScriptedEngine


class TwoTurns:
    def __init__(self, task):
        self.task, self.turn = task, 0

    def reset(self, seed):
        return [{"role": "user", "content": f"Task {self.task.task_id}"}]

    def step(self, assistant):
        self.turn += 1
        return StepResult([{"role": "user", "content": "Again"}], reward=0.5, done=self.turn == 2)


def runner(renderer, engine, listener, make_environment, group_size):
    return Runner(
        make_environment,
        engine,
        renderer,
        sampling=SamplingParams(max_tokens=8),
        group_size=group_size,
        limits=EpisodeLimits(max_turns=4),
        retry=RetryPolicy(max_attempts=1),
        listeners=[listener],
    )


async def run(runner, tasks):
    async with runner:
        return [group async for group in runner.stream(Task(f"task-{number}") for number in range(tasks))]


async def test_metrics_of_events_are_those_that_the_runner_counts_itself(renderer):
    completions = iter(["yes"] * 7 + [TimeoutError("down")] + ["yes"] * 100)
    run_metrics = RunMetrics(sources=[RendererStats(renderer)])
    engine = ScriptedEngine(lambda request: next(completions), renderer=renderer)
    observed = runner(renderer, engine, run_metrics, lambda task: ThreadedEnvironment(TwoTurns(task)), 2)
    groups = await run(observed, 5)
    values, counted = run_metrics.metrics(), observed.metrics()
    assert {key: values[key] for key in counted} == pytest.approx(counted)
    assert counted["episodes_started"] == 10
    assert counted["episodes_ended/failed"] == 1
    assert values["turns"] == sum(episode.num_turns for group in groups for episode in group.episodes)
    assert values["completion_tokens"] > 0
    assert values["total_reward_mean"] == pytest.approx(sum(group.rewards.sum() for group in groups) / 10)
    assert values["longest_wait_seconds"] == 0.0
    assert values["bridges"] >= 9


@pytest.mark.parametrize("stuck", ["environment.make", "environment.reset", "environment.step", "engine"])
async def test_the_last_event_of_a_stuck_episode_says_what_it_waits_for(renderer, stuck):
    never, reached = asyncio.Event(), asyncio.Event()

    async def wait(part):
        if part == stuck:
            reached.set()
            await never.wait()

    class Environment:
        async def reset(self, seed):
            await wait("environment.reset")
            return [{"role": "user", "content": "?"}]

        async def step(self, assistant):
            await wait("environment.step")
            return StepResult(done=True)

    async def make_environment(task):
        await wait("environment.make")
        return Environment()

    async def complete(request):
        await wait("engine")
        return "yes"

    events = []
    engine = ScriptedEngine(complete, renderer=renderer)
    running = asyncio.ensure_future(run(runner(renderer, engine, events.append, make_environment, 1), 1))
    await asyncio.wait_for(reached.wait(), 30)
    assert events[-1] == EpisodeWaiting(events[0].episode_id, 0, stuck)
    assert events[0].task_id == "task-0"
    running.cancel()
    await asyncio.wait([running])
    assert isinstance(events[-1], EpisodeEnded)
