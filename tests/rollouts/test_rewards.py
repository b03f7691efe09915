"""Rewards as functions: each is called, weighted, stored by its name, and named where it fails."""

import asyncio
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sub_agents import play

from rollouts import StepResult, Trajectory
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.rewards import (
    GroupReward,
    Reward,
    episode_reward_parts,
    rank_by,
    reward_parts,
    rewards_of,
    score_episode,
    score_group,
)
from rollouts.testing import ScriptedEngine


def scores(rewards, *arguments):
    return asyncio.run(score_episode(rewards, "the place", *arguments))


def group_scores(rewards, episodes):
    return asyncio.run(score_group(rewards, "the group of task 't'", episodes))


def episodes(count):
    return [Trajectory(str(index)) for index in range(count)]


async def length_later(text):
    await asyncio.sleep(0)
    return len(text)


def test_rewards_are_weighted_summed_and_kept_apart():
    rewards = [
        Reward("length", 0.5, len),
        Reward("later", -1.0, length_later),
        Reward("thread", 2, lambda text: threading.current_thread() is not threading.main_thread(), threaded=True),
        Reward("array", 1.0, lambda text: np.float32(0.25)),
    ]
    reward, info = scores(rewards, "four")
    assert reward == 0.5 * 4 - 4 + 2 * 1 + 0.25
    assert info == {
        "rewards": {
            "length": {"score": 4.0, "weight": 0.5},
            "later": {"score": 4.0, "weight": -1.0},
            "thread": {"score": 1.0, "weight": 2.0},
            "array": {"score": 0.25, "weight": 1.0},
        }
    }


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda text: math.nan, "returned nan; return a finite number"),
        (lambda text: None, "returned None"),
        (lambda text: "1", "returned '1'"),
        (lambda text: [1.0], r"returned \[1.0\]"),
        (lambda text: text.missing, "raised AttributeError"),
        (lambda text: next(iter(())), "raised .*StopIteration"),
    ],
    ids=["nan", "None", "text", "list", "exception", "StopIteration"],
)
def test_a_function_that_fails_is_named_with_its_place(function, reason, threaded):
    rewards = [Reward("good", 1.0, len), Reward("bad", 1.0, function, threaded)]
    with pytest.raises(RolloutsError, match=f"reward 'bad' for the place {reason}"):
        scores(rewards, "text")


def test_a_cancelled_scoring_is_cancelled_and_not_an_error():
    async def scenario():
        waiting = asyncio.Event()

        async def wait(text):
            waiting.set()
            await asyncio.Event().wait()

        scoring = asyncio.create_task(score_episode([Reward("wait", 1, wait)], "the place", "x"))
        await waiting.wait()
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(scenario())


def test_a_function_that_waited_for_something_cancelled_has_failed():
    async def wait(text):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(RolloutsError, match="waited for something that was cancelled"):
        scores([Reward("wait", 1, wait)], "x")


def test_group_rewards_are_weighted_summed_and_kept_apart():
    rewards = [
        GroupReward("index", 2.0, lambda group: [int(each.episode_id) for each in group]),
        GroupReward("ones", -1.0, lambda group: np.ones(len(group), np.float32), threaded=True),
    ]
    total, parts = group_scores(rewards, episodes(3))
    assert total.tolist() == [-1.0, 1.0, 3.0]
    assert {name: column.tolist() for name, column in parts.items()} == {"index": [0, 1, 2], "ones": [1, 1, 1]}
    assert total.dtype == parts["ones"].dtype == np.float64


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda group: [1.0], r"returned \[1.0\]; return a list with a finite number for each of the 3 episodes"),
        (lambda group: 1.0, "returned 1.0; return a list with a finite number for each of the 3 episodes"),
        (lambda group: {0.1, 0.2, 0.3}, r"returned \{.*\}; return a list"),
        (lambda group: [0.0, math.inf, 0.0], r"returned \[0.0, inf, 0.0\], not finite at index 1; return a list"),
        (lambda group: group[3], "raised IndexError"),
    ],
    ids=["too few", "a number", "a set", "infinite", "exception"],
)
def test_a_group_reward_that_fails_is_named_with_its_group(function, reason):
    with pytest.raises(RolloutsError, match=f"reward 'bad' for the group of task 't' {reason}"):
        group_scores([GroupReward("bad", 1.0, function)], episodes(3))


