"""Losses and the mismatch report, against numbers worked out by hand."""

import math

import pytest
import torch

from rollouts.training import mismatch_report, policy_gradient_loss, sft_loss
from rollouts.training.mismatch import MismatchReport, merge_reports

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


def test_the_mismatch_is_over_sampled_tokens_only_and_names_the_worst_row():
    sampler = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -9.0]])
    trainer = torch.tensor([[9.0, -1.5, -2.0], [9.0, -2.0, 9.0]])
    report = mismatch_report(sampler, trainer, MASK, has_media=torch.tensor([True, False]), names=["a", "b"])
    assert (report.tokens, report.max_abs, report.worst) == (3, 1.0, "b")
    assert report.mean_abs == pytest.approx(0.5)
    assert (report.max_abs_media, report.max_abs_text) == (0.5, 1.0)
    expected = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(1.0) - 1 - 1.0]
    assert report.kl == pytest.approx(sum(expected) / 3)


def test_a_logprob_that_is_not_a_number_cannot_pass_a_threshold():
    trainer = torch.tensor([[0.0, float("nan"), -1.0], [0.0, -1.0, 0.0]])
    report = mismatch_report(
        torch.full((2, 3), -1.0), trainer, MASK, has_media=torch.tensor([False, False]), names=["a", "b"]
    )
    assert report.max_abs == math.inf
    assert report.worst == "a"


def test_joined_reports_weigh_by_tokens_and_keep_the_maximum():
    whole = merge_reports(
        [
            MismatchReport(tokens=1, max_abs=0.1, mean_abs=0.1, kl=0.4, worst="a"),
            MismatchReport(),
            MismatchReport(tokens=3, max_abs=0.5, mean_abs=0.3, kl=0.0, worst="b"),
        ]
    )
    assert (whole.tokens, whole.max_abs, whole.worst) == (4, 0.5, "b")
    assert whole.mean_abs == pytest.approx(0.25)
    assert whole.kl == pytest.approx(0.1)
    assert merge_reports([]) == MismatchReport()
