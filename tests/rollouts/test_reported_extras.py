"""Routed experts and sampling masks on their way from a completion into the tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, Trajectory
from rollouts.errors import TrajectoryError

SAID = {"role": "assistant", "content": ""}


def experts_of(ids):
    """What a router does with a sequence, made so that a row tells everything that came up to its token: (n, 2, 1)."""
    sums = np.cumsum(np.asarray(ids) * 7 + 1)
    return np.stack([sums, sums * 3], axis=1)[:, :, None].astype(np.int32)


def completion(prompt, ids, **beside):
    """As an engine reports it: an expert row for every token that was read, which the last one was not."""
    experts = experts_of([*prompt, *ids])[:-1]
    logprobs = np.full(len(ids), -1.0, np.float32)
    reported = {"routed_experts": experts, **beside}
    return Completion(0, np.array(ids, np.int32), logprobs, FinishReason.STOP, **reported)


def add(trajectory, prompt, ids, **beside):
    return trajectory.add_turn(RenderedTokens(list(prompt)), completion(prompt, ids, **beside), SAID)


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), tokens, tokens), min_size=1, max_size=6))
def test_rows_along_any_path_are_those_of_one_pass_over_its_tokens(turns):
    """Whether a turn continues the one before it or forks, and wherever its prompt leaves what is known."""
    trajectory, history = Trajectory("e"), []
    for continues, new, ids in turns:
        prompt = [*history, *new] if continues else new
        add(trajectory, prompt, ids)
        history = [*prompt, *ids]
    for leaf in trajectory.leaves():
        rows = trajectory.extra(leaf, "routed_experts")
        assert not rows[0].any(), "nothing predicts the first token"
        np.testing.assert_array_equal(rows[1:], experts_of(trajectory.token_ids(leaf))[:-1])


def test_the_experts_of_a_prefix_that_is_known_are_those_of_the_turn_that_brought_it():
    """A later pass over the same tokens may be one of other weights; what was sampled was sampled after the first."""
    trajectory = Trajectory("e")
    add(trajectory, [1, 2], [3])
    later = experts_of([1, 2, 3, 4, 5])[:-1] + 1000
    leaf = add(trajectory, [1, 2, 3, 4], [5], routed_experts=later)
    rows = trajectory.extra(leaf, "routed_experts")
    np.testing.assert_array_equal(rows[1:3], experts_of([1, 2, 3])[:2])
    np.testing.assert_array_equal(rows[3:], later[2:4])


def test_sampling_masks_are_one_row_a_token_filled_up_with_no_token():
    masks = (np.array([7, 8], np.int32), np.array([9], np.int32), np.array([], np.int32))
    trajectory = Trajectory("e")
    leaf = add(trajectory, [1], [7, 9, 2], sampling_masks=masks)
    rows = trajectory.nodes[leaf].extras["sampling_mask"]
    assert rows.dtype == np.int32
    assert rows.tolist() == [[7, 8], [9, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"routed_experts": np.zeros((3, 2, 1), np.uint8)}, r"shape \(3, 2, 1\) for 3 tokens.*\(2, layers"),
        ({"routed_experts": np.zeros((2, 2), np.uint8)}, r"shape \(2, 2\)"),
        ({"sampling_masks": (np.array([3]), np.array([4]))}, "2 sampling masks for 1 sampled"),
    ],
)
def test_rows_that_do_not_fit_the_tokens_are_refused_and_the_episode_is_as_before(beside, words):
    trajectory = Trajectory("e")
    with pytest.raises(TrajectoryError, match=words):
        add(trajectory, [1, 2], [3], **beside)
    assert not trajectory.nodes


def test_an_extra_that_the_completion_has_is_not_given_again():
    trajectory = Trajectory("e")
    with pytest.raises(TrajectoryError, match="has routed_experts; pass other"):
        trajectory.add_turn(
            RenderedTokens([1]), completion([1], [2]), SAID, extras={"routed_experts": np.zeros((1, 2, 1))}
        )
    assert not trajectory.nodes


def test_a_node_without_the_extra_or_with_one_of_another_shape_is_named():
    trajectory = Trajectory("e")
    add(trajectory, [1], [2])
    without = add(trajectory, [1, 2, 3], [4], routed_experts=None)
    with pytest.raises(TrajectoryError, match=r"node 2 has no extra 'routed_experts'"):
        trajectory.extra(without, "routed_experts")
    other = add(trajectory, [1, 2, 9], [4], routed_experts=np.zeros((3, 5, 1), np.uint8))
    with pytest.raises(TrajectoryError, match=r"with rows of int32 \(2, 1\)"):
        trajectory.extra(other, "routed_experts")
