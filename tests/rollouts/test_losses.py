"""Losses, against numbers worked out by hand."""

import math

import pytest
import torch

from rollouts.training import policy_gradient_loss, sft_loss

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
