"""The trainer's log-probabilities of an episode, of a comparison of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollouts.trajectory.tree import Trajectory

if TYPE_CHECKING:
    from rollouts.training.mismatch.compared import ComparedTokens


@dataclass(frozen=True, slots=True, eq=False)
class TrainerTokens:
    """The n tokens of a comparison, as far as a page needs them; `ComparedTokens` has these columns, too.

    `names` are those of samples; `sample` int32 (n,) is an index into them, `position` int32 (n,) a
    position in the sample, `trainer` float32 (n,) the trainer's log-probability.
    """

    names: tuple[str, ...]
    sample: np.ndarray
    position: np.ndarray
    trainer: np.ndarray


class TrainerLogprobs:
    """The tokens of a comparison, found by the names that `samples_from_trajectory` gives to samples: EPISODE/LEAF."""

    def __init__(self, compared: ComparedTokens | TrainerTokens) -> None:
        self._compared = compared
        self._sample_of = {name: index for index, name in enumerate(compared.names)}
        #: The names that no episode has asked for.
        self.unused = set(compared.names)

    def of(self, trajectory: Trajectory) -> Mapping[int, np.ndarray]:
        """float32 (tokens of the node,) by node, NaN where the trainer's log-probability is not known."""
        by_node: dict[int, np.ndarray] = {}
        for leaf in trajectory.leaves():
            sample = self._sample_of.get(f"{trajectory.episode_id}/{leaf}")
            if sample is None:
                continue
            self.unused.discard(self._compared.names[sample])
            chosen = self._compared.sample == sample
            self._add(by_node, trajectory, leaf, self._compared.position[chosen], self._compared.trainer[chosen])
        return by_node

    def _add(
        self,
        by_node: dict[int, np.ndarray],
        trajectory: Trajectory,
        leaf: int,
        positions: np.ndarray,
        logprobs: np.ndarray,
    ) -> None:
        start = 0
        for index in trajectory.path(leaf):
            length = len(trajectory.nodes[index])
            inside = (positions >= start) & (positions < start + length)
            if inside.any():
                column = by_node.setdefault(index, np.full(length, np.nan, np.float32))
                column[positions[inside] - start] = logprobs[inside]
            start += length
