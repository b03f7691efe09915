"""What a runner reports while it runs. Listeners are synchronous functions `listener(event)` on the event loop.

Durations are in seconds. `error` is the text of an error, empty where there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rollouts.episodes.activity import Part
from rollouts.episodes.activity import TurnFinished as TurnFinished

#: What an episode waits for.
WaitingFor = Literal[Part, "worker", "retry"]
Outcome = Literal["done", "truncated", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class EpisodeStarted:
    """An episode began. `index` is its place in the group, `attempt` counts from 0."""

    episode_id: str
    task_id: str
    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class EpisodeWaiting:
    """An episode began to wait. `turn` counts from 0.

    It waits for a "retry" after an attempt that failed, and after its last turn where a score failed.
    """

    episode_id: str
    turn: int
    waiting_for: WaitingFor


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An attempt at an episode ended; one event for each attempt.

    `forks` is how often a turn did not extend the turn before it, which makes a training sample more. `length_stops` is
    how many turns were cut, at `max_tokens` or at the end of the context.
    """

    episode_id: str
    outcome: Outcome
    environment_reward: float
    error: str
    seconds: float
    forks: int = 0
    length_stops: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeRetried:
    """A failed attempt will be repeated after `delay_seconds`, under another episode id."""

    episode_id: str
    error: str
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """All episodes of a task ended. The rewards, and each of `reward_parts`, are those of the `Group`, float64 (G,)."""

    task_id: str
    total_rewards: np.ndarray
    environment_rewards: np.ndarray
    group_rewards: np.ndarray
    reward_parts: Mapping[str, np.ndarray]
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupDelivered:
    """The consumer received a group. `staleness` is in versions of the weights."""

    task_id: str
    staleness: int


@dataclass(frozen=True, slots=True)
class GroupSkipped:
    """A finished group was not delivered."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupStale:
    """Tokens of a group are older than allowed. `action` is "drop" or "downweight"."""

    task_id: str
    staleness: int
    action: str


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """The engine has new weights. `in_flight` is what was done with running requests: "abort", "wait" or "keep"."""

    version: str
    in_flight: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightUpdateFailed:
    """The engine did not take new weights."""

    version: str
    error: str


RunnerEvent: TypeAlias = (
    EpisodeStarted
    | EpisodeWaiting
    | TurnFinished
    | EpisodeEnded
    | EpisodeRetried
    | GroupFinished
    | GroupDelivered
    | GroupSkipped
    | GroupStale
    | WeightsUpdated
    | WeightUpdateFailed
)

Listener: TypeAlias = Callable[[RunnerEvent], object]
