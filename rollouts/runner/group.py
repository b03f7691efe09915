"""The episodes of one task, with their rewards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from renderers.messages import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.errors import ArgumentError
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_choice
from transport import wire_type

if TYPE_CHECKING:  # needs torch
    from rollouts.training import TrainingSample

#: By what the advantages of a group are divided: "batch" of `group_advantages` needs the rewards of other groups.
Scale = Literal["group", "none"]


@wire_type("rollouts.Group")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Group:
    """The G episodes of a task.

    `episodes` are in order of their index; the `error` of a failed one is not empty, and it holds the turns that were
    completed. `attempts` is how often each was begun. `rewards`, float64 (G,), are the total rewards: the environment
    reward of each episode (`environment_rewards`) plus `group_rewards`, which is what the runner's group rewards add,
    with their weights. `reward_parts` has the named rewards of the environment and of the group, float64 (G,) each,
    without their weights, and none of these sums. `sample_weights`, float64 (G,), are factors for the loss of each
    episode. `oldest_version` is the oldest version of the weights that sampled a token of the group, empty where no
    token has a version. `seconds` is the time from the start of the first episode to the end of the last.

    Raises `ArgumentError` for rewards and weights that are no such arrays, also when decoded.
    """

    task: Task
    episodes: tuple[Trajectory, ...]
    attempts: tuple[int, ...]
    rewards: np.ndarray
    reward_parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    sample_weights: np.ndarray = field(default_factory=lambda: np.empty(0))
    oldest_version: str = ""
    seconds: float = 0.0
    group_rewards: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        count = len(self.episodes)
        object.__setattr__(self, "episodes", tuple(self.episodes))
        object.__setattr__(self, "attempts", tuple(self.attempts))
        if not len(self.sample_weights):
            object.__setattr__(self, "sample_weights", np.ones(count))
        if not len(self.group_rewards):
            object.__setattr__(self, "group_rewards", np.zeros(count))
        columns = {"rewards": self.rewards, "sample_weights": self.sample_weights, "group_rewards": self.group_rewards}
        columns |= {f"reward_parts[{part!r:.80}]": values for part, values in self.reward_parts.items()}
        for column, values in columns.items():
            if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype != np.float64:
                rule = f"pass a float64 array ({count},) for the group of task {self.task.task_id!r:.80}"
                raise ArgumentError(column, values, rule)

    def __repr__(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"<Group {self.task.task_id:.80}: {len(self.episodes)} episodes{failed}>"

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def environment_rewards(self) -> np.ndarray:
        """The environment reward of each episode (`Trajectory.reward`), float64 (G,)."""
        return np.array([episode.reward for episode in self.episodes], np.float64)

    @property
    def num_failed(self) -> int:
        """The number of episodes with an error."""
        return sum(1 for episode in self.episodes if episode.error)

    def succeeded(self) -> Iterator[tuple[int, Trajectory]]:
        """The episodes without an error, each with its index."""
        return ((index, episode) for index, episode in enumerate(self.episodes) if not episode.error)

    def samples(
        self,
        processors: Mapping[Modality, MediaProcessor],
        *,
        baseline: Literal["mean", "leave_one_out"] = "mean",
        scale: Scale = "group",
        agents: Collection[str] | None = None,
    ) -> list[TrainingSample]:
        """The training samples of the episodes that did not fail; their advantages compare the group's `rewards`.

        The advantage of an episode (`rollouts.training.group_advantages`, which explains `baseline` and `scale`) holds
        for all tokens that it sampled, times its `sample_weights`. Episodes that failed are not compared with. A group
        of equal rewards gives samples with advantages of 0. With `agents`, only turns of these agents are trained (""
        is the one that plays the environment). `processors` are those of the renderer. Needs the extra `torch`. Raises
        as `rollouts.training.samples_from_trajectory` does.
        """
        from rollouts.training import group_advantages, samples_from_trajectory

        check_choice("scale", scale, Scale)
        kept = list(self.succeeded())
        if not kept:
            return []
        indices = [index for index, _ in kept]
        advantages = group_advantages(
            self.rewards[indices].tolist(), [self.task.task_id] * len(kept), baseline=baseline, scale=scale
        )
        weighted = advantages * self.sample_weights[indices]
        return [
            sample
            for (_, episode), advantage in zip(kept, weighted.tolist(), strict=True)
            for sample in samples_from_trajectory(episode, advantage=advantage, processors=processors, agents=agents)
        ]
