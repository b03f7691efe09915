"""`evaluate` in Python: the groups of a runner on a chat endpoint."""

from typing import Any

import pytest
from test_chat_episodes import ScriptedChat

from rollouts.engines.protocol import SamplingParams
from rollouts.environments import ScoredPrompt
from rollouts.errors import ArgumentError
from rollouts.evaluation import EvaluationResults, evaluate
from rollouts.runner import Runner
from rollouts.task import Task

TASKS = [Task(str(number), {"answer": str(number % 2)}) for number in range(6)]


def environment(task: Task) -> ScoredPrompt:
    def messages(task: Task) -> list[Any]:
        return [{"role": "user", "content": "0 or 1?"}]

    def score(completion: Any, task: Task) -> float:
        if task.task_id == "5":
            raise RuntimeError("no score")
        return float(completion["content"] == task.data["answer"])

    return ScoredPrompt(task, messages, score)


async def results_on(engine: ScriptedChat, **options: Any) -> EvaluationResults:
    async with Runner(
        environment, engine, None, sampling=SamplingParams(max_tokens=4), group_size=2, concurrency=1
    ) as runner:
        return await evaluate(runner, TASKS, **options)


async def test_groups_of_a_runner_are_evaluated_and_failed_episodes_are_counted() -> None:
    results = await results_on(ScriptedChat(*["0"] * 12))
    # Every answer is "0": right for the three even tasks, wrong for 1 and 3, and the scoring of 5 fails.
    assert (results.tasks, results.episodes, results.failed, results.complete) == (6, 12, 2, True)
    assert results.pass_at_k[2].value == results.pass_at_k[1].value == 0.5
    assert [(one.episodes, "no score" in one.example) for one in results.errors.values()] == [(2, True)]


async def test_a_k_beyond_the_group_is_refused_before_any_episode() -> None:
    engine = ScriptedChat(*["0"] * 12)
    with pytest.raises(ArgumentError, match="k is 3; pass at most 2"):
        await results_on(engine, k=[3])
    assert engine.calls == []
