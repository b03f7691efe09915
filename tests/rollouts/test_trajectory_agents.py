"""The agents of the turns of a trajectory, and rewards of turns that are not the last."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
from test_trajectory_contents import completion, say

from renderers import RenderedTokens
from rollouts import Trajectory
from rollouts.errors import InvalidTurnError
from transport import decode, encode

# An episode of one turn, encoded before turns had an agent: zlib, then base64.
WITHOUT_AGENTS = (
    "eNqVUs1uEzEQtrdJxJGfPgdXjr0hLoEqjYTEJTLxZGOa2CuPty23lCdI1xCpl4rQ3WwS0QuIM1HJLRcO+wDwBDwCzCak5Yql8XjG"
    "nu/7xna93mgGjDFO9mt3/+eLMviPUa83npQlNbJ3/rM1vZ6JHT5sWvEK2s7Y1/xiDpFCI6GlZIoAchpaE0cUZZqymLnYakyl0TBz"
    "NtZt4UBmHWMPMe+Ds6qNGVhr7BydsLTXEi5HaBstcR5ZcwRa6DZMO0or7IL0n25VmEPQT4mEn08iYUG7mStTxI05in7UIzU9ExLK"
    "S/x4DCrsuhZGQmPWB6lETiSOqqZ9QBQh4AROnBXor24pSDwfpWUnVxsFLQsCjc7/1kwsHAsrU6U7Ziv7n4t6viY9IE7u8yOwqIzO"
    "1o1egpb+y83Bx2vwxhqbD0cJW94pH628fFpXdkofLIP1zHnCl4ysQtmvvrabHjSf7fvqAz9+xLiv3B/xgtfepAQOM4GoiFC7bbfj"
    "k9Xej83zno4FX+193wRvg3vBefKbOCunLBmeFbxa+mGyWJA/28ClMYLdIn3oqmEyGHh+9+LS9GR1HCYFDwq+Q7WV629s8H61/Ug3"
    "i8W1Z6zg/A/Ywu4D"
)


def test_an_episode_stored_before_turns_had_agents_is_read_with_the_agent_that_plays_the_environment():
    episode = decode(zlib.decompress(base64.b64decode(WITHOUT_AGENTS)))
    (turn,) = episode.turns
    assert (episode.episode_id, episode.seed, episode.truncated) == ("old", 5, True)
    assert (turn.agent, turn.reward, turn.info, turn.message["content"]) == ("", 0.5, {"a": 1}, "x")


def add(trajectory, ids, agent):
    return trajectory.add_turn(RenderedTokens(ids), completion(9), say("a"), agent=agent)


def test_the_agent_of_a_turn_is_stored():
    trajectory = Trajectory("e")
    add(trajectory, [1], "critic")
    add(trajectory, [2], "")
    assert [turn.agent for turn in decode(encode(trajectory)).turns] == ["critic", ""]


@pytest.mark.parametrize("agent", [None, 3, b"critic", "\ud800"], ids=repr)
def test_an_agent_that_is_no_text_is_refused(agent):
    trajectory = Trajectory("e")
    with pytest.raises(InvalidTurnError):
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


def test_a_reward_is_recorded_for_the_turn_that_is_named():
    trajectory = Trajectory("e")
    for ids in ([1], [2], [3]):
        add(trajectory, ids, "")
    trajectory.record_reward(1.0, {"a": 1}, turn=0)
    trajectory.record_reward(2.0, {}, turn=np.int64(1))
    trajectory.record_reward(3.0, {})
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]
    assert [turn.info for turn in trajectory.turns] == [{"a": 1}, {}, {}]


@pytest.mark.parametrize("turn", [-1, 1, 1.5, "0", True], ids=repr)
def test_a_reward_for_a_turn_that_is_not_there_is_refused(turn):
    trajectory = Trajectory("e")
    add(trajectory, [1], "")
    with pytest.raises(InvalidTurnError, match="1 turns and no turn"):
        trajectory.record_reward(1.0, {}, turn=turn)
    assert trajectory.turns[0].reward == 0.0


def test_agents_that_sampled_the_same_tokens_each_continue_their_own_completion():
    trajectory = Trajectory("e")
    first = {agent: add(trajectory, [1], agent) for agent in ("a", "b")}
    second = {agent: add(trajectory, [1, 9, new], agent) for agent, new in (("a", 2), ("b", 3))}
    for agent in ("a", "b"):
        assert first[agent] in trajectory.path(second[agent])
    assert len(trajectory.leaves()) == 2
    assert trajectory.forks == 0
