"""A function that makes environments, but cannot be called as it will be, is refused before the first episode."""

import asyncio
from functools import partial

import pytest

from rollouts import SamplingParams, StepResult, run_episodes
from rollouts.errors import ArgumentError
from rollouts.runner import Runner
from rollouts.testing import ScriptedEngine


class Plain:
    """An environment that takes no task."""

    def reset(self, seed):
        return [{"role": "user", "content": "Hi"}]

    def step(self, assistant):
        return StepResult(reward=1.0, done=True)


def two(task, other):
    return Plain()


@pytest.fixture
def place(renderer):
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    return partial(Runner, engine=engine, renderer=renderer, sampling=SamplingParams())


@pytest.mark.parametrize("make", [Plain, lambda: Plain(), two, lambda *, task: Plain()], ids=range(4))
def test_a_function_that_cannot_take_a_task_is_refused_with_its_signature_and_a_cure(place, make):
    with pytest.raises(ArgumentError, match=r"^make_environment is .*\(task\), but takes \(.*lambda task: ") as caught:
        place(make)
    assert caught.value.name == "make_environment"


def test_a_class_whose_signature_is_unknown_is_called(place):
    place(type)  # one of the classes in C


def test_run_episodes_refuses_a_function_of_a_task(renderer):
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    settings = {"engine": engine, "renderer": renderer, "sampling": SamplingParams(), "max_turns": 1}
    with pytest.raises(ArgumentError, match=r"^make_environment is .*\(\), but takes \(task\): .* `Runner` is"):
        asyncio.run(run_episodes(lambda task: Plain(), [], **settings))
