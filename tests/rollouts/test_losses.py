"""Losses: numbers worked out by hand, limits of log-ratios, impossible tokens, half precision, losses of policies."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.errors import ArgumentError
from rollouts.training import (
    cispo_loss,
    importance_sampling_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
)

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


# What the losses do with log-ratios beyond their limit, with impossible tokens and with half precision.

ONE = torch.tensor([[True]])
ONE_ID = torch.tensor([[0]])
INF = math.inf

RATIO_LOSSES = {
    "ppo": policy_gradient_loss,
    "cispo": lambda *tensors: cispo_loss(*tensors, clip=(1.0, 4.0)),
    "gspo": lambda *tensors: sequence_ratio_loss(*tensors, sequence_ids=ONE_ID),
    "importance sampling": importance_sampling_loss,
}


def value_and_gradient(loss, new, *others, dtype=torch.float32):
    logprobs = torch.tensor([[new]], dtype=dtype, requires_grad=True)
    value = loss(logprobs, *(torch.tensor([[other]], dtype=dtype) for other in others), ONE)
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
    value = kl_loss(logprobs, reference, ONE).item()
    assert value >= 0
    assert value == pytest.approx(gap**2 / 2 + gap**3 / 6, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("loss", [kl_loss, lambda new, old, mask: policy_gradient_loss(new, old, -ONE.double(), mask)])
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
    expected = kl_loss(*tensors, ONE, estimator=estimator).item()
    assert math.isfinite(expected)
    assert kl_loss(*(each.half() for each in tensors), ONE, estimator=estimator).item() == expected


def test_sums_of_half_precision_log_probabilities_do_not_overflow():
    logprobs = torch.full((1, 1000), -100.0, dtype=torch.float16)
    assert sft_loss(logprobs, torch.ones(1, 1000, dtype=torch.bool)).item() == 100


# Each loss against its formula, written as loops over sequences and tokens, for padded and packed batches.


class Token(NamedTuple):
    """A token of a sequence: the trainer's and the sampler's log-probability, its advantage, whether it is trained."""

    new: float
    old: float
    advantage: float
    trained: bool


TOKENS = st.builds(Token, st.floats(-4, 0), st.floats(-4, 0), st.floats(-2, 2), st.booleans())
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=4)
BOTH_MEANS = pytest.mark.parametrize("mean_over", ["tokens", "sequences"])


class Batch(NamedTuple):
    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence_ids: torch.Tensor

    def policy(self):
        return self[:4]


def padded(sequences):
    width = max(map(len, sequences))
    nothing = Token(math.nan, math.nan, math.nan, False)  # what stands on padding must not matter
    rows = [[*tokens, *[nothing] * (width - len(tokens))] for tokens in sequences]
    ids = [[index] * len(tokens) + [-1] * (width - len(tokens)) for index, tokens in enumerate(sequences)]
    return batch_of(rows, ids)


def packed(sequences):
    nothing = Token(math.nan, math.nan, math.nan, False)
    row = [token for tokens in sequences for token in tokens] + [nothing]
    return batch_of([row], [[index for index, tokens in enumerate(sequences) for _ in tokens] + [-1]])


def batch_of(rows, ids):
    columns = [torch.tensor([[token[field] for token in row] for row in rows]) for field in range(4)]
    return Batch(columns[0].requires_grad_(), *columns[1:], torch.tensor(ids, dtype=torch.int32))


def mean_by_loops(sequences, term, mean_over, normaliser):
    """The sum of term(token, sequence's trained tokens), divided as `mean_over` and `normaliser` say."""
    total, num_tokens, num_sequences = 0.0, 0, 0
    for tokens in sequences:
        trained = [token for token in tokens if token.trained]
        num_sequences += bool(trained)
        for token in trained:
            num_tokens += 1
            total += term(token, trained) / (len(trained) if mean_over == "sequences" else 1)
    return total / (normaliser or max(1, num_sequences if mean_over == "sequences" else num_tokens))


def clipped(value, low, high):
    return max(low, min(value, high))


def ppo_term(token, _, low=0.2, high=0.2):
    ratio = math.exp(token.new - token.old)
    return -min(ratio * token.advantage, clipped(ratio, 1 - low, 1 + high) * token.advantage)


def gspo_term(token, trained, low=3e-4, high=4e-4):
    ratio = math.exp(sum(t.new - t.old for t in trained) / len(trained))
    return -min(ratio * token.advantage, clipped(ratio, 1 - low, 1 + high) * token.advantage)


def k3_term(token, _):
    d = token.old - token.new
    return math.exp(d) - 1 - d


def cispo(batch, **options):
    return cispo_loss(*batch.policy(), clip=(0.4, 0.5), **options).loss


#: name: (the loss, the term of one token as the paper has it)
LOSSES = {
    "sft": (lambda b, **o: sft_loss(b.logprobs, b.mask, **o), lambda token, _: -token.new),
    "ppo": (lambda b, **o: policy_gradient_loss(*b.policy(), **o).loss, ppo_term),
    "dapo": (
        lambda b, **o: policy_gradient_loss(*b.policy(), clip=(0.2, 0.28), **o).loss,
        lambda token, trained: ppo_term(token, trained, 0.2, 0.28),
    ),
    "cispo": (
        cispo,
        lambda token, _: -clipped(math.exp(token.new - token.old), 0.6, 1.5) * token.advantage * token.new,
    ),
    "gspo": (lambda b, **o: sequence_ratio_loss(*b.policy(), **o).loss, gspo_term),
    "k1": (
        lambda b, **o: kl_loss(b.logprobs, b.old, b.mask, estimator="k1", **o),
        lambda token, _: token.new - token.old,
    ),
    "k2": (
        lambda b, **o: kl_loss(b.logprobs, b.old, b.mask, estimator="k2", **o),
        lambda token, _: (token.new - token.old) ** 2 / 2,
    ),
    "k3": (lambda b, **o: kl_loss(b.logprobs, b.old, b.mask, **o), k3_term),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40)
@given(
    sequences=SEQUENCES, mean_over=st.sampled_from(["tokens", "sequences"]), normaliser=st.sampled_from([None, 3, 0.5])
)
def test_padded_and_packed_batches_give_the_value_of_the_formula_and_equal_gradients(
    name, sequences, mean_over, normaliser
):
    loss, term = LOSSES[name]
    expected = mean_by_loops(sequences, term, mean_over, normaliser)
    gradients = []
    for layout in (padded, packed):
        batch = layout(sequences)
        value = loss(batch, mean_over=mean_over, sequence_ids=batch.sequence_ids, normaliser=normaliser)
        assert value.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        value.backward()
        assert torch.isfinite(batch.logprobs.grad).all()
        assert (batch.logprobs.grad[~batch.mask] == 0).all()
        gradients.append(batch.logprobs.grad[batch.mask])
    torch.testing.assert_close(*gradients)


def gradient_of(loss, new, old, advantage):
    logprobs = torch.tensor([new]).requires_grad_()
    options = {"sequence_ids": torch.zeros(1, len(new), dtype=torch.int64)} if loss is sequence_ratio_loss else {}
    options |= {"clip": (1.0, 0.5)} if loss is cispo_loss else {}
    mask = torch.ones(1, len(new), dtype=torch.bool)
    loss(logprobs, torch.tensor([old]), torch.full((1, len(new)), advantage), mask, **options).loss.backward()
    return logprobs.grad[0].tolist()


def test_a_token_beyond_the_upper_limit_keeps_a_limited_gradient_in_cispo_and_none_in_ppo():
    far = [math.log(3.0)]
    assert gradient_of(policy_gradient_loss, far, [0.0], 1.0) == [0.0]
    assert gradient_of(cispo_loss, far, [0.0], 1.0) == [pytest.approx(-1.5)]


def test_the_ratio_of_a_sequence_spreads_its_gradient_equally_over_its_tokens():
    # log-ratios 0.4 and -0.4: each token is beyond the limits, the sequence is on policy.
    assert gradient_of(sequence_ratio_loss, [-1.0, -2.0], [-1.4, -1.6], 2.0) == [pytest.approx(-1.0)] * 2
    # beyond the limit as a whole
    assert gradient_of(sequence_ratio_loss, [-1.0, -2.0], [-1.4, -2.0], 2.0) == [0.0, 0.0]


def test_the_report_counts_tokens_beyond_the_limits_of_each_loss():
    logprobs = torch.log(torch.tensor([[0.5, 1.0, 1.25, 3.0]]))
    rest = (torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))
    ids = torch.tensor([[0, 0, 1, 1]])
    assert policy_gradient_loss(logprobs, *rest, clip=(0.2, 0.28)).clipped == 0.5
    assert cispo_loss(logprobs, *rest, clip=(1.0, 0.2)).clipped == 0.5
    report = sequence_ratio_loss(logprobs, *rest, sequence_ids=ids, clip=(0.4, 0.5))
    assert report.clipped == 0.5  # the second sequence
    assert report.mean_ratio == pytest.approx((math.sqrt(0.5) + math.sqrt(3.75)) / 2)
    assert policy_gradient_loss(logprobs, *rest).mean_ratio == pytest.approx(5.75 / 4)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("loss", [policy_gradient_loss, cispo_loss, sequence_ratio_loss])
