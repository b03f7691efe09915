"""Which digits the next RL step plays."""

from __future__ import annotations

import numpy as np


class Curriculum:
    """Shuffled passes over all digits; most of those that were solved when last played sit out a pass.

    A digit is solved when every member of its group answered right at once: such a group has no gradient.
    """

    def __init__(self, count: int, *, kept_solved: float, seed: int) -> None:
        self._kept_solved = kept_solved
        self._solved = np.zeros(count, dtype=bool)
        self._random = np.random.default_rng(seed)
        self._waiting = np.empty(0, dtype=np.int64)

    def next(self, number: int) -> np.ndarray:
        """The next `number` digits int64 (number,), no digit twice."""
        while len(self._waiting) < number:
            fresh = self._pass()
            self._waiting = np.concatenate([self._waiting, fresh[~np.isin(fresh, self._waiting)]])
        chosen, self._waiting = np.split(self._waiting, [number])
        return chosen

    def played(self, digits: np.ndarray, solved: np.ndarray) -> None:
        """Remember which digits (int64) were solved (bool, same shape) when last played."""
        self._solved[digits] = solved

    def _pass(self) -> np.ndarray:
        order = self._random.permutation(len(self._solved))
        solved = order[self._solved[order]]
        kept = solved[: round(self._kept_solved * len(solved))]
        chosen = order[~self._solved[order] | np.isin(order, kept)]
        # With nearly everything solved a pass must not run empty.
        return chosen if len(chosen) > len(order) // 10 else order
