"""What a runner says about episodes that fail or do not end, and what episodes of a group share."""

import logging

import pytest
from runner_world import Counting, make_runner, run_groups, tasks

from rollouts import StepResult, ThreadedEnvironment
from rollouts.errors import ArgumentError
from rollouts.rewards import GroupReward
from rollouts.runner import EpisodeLimits, Task


class Broken(Counting):
    def step(self, assistant):
        return {}["no such key"]


class Emptying(Counting):
    """Takes its question from the data of its task."""

    def reset(self, seed):
        return [{"role": "user", "content": self.task.data["questions"][0].pop()}]

    def step(self, assistant):
        return StepResult(done=True, reward=1.0)


def warnings_of(caplog):
    return [record for record in caplog.records if record.name == "rollouts.runner"]


def test_an_environment_that_changes_its_data_changes_no_other_episode(renderer):
    task = Task("t0", {"questions": [["first", "second"]]})
    groups, _ = run_groups(renderer, [task], Emptying, group_size=4)
    assert groups["t0"].rewards.tolist() == [1.0] * 4
    assert task.data == {"questions": [["first", "second"]]}


def test_a_failure_is_logged_once_with_the_traceback_of_the_environment(renderer, caplog):
    run_groups(renderer, tasks(3), Broken, group_size=2)
    (record,) = warnings_of(caplog)
    assert "Broken.step raised KeyError" in record.getMessage()
    assert 'return {}["no such key"]' in logging.Formatter().format(record)


def test_an_error_in_a_threaded_environment_names_the_environment_in_it(renderer):
    groups, _ = run_groups(renderer, tasks(1), lambda task: ThreadedEnvironment(Broken(task)))
    assert "Broken.step raised KeyError" in groups["t0"].episodes[0].error
    assert "ThreadedEnvironment" not in groups["t0"].episodes[0].error


@pytest.mark.parametrize(
    ("made", "text"), [(Counting, "the class Counting; return an instance"), (None, "reset and step")]
)
def test_a_function_that_makes_no_environment_is_named_in_the_error(renderer, made, text):
    groups, _ = run_groups(renderer, tasks(1), lambda task: made)
    assert "make_environment returned" in groups["t0"].episodes[0].error
    assert text in groups["t0"].episodes[0].error


def test_a_group_reward_with_the_name_of_the_environments_own_is_refused_before_any_episode(renderer):
    reward = GroupReward("environment", 1.0, lambda episodes: [0.0] * len(episodes))
    with pytest.raises(ArgumentError, match="another name"):
        make_runner(renderer, group_rewards=[reward])


@pytest.mark.parametrize(("limits", "count"), [(EpisodeLimits(), 1), (EpisodeLimits(max_turns=6), 0)])
def test_an_episode_without_limits_that_goes_on_is_reported_once(renderer, caplog, monkeypatch, limits, count):
    monkeypatch.setattr("rollouts.runner.events._MANY_TURNS", 3)

    class FiveTurns(Counting):
        turns = 5

    run_groups(renderer, tasks(2), FiveTurns, limits=limits)
    assert ["EpisodeLimits(max_turns=...)" in record.getMessage() for record in warnings_of(caplog)] == [True] * count
