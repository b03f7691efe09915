"""What `run_episode` and `run_episodes` raise: errors that hold the trajectories of what was completed."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.errors import RolloutsError
from rollouts.trajectory.tree import Trajectory


class EpisodeError(RolloutsError):
    """An episode failed. `trajectory` holds the turns that were completed; the cause is chained."""

    def __init__(self, reason: str, trajectory: Trajectory) -> None:
        self.reason = reason
        self.trajectory = trajectory
        turns = "1 completed turn" if trajectory.num_turns == 1 else f"{trajectory.num_turns} completed turns"
        super().__init__(f"episode {trajectory.episode_id} failed after {turns}: {reason}")


class EpisodesError(RolloutsError):
    """Episodes of a run failed, and the others were stopped.

    `errors` holds the `EpisodeError` of each that failed; the first is chained. `trajectories` holds one trajectory a
    spec, in order, with the turns that were completed; `error` is not empty on those that failed, were stopped or
    never began.
    """

    def __init__(self, errors: Sequence[EpisodeError], trajectories: Sequence[Trajectory]) -> None:
        self.errors = list(errors)
        self.trajectories = list(trajectories)
        others = f"; {len(errors) - 1} more failed" if len(errors) > 1 else ""
        super().__init__(f"{errors[0]}{others}; the other episodes were stopped. trajectories holds what was played")
