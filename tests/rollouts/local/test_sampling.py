"""The row sampler draws what the parameters say."""

import numpy as np
import pytest
import torch

from rollouts import SamplingParams
from rollouts.engines.local.batch import RowSampler

CPU = torch.device("cpu")


def draws(logits: list[float], count: int, **params) -> np.ndarray:
    """`count` first tokens drawn from the same logits with different sample indices."""
    rows = torch.tensor([logits] * count)
    sampler = RowSampler([SamplingParams(max_tokens=1, seed=3, **params)] * count, range(count), CPU)
    return sampler.sample(rows, 0)[0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_frequencies_follow_the_softmax_at_a_temperature(temperature):
    logits = np.log([0.4, 0.3, 0.25, 0.05])
    probabilities = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    drawn = draws([*logits.tolist(), -torch.inf], 4000, temperature=temperature)
    counts = np.bincount(drawn, minlength=4)
    assert len(counts) == 4, "a token of probability 0 is never sampled"
    deviation = np.abs(counts - 4000 * probabilities) / np.sqrt(4000 * probabilities * (1 - probabilities))
    assert deviation.max() < 5


def test_top_k_keeps_the_k_most_likely():
    assert set(draws([0.0, 1.0, 0.9, -1.0], 500, top_k=2)) == {1, 2}


def test_top_p_keeps_the_smallest_set_that_holds_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(draws(logits, 2000, top_p=0.65)) == {0, 1}
    assert set(draws(logits, 2000, top_p=0.75)) == {0, 1, 2}
    assert set(draws(logits, 2000, top_p=0.01)) == {0}


def test_each_row_uses_its_own_parameters():
    logits = torch.tensor([[0.0, 1.0, 0.9]] * 3)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=1, seed=1), SamplingParams(seed=2)]
    sampler = RowSampler(params, [0, 0, 0], CPU)
    ids = np.array([sampler.sample(logits, step)[0].tolist() for step in range(100)])
    assert set(ids[:, 0]) == {1}
    assert set(ids[:, 1]) == {1}
    assert set(ids[:, 2]) == {0, 1, 2}
