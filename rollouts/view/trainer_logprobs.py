"""The trainer's log-probabilities of an episode, of comparisons of tokens."""

from collections.abc import Collection, Mapping

import numpy as np

from rollouts.compared_tokens import ComparedTokens
from rollouts.trajectory.tree import Trajectory


class TrainerLogprobs:
    """The tokens of comparisons, found by the names that `samples_from_trajectory` gives to samples: EPISODE/LEAF.

    With `episodes` only theirs are kept. Of a sample that was compared several times the last comparison counts.
    """

    def __init__(self, episodes: Collection[str] | None = None) -> None:
        self._episodes = episodes
        self._tokens: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # positions and log-probabilities
        #: The names that no episode has asked for.
        self.unused: set[str] = set()

    def add(self, compared: ComparedTokens) -> None:
        order = np.argsort(compared.sample, kind="stable")
        bounds = np.searchsorted(compared.sample[order], np.arange(len(compared.names) + 1))
        for index, name in enumerate(compared.names):
            if self._episodes is None or name.rpartition("/")[0] in self._episodes:
                tokens = order[bounds[index] : bounds[index + 1]]
                self._tokens[name] = compared.position[tokens], compared.trainer[tokens]
                self.unused.add(name)

    def of(self, trajectory: Trajectory) -> Mapping[int, np.ndarray]:
        """float32 (tokens of the node,) by node, NaN where the trainer's log-probability is not known."""
        by_node: dict[int, np.ndarray] = {}
        for leaf in trajectory.leaves():
            name = f"{trajectory.episode_id}/{leaf}"
            if name in self._tokens:
                self.unused.discard(name)
                self._add(by_node, trajectory, leaf, *self._tokens[name])
        return by_node

    @staticmethod
    def _add(
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
