"""Each loss against its formula, written as loops over sequences and tokens, for padded and packed batches."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.errors import ArgumentError
from rollouts.training import (
    cispo_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
    truncated_ratio_loss,
    truncated_ratios,
)


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
    "tis": (
        lambda b, **o: truncated_ratio_loss(*b.policy(), cap=1.5, **o).loss,
        lambda token, _: -min(math.exp(token.new - token.old), 1.5) * token.advantage * token.new,
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


def test_a_token_beyond_the_upper_limit_keeps_a_limited_gradient_in_cispo_and_tis_and_none_in_ppo():
    far = [math.log(3.0)]
    assert gradient_of(policy_gradient_loss, far, [0.0], 1.0) == [0.0]
    assert gradient_of(cispo_loss, far, [0.0], 1.0) == [pytest.approx(-1.5)]
    assert gradient_of(truncated_ratio_loss, far, [0.0], 1.0) == [pytest.approx(-2.0)]


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
    assert truncated_ratio_loss(logprobs, *rest).clipped == 0.25
    assert cispo_loss(logprobs, *rest, clip=(1.0, 0.2)).clipped == 0.5
    report = sequence_ratio_loss(logprobs, *rest, sequence_ids=ids, clip=(0.4, 0.5))
    assert report.clipped == 0.5  # the second sequence
    assert report.mean_ratio == pytest.approx((math.sqrt(0.5) + math.sqrt(3.75)) / 2)
    assert policy_gradient_loss(logprobs, *rest).mean_ratio == pytest.approx(5.75 / 4)


def test_truncated_weights_times_the_advantages_give_the_clipped_surrogate_of_tis():
    sampler, old = torch.tensor([[-2.0, -1.0, 0.0]]), torch.tensor([[-1.0, -1.2, 5.0]])
    mask = torch.tensor([[True, True, False]])
    weights = truncated_ratios(old.requires_grad_(), sampler, mask, cap=2.0)
    assert weights.tolist() == [[2.0, pytest.approx(math.exp(-0.2)), 0.0]]
    assert not weights.requires_grad
    new, advantages = torch.tensor([[-0.9, -1.1, 0.0]]), torch.tensor([[1.0, -1.0, 9.0]])
    loss = policy_gradient_loss(new, old, advantages * weights, mask, clip=0.05).loss
    by_token = [2.0 * min(math.exp(0.1), 1.05), math.exp(-0.2) * min(-math.exp(0.1), -1.05)]
    assert loss.item() == pytest.approx(-sum(by_token) / 2)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("loss", [policy_gradient_loss, truncated_ratio_loss, cispo_loss, sequence_ratio_loss])
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


ROWS, MASK, IDS = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int32)
POLICY = (ROWS, ROWS, ROWS, MASK)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: sft_loss(ROWS, MASK, mean_over="rows"), "mean_over is 'rows'; pass one of tokens, sequences"),
        (lambda: sft_loss(ROWS, MASK, mean_over="sequences"), "sequence_ids is None; pass batch.sequence_ids"),
        (lambda: sft_loss(ROWS, MASK.long()), "the dtype of mask is 'torch.int64'; pass torch.bool"),
        (
            lambda: sft_loss(ROWS, MASK, mean_over="sequences", sequence_ids=IDS[0]),
            r"sequence_ids is 'torch.int32 \(2,\)'; pass integers \(1, 2\)",
        ),
        (lambda: sft_loss(ROWS.numpy(), MASK), "logprobs is array.*; pass a torch tensor"),
        (lambda: policy_gradient_loss(ROWS, ROWS, 1.0, MASK), "advantages is 1.0; pass a torch tensor"),
        (lambda: kl_loss(ROWS, ROWS.long(), MASK), "the dtype of reference_logprobs is 'torch.int64'; pass float32"),
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
        (lambda: truncated_ratio_loss(*POLICY, cap=0), "cap is 0; pass a finite number above 0"),
        (lambda: truncated_ratios(ROWS, ROWS, MASK, cap=math.inf), "cap is inf; pass a finite number above 0"),
        (lambda: kl_loss(ROWS, ROWS, MASK, estimator="k4"), "estimator is 'k4'; pass one of k1, k2, k3"),
        (lambda: kl_loss(ROWS, ROWS.T, MASK), r"the shape of reference_logprobs is \(2, 1\); pass"),
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
