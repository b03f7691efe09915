"""The listeners in a real `Runner`, with a real renderer."""

import pytest

from rollouts import SamplingParams, StepResult, ThreadedEnvironment
from rollouts.observability import RendererStats, RunMetrics
from rollouts.runner import RetryPolicy, Runner, Task
from rollouts.testing import ScriptedEngine


class TwoTurns:
    def __init__(self, task):
        self.task, self.turn = task, 0

    def reset(self, seed):
        return [{"role": "user", "content": f"Task {self.task.task_id}"}]

    def step(self, assistant):
        self.turn += 1
        return StepResult([{"role": "user", "content": "Again"}], reward=0.5, done=self.turn == 2)


async def test_metrics_of_events_are_those_that_the_runner_counts_itself(renderer):
    completions = iter(["yes"] * 7 + [TimeoutError("down")] + ["yes"] * 100)
    run_metrics = RunMetrics(sources=[RendererStats(renderer)])
    engine = ScriptedEngine(lambda request: next(completions), renderer=renderer)
    options = {"sampling": SamplingParams(max_tokens=8), "retry": RetryPolicy(max_attempts=1), "group_size": 2}
    async with Runner(
        lambda task: ThreadedEnvironment(TwoTurns(task)), engine, renderer, listeners=[run_metrics], **options
    ) as runner:
        groups = [group async for group in runner.stream(Task(f"task-{number}") for number in range(5))]
    values, counted = run_metrics.metrics(), runner.metrics()
    assert {key: values[key] for key in counted} == pytest.approx(counted)
    assert (counted["episodes_started"], counted["episodes_ended/failed"]) == (10, 1)
    assert values["turns"] == sum(episode.num_turns for group in groups for episode in group.episodes)
    assert values["total_reward_mean"] == pytest.approx(sum(group.rewards.sum() for group in groups) / 10)
    assert values["bridges"] >= 9
