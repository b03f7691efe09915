"""Advantages of groups, against their formulas in loops, and the groups that give none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.training import degenerate_groups, group_advantages

EPISODES = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda eighths: eighths / 8), st.integers(0, 3), st.integers(1, 900)),
    min_size=1,
    max_size=20,
)


def by_loops(rewards, groups, lengths, baseline):
    """Each reward minus the mean of its group's others, or of all of the group, weighted by lengths."""
    advantages = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [i for i, other in enumerate(groups) if other == group]
        compared = [i for i in members if i != index or baseline == "mean"]
        if len({rewards[i] for i in members}) == 1:
            advantages.append(0.0)
            continue
        mean = sum(lengths[i] * rewards[i] for i in compared) / sum(lengths[i] for i in compared)
        advantages.append(reward - mean)
    return advantages


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("by_length", [False, True])
@given(EPISODES)
def test_the_baseline_is_the_weighted_mean_of_the_group_or_of_its_others(baseline, by_length, episodes):
    rewards, groups, lengths = zip(*episodes, strict=True)
    used = lengths if by_length else [1] * len(rewards)
    expected = by_loops(rewards, groups, used, baseline)
    result = group_advantages(rewards, groups, baseline=baseline, lengths=lengths if by_length else None, scale="none")
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_the_scale_is_that_of_the_rewards_of_the_group_whatever_the_baseline_is():
    mean, leave_one_out = (
        group_advantages([1.0, 0.0], ["a", "a"], baseline=baseline) for baseline in ("mean", "leave_one_out")
    )
    assert (mean.tolist(), leave_one_out.tolist()) == ([1.0, -1.0], [2.0, -2.0])


@pytest.mark.slow
@given(EPISODES)
def test_the_degenerate_groups_are_those_whose_advantages_are_all_0(episodes):
    rewards, groups, _ = zip(*episodes, strict=True)
    advantages = group_advantages(rewards, groups, baseline="leave_one_out")
    expected = {group for group in groups if not any(a for a, g in zip(advantages, groups, strict=True) if g == group)}
    reported = degenerate_groups(rewards, groups)
    assert {entry.group for entry in reported} == expected
    assert len(reported) == len(expected)


def test_rewards_that_differ_by_rounding_only_are_equal():
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert rewards[0] != rewards[1]
    assert group_advantages(rewards, ["a"] * 3).tolist() == [0.0] * 3
    assert len(degenerate_groups(rewards, ["a"] * 3)) == 1


def test_advantages_compare_within_a_group_only():
    rewards, groups = [1.0, 0.0, 10.0, 10.0, 0.5], ["a", "a", "b", "b", "c"]
    assert group_advantages(rewards, groups).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]
    deviation = math.sqrt(0.5 / 5)
    expected = [pytest.approx(value / deviation) for value in (0.5, -0.5, 0.0, 0.0, 0.0)]
    assert group_advantages(rewards, groups, scale="batch").tolist() == expected
    assert group_advantages(rewards, groups, scale="none").tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "groups",
    [
        torch.tensor([0, 0, 1, 1]),
        [torch.tensor(0), torch.tensor(0), torch.tensor(1), torch.tensor(1)],
        np.array([0, 0, 1, 1]),
        [np.array(0), np.array(0), np.array(1), np.array(1)],
        list(np.array([0, 0, 1, 1])),
        [("a", torch.tensor(0)), ("a", torch.tensor(0)), ("a", torch.tensor(1)), ("a", torch.tensor(1))],
        ("x", "x", None, None),
    ],
)
def test_groups_in_tensors_and_arrays_are_compared_by_value(groups):
    assert group_advantages([1.0, 2.0, 1.0, 4.0], groups).tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert degenerate_groups([1.0, 2.0, 1.0, 4.0], groups) == ()
    assert [entry.episodes for entry in degenerate_groups([1.0, 1.0, 3.0, 3.0], groups)] == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_and_lengths_in_tensors_are_taken_as_their_values(dtype):
    rewards = torch.tensor([1.0, 0.0, 4.0], dtype=dtype, requires_grad=True)
    lengths = torch.tensor([10, 30, 10])
    for given_rewards, given_lengths in ((rewards, lengths), (list(rewards), list(lengths))):
        advantages = group_advantages(
            given_rewards, ["a"] * 3, baseline="leave_one_out", lengths=given_lengths, scale="none"
        )
        assert advantages.tolist() == pytest.approx([0.0, -2.5, 3.75], abs=1e-6)
