"""Rewards as functions: of an episode, called by its environment, and of a group, called by the runner; judges."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rollouts.calls import call_on_thread, gathered
from rollouts.errors import ArgumentError, RolloutsError, describe_exception, is_unicode, short_repr
from rollouts.judge.judge import Judge, JudgeUsage, Verdict
from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number

__all__ = [
    "GroupReward",
    "Judge",
    "JudgeUsage",
    "Reward",
    "Verdict",
    "episode_reward_parts",
    "rank_by",
    "reward_parts",
]

#: The key in the info of a turn under which environments store their rewards by name.
INFO_KEY = "rewards"


@dataclass(frozen=True, slots=True)
class _RewardFunction:
    name: str
    weight: float
    function: Callable[..., Any]
    threaded: bool = False

    def __post_init__(self) -> None:
        # Values of other types would fail only when an episode has ended.
        is_name = isinstance(self.name, str) and self.name and is_unicode(self.name)
        for field, is_valid, rule in (
            ("name", is_name, "text that is not empty"),
            ("weight", finite_number(self.weight) is not None, "a finite number"),
            ("function", callable(self.function), "a function"),
        ):
            if not is_valid:
                rule = f"pass {rule}, for {type(self).__name__} {short_repr(self.name)}"
                raise ArgumentError(field, getattr(self, field), rule)


@dataclass(frozen=True, slots=True)
class Reward(_RewardFunction):
    """A named reward of an episode: `weight` times what `function` returns, a finite number.

    The environment that the reward is given to documents the arguments of `function`. A function that is not `async` is
    called on the event loop; with `threaded`, on a thread, for functions that compute or wait for longer than a
    millisecond. Raises `ArgumentError` for values of other types.
    """


@dataclass(frozen=True, slots=True)
class GroupReward(_RewardFunction):
    """A named reward of the episodes of a group: `weight` times what `function(episodes)` returns.

    `episodes` are the G trajectories of a finished group by index, also those that failed (`error` is not empty); the
    result is a finite number for each. `rank_by` makes such a function. `async` and `threaded`: as for `Reward`.
    Raises `ArgumentError` for values of other types.
    """


class Scores(NamedTuple):
    """The sum of weighted rewards, and `{"rewards": {name: {"score": ..., "weight": ...}}}` for the info of a turn."""

    reward: float
    info: dict[str, Any]


class GroupScores(NamedTuple):
    """The sum of weighted group rewards, float64 (G,), and each without its weight by name, float64 (G,)."""

    rewards: np.ndarray
    parts: dict[str, np.ndarray]


def rewards_of(score: Callable[..., Any] | Reward | Sequence[Reward] | None) -> tuple[Reward, ...]:
    """The rewards that an environment is given: one function, which gets the name "score", a `Reward`, or several.

    Raises `ArgumentError` for anything else, and if two have one name.
    """
    if score is None:
        return ()
    if isinstance(score, Reward):
        return (score,)
    if isinstance(score, Sequence) and not isinstance(score, str) and all(isinstance(one, Reward) for one in score):
        check_names("score", score)
        return tuple(score)
    if not callable(score):
        raise ArgumentError("score", score, "pass a function, a Reward or a list of Reward")
    return (Reward("score", 1.0, score),)


def check_names(argument: str, rewards: Sequence[Reward] | Sequence[GroupReward]) -> None:
    """Raise `ArgumentError` if two rewards have one name, or one of a group has a name that is taken."""
    names = [reward.name for reward in rewards]
    for reward in rewards:
        if isinstance(reward, GroupReward) and reward.name == "environment":
            rule = "this is the name of what the environments return; give the reward another name"
            raise ArgumentError(argument, reward.name, rule)
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(argument, name, f"{names.count(name)} rewards have this name; give each its own")


async def score_episode(rewards: Sequence[Reward], place: str, *arguments: Any) -> Scores:
    """Call the functions of `rewards` with `arguments`, all at the same time. Raises `RolloutsError`."""
    values = await gathered(_number(reward, place, arguments) for reward in rewards)
    scores = {
        reward.name: {"score": value, "weight": float(reward.weight)}
        for reward, value in zip(rewards, values, strict=True)
    }
    total = sum(each["score"] * each["weight"] for each in scores.values())
    return Scores(float(total), {INFO_KEY: scores} if scores else {})


async def score_group(rewards: Sequence[GroupReward], place: str, episodes: Sequence[Trajectory]) -> GroupScores:
    """Call the functions of `rewards` with the episodes of a group.

    Raises `RolloutsError`, also for a name that a reward of the episodes has: the values by name are stored together.
    """
    if taken := sorted(reward_parts(episodes).keys() & {reward.name for reward in rewards}):
        reason = "has the name of a reward of the episodes; give it another one"
        raise RolloutsError(f"reward {taken[0]!r} for {place} {reason}")
    columns = await gathered(_column(reward, place, episodes) for reward in rewards)
    total = np.zeros(len(episodes))
    for reward, column in zip(rewards, columns, strict=True):
        total += float(reward.weight) * column
    return GroupScores(total, {reward.name: column for reward, column in zip(rewards, columns, strict=True)})


def episode_reward_parts(trajectory: Trajectory) -> dict[str, float]:
    """The rewards by name that the environment stored in the infos of the turns, without weights, summed over turns."""
    parts: dict[str, float] = {}
    for turn in trajectory.turns:
        if INFO_KEY not in turn.info:
            continue
        stored = turn.info[INFO_KEY]
        for name, each in stored.items() if isinstance(stored, Mapping) else ():
            score = finite_number(each.get("score")) if isinstance(each, Mapping) else None
            if score is not None:
                parts[str(name)] = parts.get(str(name), 0.0) + score
    return parts


def reward_parts(episodes: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The `episode_reward_parts` of a group, float64 (G,) for each name; 0.0 for an episode that has no such reward."""
    by_episode = [episode_reward_parts(episode) for episode in episodes]
    names = dict.fromkeys(name for parts in by_episode for name in parts)
    return {name: np.array([parts.get(name, 0.0) for parts in by_episode]) for name in names}


