"""One attempt at an episode, as a value that another process can run."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.engines.protocol import SamplingParams
from rollouts.episodes.limits import EpisodeLimits
from rollouts.errors import ArgumentError
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from transport import wire_type


@wire_type("rollouts.EpisodeJob")
@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One attempt at an episode: all that a worker needs to know of it.

    `episode_id` identifies the attempt within a run: running a job twice gives two recordings of one attempt, of which
    the runner uses one. `index` is the place of the episode in its group, `attempt` counts from 0. `seed` goes to the
    environment, `sampling.seed` to the sampler. Raises `ArgumentError` for values of other types, also when decoded.
    """

    episode_id: str
    task: Task
    index: int
    attempt: int
    seed: int
    sampling: SamplingParams
    limits: EpisodeLimits
    group_id: str = ""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ArgumentError(f"EpisodeJob.{name}", getattr(self, name), f"pass a value of {kind.__name__}")

    def new_trajectory(self) -> Trajectory:
        """The empty trajectory into which the attempt is recorded."""
        return Trajectory(self.episode_id, seed=self.seed, group_id=self.group_id)


_KINDS: dict[str, type] = {
    "episode_id": str,
    "task": Task,
    "index": int,
    "attempt": int,
    "seed": int,
    "sampling": SamplingParams,
    "limits": EpisodeLimits,
    "group_id": str,
}
