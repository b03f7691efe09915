"""Losses, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import AdvantageError
from rollouts.training import group_advantages, policy_gradient_loss, sft_loss

MASK = torch.tensor([[False, True, True], [False, True, False]])


def test_the_supervised_loss_is_the_mean_over_masked_tokens():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]])
    assert sft_loss(logprobs, MASK).item() == pytest.approx(2.0)
    assert sft_loss(logprobs, MASK, normaliser=12).item() == pytest.approx(0.5)


def test_an_empty_mask_gives_a_zero_loss_and_not_a_nan():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert sft_loss(logprobs, nothing).item() == 0
    assert policy_gradient_loss(logprobs, logprobs.detach(), logprobs.detach(), nothing).loss.item() == 0


def test_on_policy_the_gradient_is_advantage_times_score():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]], requires_grad=True)
    advantages = torch.tensor([[5.0, 1.0, -2.0], [5.0, 0.5, 5.0]])
    loss, clipped, ratio = policy_gradient_loss(logprobs, logprobs.detach(), advantages, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(-(1 - 2 + 0.5) / 3)
    assert logprobs.grad.tolist() == [[0, pytest.approx(-1 / 3), pytest.approx(2 / 3)], [0, pytest.approx(-0.5 / 3), 0]]
    assert (clipped, ratio) == (0.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "has_gradient"),
    [(1.5, 1.0, 1.2, False), (0.5, 1.0, 0.5, True), (1.5, -1.0, -1.5, True), (0.5, -1.0, -0.8, False)],
)
def test_clipping_removes_only_the_incentive_to_go_further(ratio, advantage, surrogate, has_gradient):
    logprobs = torch.tensor([[0.0, math.log(ratio)]], requires_grad=True)
    mask = torch.tensor([[False, True]])
    result = policy_gradient_loss(logprobs, torch.zeros(1, 2), torch.full((1, 2), advantage), mask, clip=0.2)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-surrogate)
    assert bool(logprobs.grad[0, 1] != 0) is has_gradient
    assert result.clipped == 1.0


def test_advantages_compare_within_a_group_only():
    rewards, groups = [1.0, 0.0, 10.0, 10.0, 0.5], ["a", "a", "b", "b", "c"]
    assert group_advantages(rewards, groups).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]
    deviation = math.sqrt(0.5 / 5)
    expected = [pytest.approx(value / deviation) for value in (0.5, -0.5, 0.0, 0.0, 0.0)]
    assert group_advantages(rewards, groups, scale="batch").tolist() == expected
    assert group_advantages(rewards, groups, scale="none").tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=20))
def test_advantages_sum_to_zero_in_every_group(entries):
    rewards, groups = zip(*entries, strict=True)
    advantages = group_advantages(rewards, groups)
    for group in set(groups):
        assert abs(advantages[[g == group for g in groups]].sum()) < 1e-4
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize(
    ("rewards", "groups", "scale", "reason"),
    [
        ([1.0, 2.0], ["a"], "group", "2 rewards and 1 groups"),
        ([1.0], ["a", "a"], "group", "1 rewards and 2 groups"),
        ([1.0, math.nan], ["a", "a"], "group", "reward 1 is nan"),
        ([math.inf, 0.0], ["a", "a"], "batch", "reward 0 is inf"),
        ([[1.0], [2.0]], ["a", "a"], "group", r"shape \(2, 1\)"),
        (["x"], ["a"], "group", "not one row of numbers"),
        ([1.0, 2.0], ["a", "a"], "std", "scale is 'std'; pass one of group, batch, none"),
    ],
)
def test_rewards_that_do_not_fit_their_groups_are_refused_and_not_given_advantages_of_0(rewards, groups, scale, reason):
    with pytest.raises(AdvantageError, match=reason):
        group_advantages(rewards, groups, scale=scale)
