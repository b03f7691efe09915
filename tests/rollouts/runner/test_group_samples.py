"""The training samples of a group: advantages from its rewards, without the episodes that failed."""

import itertools

import numpy as np
import pytest
from runner_world import Counting, run_groups, tasks

from rollouts import StepResult
from rollouts.errors import ArgumentError
from rollouts.runner import Group


class Graded(Counting):
    """The episodes of the group have the rewards 0, 1, 2...; number 1 fails."""

    def __init__(self, task, numbers):
        super().__init__(task)
        self.number = next(numbers)

    def step(self, assistant):
        if self.number == 1:
            raise KeyError("broken")
        return StepResult(done=True, reward=float(self.number))


def graded_group(renderer, size):
    numbers = itertools.count()
    groups, _ = run_groups(renderer, tasks(1), lambda task: Graded(task, numbers), group_size=size, concurrency=1)
    return groups["t0"]


def test_advantages_compare_the_rewards_of_the_episodes_that_did_not_fail(renderer):
    group = graded_group(renderer, 4)  # rewards 0, failed, 2, 3
    samples = group.samples(renderer.processors, scale="none")
    assert [sample.name.split("/")[1] for sample in samples] == ["0.0", "2.0", "3.0"]
    advantages = [set(sample.advantages[sample.loss_mask].tolist()) for sample in samples]
    expected = np.array([0.0, 2.0, 3.0]) - 5 / 3
    assert [pytest.approx(value, abs=1e-6) for (value,) in advantages] == expected.tolist()


def test_advantages_are_multiplied_by_the_weights_of_the_samples(renderer):
    group = graded_group(renderer, 3)  # rewards 0, failed, 2
    weights = np.array([1.0, 1.0, 0.25])
    weighted = Group(group.task, group.episodes, group.attempts, group.rewards, sample_weights=weights)
    (low, high) = weighted.samples(renderer.processors)
    assert low.advantages[low.loss_mask].tolist() == pytest.approx([-1.0] * int(low.loss_mask.sum()))
    assert high.advantages[high.loss_mask].tolist() == pytest.approx([0.25] * int(high.loss_mask.sum()))


def test_the_samples_of_a_group_can_be_those_of_some_agents(renderer):
    group = graded_group(renderer, 3)
    assert group.samples(renderer.processors, agents={"critic"}) == []
    assert len(group.samples(renderer.processors, agents={"", "critic"})) == 2
    with pytest.raises(ArgumentError, match="agents"):
        group.samples(renderer.processors, agents="critic")
