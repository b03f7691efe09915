"""Events of a run of one group, as a runner reports them, each with the time in seconds at which it is reported.

Two episodes of the task "t": the first has two turns and is done, the second fails in the engine and is retried.
"""

import numpy as np

from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeRetried,
    EpisodeStarted,
    EpisodeWaiting,
    GroupDelivered,
    GroupFinished,
    TurnFinished,
    WeightsUpdated,
    WeightUpdateFailed,
)

GROUP = GroupFinished(
    "t",
    total_rewards=np.array([1.5, 0.25]),
    environment_rewards=np.array([1.0, 0.25]),
    group_rewards=np.array([0.5, 0.0]),
    reward_parts={"correct": np.array([1.0, 0.0])},
    seconds=9.0,
)
TIMELINE = [
    (0.0, EpisodeStarted("t-0", "t", 0, 0)),
    (0.0, EpisodeStarted("t-1", "t", 1, 0)),
    (0.0, EpisodeWaiting("t-0", 0, "environment.make")),
    (1.0, EpisodeWaiting("t-0", 0, "environment.reset")),
    (2.0, EpisodeWaiting("t-0", 0, "renderer")),
    (2.0, EpisodeWaiting("t-1", 0, "engine")),
    (3.0, EpisodeWaiting("t-0", 0, "engine")),
    (5.0, EpisodeWaiting("t-0", 0, "environment.step")),
    (6.0, TurnFinished("t-0", 0, 100, 10, 1, 2.0, 1.0, 1.0, sounds=3)),
    (6.0, EpisodeWaiting("t-0", 1, "renderer")),
    (6.5, EpisodeEnded("t-1", "failed", 0.0, "ServerTimeoutError: request t-1-0: no answer", 6.5)),
    (6.5, EpisodeRetried("t-1", "ServerTimeoutError: request t-1-0: no answer", 0.5)),
    (7.0, EpisodeStarted("t-1-1", "t", 1, 1)),
    (7.0, EpisodeWaiting("t-1-1", 0, "engine")),
    (7.0, EpisodeWaiting("t-0", 1, "engine")),
    (8.0, EpisodeWaiting("t-0", 1, "environment.step")),
    (8.0, TurnFinished("t-1-1", 0, 90, 20, 0, 1.0, 0.0, 0.0)),
    (8.0, EpisodeEnded("t-1-1", "truncated", 0.25, "", 1.0)),
    (9.0, TurnFinished("t-0", 1, 130, 5, 1, 1.0, 1.0, 1.0)),
    (9.0, EpisodeEnded("t-0", "done", 1.0, "", 9.0)),
    (9.0, GROUP),
    (9.5, WeightsUpdated("1", "abort", 0.5)),
    (9.5, WeightUpdateFailed("2", "WeightUpdateError: no such directory")),
    (10.0, GroupDelivered("t", 1)),
]


class FakeClock:
    """A clock that stands still."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def replay(listener, clock, *, until=float("inf")):
    """Report the events up to the time `until`, which the clock shows afterwards; to the end without it."""
    for seconds, event in TIMELINE:
        if seconds > until:
            break
        clock.now = seconds
        listener(event)
    if until != float("inf"):
        clock.now = until