def rank_by(key: Callable[[Trajectory], Any]) -> Callable[[Sequence[Trajectory]], list[float]]:
    """A function for `GroupReward` that ranks the episodes of a group by `key`, a number or a tuple of numbers.

    An episode gets the share of the other episodes whose key is lower, where an equal key counts as half: without ties
    1.0 for the highest key and 0.0 for the lowest. Failed episodes get 0.0 and are not ranked; a single ranked episode
    gets 0.5. A key that is None or NaN, which has no place in an order, is a `RolloutsError`.
    """

    def ranks(episodes: Sequence[Trajectory]) -> list[float]:
        keys = [None if episode.error else _ordered(key(episode), index) for index, episode in enumerate(episodes)]
        ranked = [each for each in keys if each is not None]
        return [0.0 if each is None else _rank(each, ranked) for each in keys]

    return ranks


def _ordered(key: Any, index: int) -> Any:
    """The key of an episode. Raises ValueError for None and NaN."""
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part != part:
            raise ValueError(f"the key of episode {index} is {short_repr(key)}; return a number, or a tuple of numbers")
    return key


def _rank(key: Any, keys: Sequence[Any]) -> float:
    """The share of the other keys that are lower, where an equal one counts as half; 0.5 if there is no other."""
    lower = sum(other < key for other in keys)
    equal = sum(other == key for other in keys) - 1  # without the key itself
    return (lower + equal / 2) / (len(keys) - 1) if len(keys) > 1 else 0.5


async def _number(reward: Reward, place: str, arguments: tuple[Any, ...]) -> float:
    value = await _call(reward, place, arguments)
    number = finite_number(value)
    if number is None:
        raise RolloutsError(f"reward {reward.name!r} for {place} returned {short_repr(value)}; return a finite number")
    return number


async def _column(reward: GroupReward, place: str, episodes: Sequence[Trajectory]) -> np.ndarray:
    values, count = await _call(reward, place, (episodes,)), len(episodes)
    # `list` would take numbers from these that are not those of the episodes.
    is_list = isinstance(values, Iterable) and not isinstance(values, Mapping | Set | bytes | bytearray)
    numbers = [finite_number(value) for value in values] if is_list else []
    if len(numbers) != count or None in numbers:
        where = f", not finite at index {numbers.index(None)}" if None in numbers else ""
        reason = (
            f"returned {short_repr(values)}{where}; return a list with a finite number for each of the {count} episodes"
        )
        raise RolloutsError(f"reward {reward.name!r} for {place} {reason}")
    return np.array(numbers, np.float64)


async def _call(reward: _RewardFunction, place: str, arguments: tuple[Any, ...]) -> Any:
    try:
        if reward.threaded:
            value = await call_on_thread(reward.function, *arguments)
        else:
            value = reward.function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # The episode itself is cancelled; otherwise it is something that the function awaited.
        if task is None or task.cancelling() > 0:
            raise
        raise RolloutsError(f"reward {reward.name!r} for {place} waited for something that was cancelled") from error
    except Exception as error:  # a function of a user may raise anything
        raise RolloutsError(f"reward {reward.name!r} for {place} raised {describe_exception(error)}") from error