def test_a_token_that_the_sampler_found_impossible_does_not_make_the_loss_infinite(loss, advantage):
    assert all(map(math.isfinite, gradient_of(loss, [0.0, -1.0], [-500.0, -1.0], advantage)))


@pytest.mark.parametrize("name", LOSSES)
@BOTH_MEANS
def test_a_batch_without_a_trained_token_has_a_loss_of_0_and_a_gradient_of_0(name, mean_over):
    batch = padded([[Token(-1.0, -1.0, 1.0, False)]])
    loss = LOSSES[name][0](batch, mean_over=mean_over, sequence_ids=batch.sequence_ids)
    loss.backward()
    assert loss.item() == 0
    assert batch.logprobs.grad.tolist() == [[0.0]]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(sequences=SEQUENCES, mean_over=st.sampled_from(["tokens", "sequences"]))
def test_with_a_common_normaliser_the_losses_of_micro_batches_sum_to_the_loss_of_the_batch(name, sequences, mean_over):
    loss, _ = LOSSES[name]
    batch = padded(sequences)
    common = {"mean_over": mean_over, "normaliser": 7}
    parts = [padded([tokens]) for tokens in sequences]
    total = sum(loss(part, sequence_ids=part.sequence_ids, **common).item() for part in parts)
    assert loss(batch, sequence_ids=batch.sequence_ids, **common).item() == pytest.approx(total, rel=1e-4, abs=1e-5)


