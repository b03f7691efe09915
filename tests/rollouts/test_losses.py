"""Losses: numbers worked out by hand, limits of log-ratios, impossible tokens, half precision, losses of policies."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.training import (
    cispo_loss,
    importance_sampling_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
)

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


@pytest.mark.parametrize("gap", [0.0, 1e-8, -1e-8, 1e-4, -1e-4, 3e-3])
def test_k3_of_a_small_gap_is_not_negative_and_not_rounding(gap):
    logprobs, reference = torch.tensor([[0.0]]), torch.tensor([[gap]])
    value = kl_loss(logprobs, reference, ONE).item()
    assert value >= 0
    assert value == pytest.approx(gap**2 / 2 + gap**3 / 6, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("old", [-30.0, -500.0, -INF])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_a_negative_advantage_still_lowers_a_token_beyond_the_limit(name, old):
    value, gradient = value_and_gradient(RATIO_LOSSES[name], -1.0, old, -1.0)
    assert math.isfinite(value)
    assert 0 < gradient < INF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_ratios_of_half_precision_tensors_are_computed_in_float32(name, dtype):
    assert value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, 0.0, dtype=dtype) == (0.0, 0.0)
    half = value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, -1.0, dtype=dtype)[0]
    assert half == value_and_gradient(RATIO_LOSSES[name], -1.0, -30.0, -1.0)[0]


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


@pytest.mark.parametrize("name", LOSSES)
@BOTH_MEANS
def test_a_batch_without_a_trained_token_has_a_loss_of_0_and_a_gradient_of_0(name, mean_over):
    batch = padded([[Token(-1.0, -1.0, 1.0, False)]])
    loss = LOSSES[name][0](batch, mean_over=mean_over, sequence_ids=batch.sequence_ids)
    loss.backward()
    assert loss.item() == 0
    assert batch.logprobs.grad.tolist() == [[0.0]]
