"""The agents of the turns of a trajectory, and rewards of turns that are not the last."""

import pytest
from test_trajectory_contents import completion, say

from renderers import RenderedTokens
from rollouts import Trajectory
from rollouts.errors import TrajectoryError


def add(trajectory, ids, agent):
    return trajectory.add_turn(RenderedTokens(ids), completion(9), say("a"), agent=agent)


@pytest.mark.parametrize("agent", [None, 3, b"critic", "\ud800"], ids=repr)
def test_an_agent_that_is_no_text_is_refused(agent):
    trajectory = Trajectory("e")
    with pytest.raises(TrajectoryError):
        add(trajectory, [1], agent)
    assert (trajectory.nodes, trajectory.turns) == ([], [])


def test_turns_of_several_agents_fork_only_where_one_does_not_continue_its_own_last_turn():
    trajectory = Trajectory("e")
    add(trajectory, [1], "")
    add(trajectory, [2], "critic")
    add(trajectory, [1, 9, 3], "")
    add(trajectory, [2, 9, 4], "critic")
    assert trajectory.forks == 0
    add(trajectory, [5], "critic")
    add(trajectory, [1, 9, 6], "")
    assert trajectory.forks == 2


@pytest.mark.parametrize("turn", [-1, 1, 1.5, "0", True], ids=repr)
def test_a_reward_for_a_turn_that_is_not_there_is_refused(turn):
    trajectory = Trajectory("e")
    add(trajectory, [1], "")
    with pytest.raises(TrajectoryError, match="1 turns and no turn"):
        trajectory.record_reward(1.0, {}, turn=turn)
    assert trajectory.turns[0].reward == 0.0
    with pytest.raises(TrajectoryError, match="0 turns and no turn None; call add_turn first"):
        Trajectory("e").record_reward(1.0, {})
