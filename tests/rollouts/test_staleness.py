"""How old the weights of tokens and samples are, and what leaves out the old ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.protocol import WeightSpan
from rollouts.errors import SampleError
from rollouts.training import (
    Staleness,
    TrainingBatch,
    TrainingSample,
    rollout_correction,
    sample_staleness,
    split_by_staleness,
    token_lags,
)


def sample(versions, *, gap=0, name="s"):
    """Two prompt tokens, then one trained token for each version, with `gap` tokens that are not trained in between."""
    mask = np.array([False, False] + ([True] + [False] * gap) * len(versions))
    zeros = np.zeros(len(mask), np.float32)
    spans = tuple(WeightSpan(version, index, index + 1) for index, version in enumerate(versions))
    return TrainingSample(np.arange(len(mask)), mask, zeros, zeros, weight_spans=spans, name=name)


def test_the_oldest_and_the_newest_version_of_a_sample_and_their_lags():
    assert sample_staleness(sample(["9", "12", "10"]), "12") == Staleness("9", "12", 3, 0)
    assert sample_staleness(sample(["9", "10"]), 12) == Staleness("9", "10", 3, 2)
    assert sample_staleness(sample([]), 12) is None


def test_versions_with_names_need_their_order():
    named = sample(["warm", "final"])
    order = ["base", "warm", "mid", "final"]
    assert sample_staleness(named, "final", versions=order) == Staleness("warm", "final", 2, 0)
    with pytest.raises(SampleError, match="sample s: weight version 'warm' has no known place; pass versions="):
        sample_staleness(named, 3)
    with pytest.raises(SampleError, match="weight version 'final' has no known place; add it to versions"):
        sample_staleness(named, "warm", versions=order[:2])


def test_samples_with_a_token_that_is_too_old_are_set_apart():
    rows = [sample(["3", "5"], name="a"), sample(["4"], name="b"), sample([], name="c"), sample(["2"], name="d")]
    kept, stale = split_by_staleness(rows, 5, max_lag=1)
    assert [row.name for row in kept] == ["b", "c"]
    assert [row.name for row in stale] == ["a", "d"]


VERSIONS = st.lists(st.lists(st.integers(0, 7).map(str), max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@given(versions=VERSIONS, gap=st.integers(0, 2), max_lag=st.integers(0, 7))
def test_the_lag_of_each_token_of_a_batch_is_that_of_its_span_in_both_layouts(layout, versions, gap, max_lag):
    batch = TrainingBatch.from_samples([sample(each, gap=gap) for each in versions], pad_id=0, layout=layout)
    lags = token_lags(batch, 7)
    expected = [7 - int(version) for each in versions for version in each]
    assert lags[batch.loss_mask].tolist() == expected
    assert (lags[~batch.loss_mask] == 0).all()
    tensors = (batch.logprobs, batch.logprobs, batch.loss_mask, batch.sequence_ids)
    fresh = rollout_correction(*tensors, {"max_lag": max_lag}, lags=lags).mask
    assert torch.equal(fresh, batch.loss_mask & (lags <= max_lag))
    assert fresh.sum() == sum(lag <= max_lag for lag in expected)


def test_a_trained_token_without_a_version_is_an_error_and_not_fresh():
    row = sample(["3", "4", "5"], gap=1)
    lacking = replace(row, weight_spans=(row.weight_spans[0], row.weight_spans[2]))
    with pytest.raises(SampleError, match="sample s: token 4 is trained and no weight span has it; use an engine"):
        split_by_staleness([lacking], 5, max_lag=9)


def test_leading_zeros_do_not_change_a_version():
    assert sample_staleness(sample(["0" * 5000 + "7", "08"]), 8).max_lag == 1