def test_a_group_reward_with_the_name_of_a_reward_of_the_episodes_is_refused(renderer):
    group = [play_twice(renderer)]
    with pytest.raises(RolloutsError, match=r"reward 'a' .* has the name of a reward of the episodes"):
        group_scores([GroupReward("a", 1.0, np.ones)], group)


def test_ranks_are_the_shares_of_episodes_with_a_lower_key():
    group = episodes(5)
    group[2].error = "failed"
    keys = {"0": 3.0, "1": 1.0, "3": 3.0, "4": 7.0}
    rank = rank_by(lambda episode: keys[episode.episode_id])
    assert rank(group) == [0.5, 0.0, 0.0, 0.5, 1.0]
    assert rank(group[:1]) == [0.5]
    assert rank([group[2]]) == [0.0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12))
def test_ranks_keep_the_order_of_the_keys_and_have_the_mean_one_half(keys):
    ranks = rank_by(lambda episode: keys[int(episode.episode_id)])(episodes(len(keys)))
    assert np.mean(ranks) == pytest.approx(0.5)
    for one, first in zip(keys, ranks, strict=True):
        for other, second in zip(keys, ranks, strict=True):
            assert (one < other) == (first < second)


@pytest.mark.parametrize("key", [None, math.nan, (1.0, math.nan), np.float32("nan")], ids=str)
def test_a_key_without_a_place_in_an_order_is_an_error_that_names_its_episode(key):
    rank = rank_by(lambda episode: key if episode.episode_id == "1" else 0.5)
    with pytest.raises(RolloutsError, match=r"the key of episode 1 is .*; return a number, or a tuple of numbers"):
        group_scores([GroupReward("rank", 1.0, rank)], episodes(3))


class Twice:
    """Two turns whose rewards have parts; the info of the first has other entries too."""

    def reset(self, seed):
        self.turns = 0
        return [{"role": "user", "content": "?"}]

    def step(self, assistant):
        self.turns += 1
        parts = {"a": {"score": self.turns, "weight": 1.0}, "b": {"score": 0.5, "weight": 2.0}, "odd": "none"}
        info = {"rewards": parts if self.turns == 1 else {"a": parts["a"]}}
        return StepResult([{"role": "user", "content": "?"}], done=self.turns == 2, info=info)


def play_twice(renderer):
    return play(Twice(), ScriptedEngine(["x", "y"], renderer=renderer), renderer)


def test_the_parts_of_an_episode_are_summed_over_its_turns(renderer):
    trajectory = play_twice(renderer)
    assert episode_reward_parts(trajectory) == {"a": 3.0, "b": 0.5}
    parts = reward_parts([trajectory, Trajectory("without")])
    assert {name: column.tolist() for name, column in parts.items()} == {"a": [3.0, 0.0], "b": [0.5, 0.0]}


@pytest.mark.parametrize("kind", [Reward, GroupReward])
@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", 3), ("weight", math.nan), ("weight", "1"), ("function", 1.0)],
)
def test_a_wrong_field_of_a_reward_is_refused(kind, field, value):
    with pytest.raises(ArgumentError, match=f"{field} is "):
        kind(**{"name": "a", "weight": 1.0, "function": len, field: value})


def test_a_function_alone_is_a_reward_named_score():
    assert rewards_of(len) == (Reward("score", 1.0, len),)
    assert rewards_of(None) == ()
    for wrong in ("len", [len], 3):
        with pytest.raises(ArgumentError, match="score is"):
            rewards_of(wrong)
    with pytest.raises(ArgumentError, match="score is 'a'; 2 rewards have this name"):
        rewards_of([Reward("a", 1, len), Reward("a", 2, len)])
