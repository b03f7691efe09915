"""What the losses do with log-ratios beyond their limit, with impossible tokens and with half precision."""

import math

import pytest
import torch

from rollouts.training import (
    cispo_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
    truncated_ratio_loss,
    truncated_ratios,
)

MASK = torch.tensor([[True]])
IDS = torch.tensor([[0]])
INF = math.inf

RATIO_LOSSES = {
    "ppo": policy_gradient_loss,
    "tis": truncated_ratio_loss,
    "cispo": lambda *tensors: cispo_loss(*tensors, clip=(1.0, 4.0)),
    "gspo": lambda *tensors: sequence_ratio_loss(*tensors, sequence_ids=IDS),
}


def value_and_gradient(loss, new, *others, dtype=torch.float32):
    logprobs = torch.tensor([[new]], dtype=dtype, requires_grad=True)
    value = loss(logprobs, *(torch.tensor([[other]], dtype=dtype) for other in others), MASK)
    value = getattr(value, "loss", value)
    value.backward()
    return value.item(), logprobs.grad.item()


@pytest.mark.parametrize("gap", [1.0, 19.5, 20.5, 21.0, 90.0, 5000.0, INF])
def test_k3_is_not_negative_and_moves_the_policy_towards_the_reference(gap):
    below, gradient_below = value_and_gradient(kl_loss, -1 - min(gap, 9000.0), -1.0)
    assert 0 < below < INF
    assert -INF < gradient_below < 0
    above, gradient_above = value_and_gradient(kl_loss, -1.0, -1 - gap)
    assert 0 < above < INF
    assert 0 < gradient_above <= 1


def test_k3_of_a_policy_that_finds_its_own_token_impossible_is_not_negative():
    value, gradient = value_and_gradient(kl_loss, -INF, -1.0)
    assert 0 < value < INF
    assert math.isfinite(gradient)


@pytest.mark.parametrize("gap", [0.0, 1e-8, -1e-8, 1e-4, -1e-4, 3e-3])
def test_k3_of_a_small_gap_is_not_negative_and_not_rounding(gap):
    logprobs, reference = torch.tensor([[0.0]]), torch.tensor([[gap]])
    value = kl_loss(logprobs, reference, MASK).item()
    assert value >= 0
    assert value == pytest.approx(gap**2 / 2 + gap**3 / 6, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("loss", [kl_loss, lambda new, old, mask: policy_gradient_loss(new, old, -MASK.double(), mask)])
def test_value_and_slope_are_continuous_at_the_limit(loss):
    sign = -1 if loss is kl_loss else 1
    before, at, after = (
        value_and_gradient(loss, sign * gap, 0.0, dtype=torch.float64) for gap in (20 - 1e-7, 20.0, 20 + 1e-7)
    )
    assert before == pytest.approx(at, rel=1e-6)
    assert after == pytest.approx(at, rel=1e-6)


@pytest.mark.parametrize("old", [-30.0, -500.0, -INF])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_a_negative_advantage_still_lowers_a_token_beyond_the_limit(name, old):
    value, gradient = value_and_gradient(RATIO_LOSSES[name], -1.0, old, -1.0)
    assert math.isfinite(value)
    assert 0 < gradient < INF


def test_a_positive_advantage_beyond_the_limit_gives_a_clipped_token_no_gradient():
    assert value_and_gradient(policy_gradient_loss, -1.0, -30.0, 1.0)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_ratios_of_half_precision_tensors_are_computed_in_float32(name, dtype):
    assert value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, 0.0, dtype=dtype) == (0.0, 0.0)
    half = value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, -1.0, dtype=dtype)[0]
    assert half == value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, -1.0)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_of_half_precision_tensors_is_computed_in_float32(estimator):
    tensors = torch.tensor([[-500.0]]), torch.tensor([[-1.0]])
    expected = kl_loss(*tensors, MASK, estimator=estimator).item()
    assert math.isfinite(expected)
    assert kl_loss(*(each.half() for each in tensors), MASK, estimator=estimator).item() == expected


def test_sums_of_half_precision_log_probabilities_do_not_overflow():
    logprobs = torch.full((1, 1000), -100.0, dtype=torch.float16)
    assert sft_loss(logprobs, torch.ones(1, 1000, dtype=torch.bool)).item() == 100


def test_truncated_ratios_of_half_precision_tensors_are_float32_and_grow_up_to_their_cap():
    ratios = truncated_ratios(torch.tensor([[-1.0]]).half(), torch.tensor([[-30.0]]).half(), MASK, cap=1e12)
    assert ratios.dtype == torch.float32
    assert ratios.item() == pytest.approx(math.exp(20) * 10, rel=1e-5)
    assert truncated_ratios(torch.tensor([[-1.0]]), torch.tensor([[-INF]]), MASK).item() == 2
