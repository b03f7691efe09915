"""The likeliest tokens of completions in trajectories, their files, samples and batches."""

from dataclasses import replace

import numpy as np
import pytest

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, TopLogprobs, Trajectory
from rollouts.errors import SampleError, TrajectoryError
from rollouts.training import samples_from_trajectory
from rollouts.training.truncation import truncate_sample

SAID = {"role": "assistant", "content": ""}
K = 20


def top_of(ids, k=K):
    """Rows that tell their token: no two tokens have the same."""
    first = np.asarray(ids, np.int32)[:, None] * 100
    rows = first + np.arange(k, dtype=np.int32)
    return TopLogprobs(rows, (-0.001 * (first + 1) - np.arange(k)).astype(np.float32))


def completion(ids, top=None):
    logprobs = np.full(len(ids), -1.0, np.float32)
    return Completion(0, np.array(ids, np.int32), logprobs, FinishReason.STOP, top_logprobs=top)


def two_turns(k=K, then=K):
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1, 2]), completion([3, 4], top_of([3, 4], k)), SAID)
    second = completion([6], top_of([6], then) if then else None)
    trajectory.add_turn(RenderedTokens([1, 2, 3, 4, 5]), second, SAID)
    trajectory.finish()
    return trajectory


def sample_of_two_turns(**turns):
    (sample,) = samples_from_trajectory(two_turns(**turns), advantage=1.0, processors={})
    return sample


def assert_rows(top, ids):
    expected = top_of(ids, top.token_ids.shape[1])
    np.testing.assert_array_equal(top.token_ids, expected.token_ids)
    np.testing.assert_array_equal(top.logprobs, expected.logprobs)


def test_rows_from_root_to_leaf_are_those_of_the_completions_and_none_in_prompts():
    trajectory = two_turns()
    top = trajectory.top_logprobs(trajectory.leaves()[0])
    sampled = np.array([False, False, True, True, False, True])
    assert_rows(TopLogprobs(*(column[sampled] for column in top)), [3, 4, 6])
    assert (top.token_ids[~sampled] == -1).all()
    assert np.isnan(top.logprobs[~sampled]).all()
    assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)


def test_a_turn_without_them_has_rows_without_a_prediction_and_of_different_numbers_the_smallest_counts():
    trajectory = two_turns(then=0)
    assert trajectory.top_logprobs(trajectory.leaves()[0]).token_ids[-1].tolist() == [-1] * K
    sample = sample_of_two_turns(then=4)
    assert_rows(TopLogprobs(*(column[sample.loss_mask] for column in sample.top_logprobs)), [3, 4, 6])
    assert sample.top_logprobs.token_ids.shape == (6, 4)


@pytest.mark.parametrize(
    "top",
    [
        top_of([3]),
        TopLogprobs(top_of([3, 4]).token_ids, top_of([3, 4]).logprobs[:, :2]),
        TopLogprobs(top_of([3, 4]).token_ids, np.full((2, K), np.nan, np.float32)),
        (1, 2),
    ],
)
def test_rows_that_do_not_fit_the_completion_are_refused(top):
    with pytest.raises(TrajectoryError, match="likeliest"):
        Trajectory("e").add_turn(RenderedTokens([1]), completion([3, 4], top), SAID)


def test_a_sample_refuses_another_number_of_rows():
    with pytest.raises(SampleError, match="top_logprobs"):
        replace(sample_of_two_turns(), top_logprobs=top_of([1]))


def test_a_truncated_sample_keeps_the_rows_of_its_tokens():
    sample = sample_of_two_turns()
    truncated, _ = truncate_sample(sample, 5)
    for one, other in zip(truncated.top_logprobs, sample.top_logprobs, strict=True):
        np.testing.assert_array_equal(one, other[:5])
