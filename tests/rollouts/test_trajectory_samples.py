"""Samples of trajectories with branches: shared nodes, advantages per turn and token, weight spans."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, Trajectory
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import ArgumentError
from rollouts.training import samples_from_trajectory

#: For each turn: the turn that it continues (of those before it, -1: none), its new prompt tokens and sampled tokens.
TREES = st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6)
SHARED = ["first_leaf", "weighted", "each"]


def tree(turns):
    """A trajectory in which every token is another, and turn i was sampled from weights "i"."""
    trajectory, fresh = Trajectory("e"), iter(range(10_000))
    for index, (parent, new, sampled) in enumerate(turns):
        parent = min(parent, index - 1)
        before = trajectory.token_ids(trajectory.turns[parent].node).tolist() if parent >= 0 else []
        completion = Completion(
            0,
            np.array([next(fresh) for _ in range(sampled)]),
            np.linspace(-1 - index, -2 - index, sampled, dtype=np.float32),
            FinishReason.STOP,
            weight_spans=(WeightSpan(str(index), 0, sampled),),
        )
        prompt = RenderedTokens([*before, *(next(fresh) for _ in range(new))])
        trajectory.add_turn(prompt, completion, {"role": "assistant", "content": "x"})
    return trajectory


def samples(trajectory, advantage=1.0, shared="first_leaf"):
    return samples_from_trajectory(trajectory, advantage=advantage, processors={}, shared=shared)


def trained_of(rows):
    """token id: [(log-probability, advantage, version of the span that has it)], for every time that it is trained."""
    trained = {}
    for row in rows:
        version = {i: span.version for span in row.weight_spans for i in range(span.start, span.end)}
        for place, index in enumerate(np.flatnonzero(row.loss_mask)):
            entry = (float(row.logprobs[index]), float(row.advantages[index]), version[place])
            trained.setdefault(int(row.token_ids[index]), []).append(entry)
    return trained


@pytest.mark.parametrize("shared", SHARED)
@given(TREES)
def test_every_sampled_token_is_trained_as_often_as_shared_says_with_its_own_logprob_and_version(shared, turns):
    trajectory = tree(turns)
    rows = samples(trajectory, advantage=3.0, shared=shared)
    paths = [trajectory.path(leaf) for leaf in trajectory.leaves()]
    assert [row.token_ids.tolist() for row in rows] == [trajectory.token_ids(path[-1]).tolist() for path in paths]
    expected = {}
    for index, turn in enumerate(trajectory.turns):
        node = trajectory.nodes[turn.node]
        leaves = sum(turn.node in path for path in paths)
        times = 1 if shared == "first_leaf" else leaves
        advantage = np.float32(3.0 / leaves if shared == "weighted" else 3.0)
        for token, logprob in zip(node.token_ids.tolist(), node.logprobs.tolist(), strict=True):
            expected[token] = [(logprob, float(advantage), str(index))] * times
    assert trained_of(rows) == expected


@given(TREES, st.data())
def test_advantages_per_turn_and_per_token_are_on_the_tokens_of_their_turn(turns, data):
    trajectory = tree(turns)
    per_token = data.draw(st.lists(st.booleans(), min_size=len(turns), max_size=len(turns)))
    advantage = [
        np.arange(sampled) + 10.0 * index if by_token else 10.0 * index
        for index, ((_, _, sampled), by_token) in enumerate(zip(turns, per_token, strict=True))
    ]
    trained = trained_of(samples(trajectory, advantage))
    for entry, turn in zip(advantage, trajectory.turns, strict=True):
        node = trajectory.nodes[turn.node]
        found = [trained[token][0][1] for token in node.token_ids.tolist()]
        assert found == np.broadcast_to(entry, len(node)).tolist()


@pytest.mark.parametrize(
    ("advantage", "error"),
    [
        (
            "high",
            "advantage is 'high'; pass one finite number for episode e, or a list with one entry for each of its 2",
        ),
        ([1.0], "advantage is [1.0]; pass one finite number for episode e, or a list with one entry for each"),
        (
            [1.0, np.ones(3)],
            "advantage[1] is array([1., 1., 1.]); pass a finite number, or an array with one for each of",
        ),
        ([1.0, float("nan")], "advantage[1] is nan; pass a finite number"),
        ([np.array([1.0, np.inf]), 1.0], "advantage[0] is array([ 1., inf]); pass a finite number"),
        ([None, 1.0], "advantage[0] is None; pass a finite number"),
        ([np.ones(2), np.ones(1), np.ones(1)], "advantage is [array"),
    ],
)
def test_advantages_that_do_not_fit_the_turns_are_refused(advantage, error):
    with pytest.raises(ArgumentError, match=re.escape(error)):
        samples(tree([(-1, 1, 2), (0, 1, 1)]), advantage)


def test_advantages_by_turn_need_a_turn_for_every_sampled_node():
    trajectory = tree([(-1, 1, 2), (0, 1, 1)])
    without_turn = replace(trajectory, turns=trajectory.turns[1:])
    with pytest.raises(ArgumentError, match="node 1 of episode e has sampled tokens and no turn: pass one number"):
        samples(without_turn, [1.0])
    assert len(samples(without_turn, 1.0)) == 1


def test_another_way_to_share_is_refused():
    with pytest.raises(ArgumentError, match="shared is 'last_leaf'; pass one of first_leaf, weighted, each"):
        samples(tree([(-1, 1, 1)]), shared="last_leaf")
