"""What a runner, its options and its journal refuse: a row for each rule, with the name of the argument."""

import asyncio

import numpy as np
import pytest
from runner_world import Counting, make_runner, tasks

from rollouts import SamplingParams
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.rewards import GroupReward
from rollouts.runner import Asynchronous, EpisodeLimits, Group, Journal, RetryPolicy, Runner, Task
from rollouts.testing import ScriptedEngine

OF_ENVIRONMENTS = GroupReward("environment", 1.0, lambda episodes: [0.0] * len(episodes))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("make_environment", {"make_environment": "maze"}),
        ("engine", {"engine": "http://x"}),
        ("renderer", {"renderer": "directory"}),
        ("sampling", {"sampling": None}),
        ("sampling.n", {"sampling": SamplingParams(n=2)}),
        ("group_size", {"group_size": 0}),
        ("concurrency", {"concurrency": 1.5}),
        ("stop_after_failed_groups", {"stop_after_failed_groups": -1}),
        ("seed", {"seed": None}),
        ("skip_group", {"skip_group": asyncio.sleep}),
        ("score_episode", {"score_episode": "teacher"}),
        ("group_rewards", {"group_rewards": [OF_ENVIRONMENTS]}),
        ("listeners", {"listeners": ["print"]}),
        ("tasks", {"tasks": 5}),
        ("journal", {"journal": "journal"}),
    ],
)
def test_an_argument_of_a_runner_that_cannot_be_is_an_error_that_names_it(renderer, name, bad):
    engine = ScriptedEngine(["yes"], renderer=renderer)
    arguments = {"make_environment": Counting, "engine": engine, "renderer": renderer, "sampling": SamplingParams()}
    with pytest.raises(ArgumentError) as caught:
        Runner(**{**arguments, **bad})
    assert caught.value.name == name


class Plain:
    """An environment that takes no task."""

    def reset(self, seed): ...

    def step(self, assistant): ...


@pytest.mark.parametrize("make", [Plain, lambda: Plain(), lambda task, other: Plain(), lambda *, task: Plain()])
def test_a_function_that_cannot_take_a_task_is_refused_with_its_signature_and_a_cure(renderer, make):
    with pytest.raises(ArgumentError, match=r"^make_environment is .*\(task\), but takes \(.*lambda task: ") as caught:
        make_runner(renderer, make)
    assert caught.value.name == "make_environment"


def test_a_class_whose_signature_is_unknown_is_called(renderer):
    make_runner(renderer, type)  # one of the classes in C


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("max_attempts", lambda: RetryPolicy(max_attempts=0)),
        ("kinds", lambda: RetryPolicy(kinds=["network"])),
        ("max_delay", lambda: RetryPolicy(max_delay=float("nan"))),
        ("outage_seconds", lambda: RetryPolicy(outage_seconds=-1.0)),
        ("episode_seconds", lambda: EpisodeLimits(episode_seconds=float("inf"))),
        ("max_staleness", lambda: Asynchronous(1.0)),
        ("on_stale", lambda: Asynchronous(1, "ignore")),
        ("task_id", lambda: Task("\ud800")),
        ("seed", lambda: Task("t", seed=2**63)),
        ("configuration", lambda: Journal.open("/nowhere", configuration={"a": np.zeros(2)})),
        ("rewards", lambda: Group(Task("t"), (), (), np.zeros(1))),
    ],
)
def test_a_value_that_configures_a_run_and_cannot_be_is_an_error_that_names_it(name, make):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.name == name


async def test_calls_of_a_runner_with_other_values_are_refused(renderer):
    async with make_runner(renderer) as runner:
        with pytest.raises(ArgumentError, match="tasks"):
            await runner.collect(1)
        with pytest.raises(ArgumentError, match="tasks"):
            runner.stream("t0")
        with pytest.raises(ArgumentError, match="version is '0'; it has been in use"):
            await runner.update_weights(None, "0")
        with pytest.raises(ArgumentError, match="in_flight is 'now'"):
            await runner.update_weights(None, "1", "now")
        with pytest.raises(ArgumentError, match=r"version is .* that UTF-8 can encode"):
            await runner.update_weights(None, "a\ud800")
    async with make_runner(renderer, tasks=tasks(1)) as runner:
        for count in (0, 1.5, None):
            with pytest.raises(ArgumentError, match="count"):
                await runner.collect(count)
    with pytest.raises(RolloutsError, match="this Runner is closed"):
        await runner.update_weights(None, "1")