ROWS, BOTH, IDS = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int32)
POLICY = (ROWS, ROWS, ROWS, BOTH)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: sft_loss(ROWS, BOTH, mean_over="rows"), "mean_over is 'rows'; pass one of tokens, sequences"),
        (lambda: sft_loss(ROWS, BOTH, mean_over="sequences"), "sequence_ids is None; pass batch.sequence_ids"),
        (lambda: sft_loss(ROWS, BOTH.long()), "the dtype of mask is 'torch.int64'; pass torch.bool"),
        (
            lambda: sft_loss(ROWS, BOTH, mean_over="sequences", sequence_ids=IDS[0]),
            r"sequence_ids is 'torch.int32 \(2,\)'; pass integers \(1, 2\)",
        ),
        (lambda: sft_loss(ROWS.numpy(), BOTH), "logprobs is array.*; pass a torch tensor"),
        (lambda: policy_gradient_loss(ROWS, ROWS, 1.0, BOTH), "advantages is 1.0; pass a torch tensor"),
        (lambda: kl_loss(ROWS, ROWS.long(), BOTH), "the dtype of reference_logprobs is 'torch.int64'; pass float32"),
        (lambda: sequence_ratio_loss(*POLICY, sequence_ids=[[0, 0]]), r"sequence_ids is \[\[0, 0\]\]; pass batch.seq"),
        (lambda: sequence_ratio_loss(*POLICY, sequence_ids=IDS.float()), "sequence_ids is 'torch.float32"),
        (
            lambda: sequence_ratio_loss(*POLICY, sequence_ids=torch.tensor([[0, -1]])),
            r"sequence_ids\[0, 1\] is -1; the mask trains this position",
        ),
        (
            lambda: policy_gradient_loss(*POLICY, clip=-0.1),
            r"clip is -0.1; pass a number from 0 to 1, or \(low, high\)",
        ),
        (lambda: policy_gradient_loss(*POLICY, clip=(0.1, 0.2, 0.3)), "clip is .*; pass a number from 0 to 1"),
        (lambda: cispo_loss(*POLICY, clip=(1.5, 2.0)), r"clip is \(1.5, 2.0\); pass"),
        (lambda: kl_loss(ROWS, ROWS, BOTH, estimator="k4"), "estimator is 'k4'; pass one of k1, k2, k3"),
        (lambda: kl_loss(ROWS, ROWS.T, BOTH), r"the shape of reference_logprobs is \(2, 1\); pass"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, error):
    with pytest.raises(ArgumentError, match=error):
        call()


def test_the_grpo_loss_of_the_samplers_own_weights_is_0_and_its_gradient_is_not():
    rewarded = [[Token(-1.0, -1.0, 1.0, True)] * 3, [Token(-2.0, -2.0, -1.0, True)] * 2]
    batch = padded(rewarded)
    outcome = policy_gradient_loss(*batch.policy(), mean_over="sequences", sequence_ids=batch.sequence_ids)
    outcome.loss.backward()
    assert outcome.loss.item() == pytest.approx(0, abs=1e-7)
    assert batch.logprobs.grad[0].tolist() == pytest.approx([-1 / 6] * 3)
