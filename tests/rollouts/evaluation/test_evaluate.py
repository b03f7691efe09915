"""`evaluate` in Python: the groups of a runner, on an engine and on a chat endpoint."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from test_chat_episodes import ScriptedChat

from renderers import load_renderer
from rollouts.engines.protocol import SamplingParams
from rollouts.environments import ScoredPrompt
from rollouts.errors import ArgumentError
from rollouts.evaluation import EvaluationResults, evaluate
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

TASKS = [Task(str(number), {"answer": str(number % 2)}) for number in range(6)]


def environment(task: Task) -> ScoredPrompt:
    def messages(task: Task) -> list[Any]:
        return [{"role": "user", "content": "0 or 1?"}]

    def score(completion: Any, task: Task) -> float:
        if task.task_id == "5":
            raise RuntimeError("no score")
        return float(completion["content"] == task.data["answer"])

    return ScoredPrompt(task, messages, score)


async def results_on(engine: Any, renderer: Any, **options: Any) -> EvaluationResults:
    async with Runner(
        environment, engine, renderer, sampling=SamplingParams(max_tokens=4), group_size=2, concurrency=1
    ) as runner:
        return await evaluate(runner, TASKS, **options)


def check(results: EvaluationResults) -> None:
    # Every answer is "0": right for the three even tasks, wrong for 1 and 3, and the scoring of 5 fails.
    assert (results.tasks, results.episodes, results.failed, results.complete) == (6, 12, 2, True)
    assert results.pass_at_k[2].value == results.pass_at_k[1].value == 0.5
    assert [(one.episodes, "no score" in one.example) for one in results.errors.values()] == [(2, True)]


async def test_an_engine_is_evaluated(tmp_path: Path) -> None:
    renderer = load_renderer(tiny_qwen3_vl(tmp_path / "model", weights=False))
    check(await results_on(ScriptedEngine(cycle(["0"]), renderer=renderer), renderer))


async def test_a_chat_endpoint_gives_the_same_numbers() -> None:
    check(await results_on(ScriptedChat(*["0"] * 12), None))


async def test_a_k_beyond_the_group_is_refused_before_any_episode() -> None:
    engine = ScriptedChat(*["0"] * 12)
    with pytest.raises(ArgumentError, match="k is 3; pass at most 2"):
        await results_on(engine, None, k=[3])
    assert engine.calls == []
