"""Choose the digits of each RL step."""

from __future__ import annotations

import numpy as np


class Curriculum:
    """Shuffled passes over all digits. A pass leaves out most of the digits that were solved when last used.

    A digit is solved if every episode of its group answered correctly at the first try: such a group has no gradient.
    """

    def __init__(self, count: int, *, kept_solved: float, seed: int) -> None:
        self._kept_solved = kept_solved
        self._solved = np.zeros(count, dtype=bool)
        self._random = np.random.default_rng(seed)
        self._waiting = np.empty(0, dtype=np.int64)

    def next(self, number: int) -> np.ndarray:
        """Return the next `number` distinct digits, int64 (number,)."""
        while len(self._waiting) < number:
            next_pass = self._pass()
            self._waiting = np.concatenate([self._waiting, next_pass[~np.isin(next_pass, self._waiting)]])
        chosen, self._waiting = np.split(self._waiting, [number])
        return chosen

    def record_results(self, digits: np.ndarray, solved: np.ndarray) -> None:
        """Record which digits (int64) were solved (bool, same shape)."""
        self._solved[digits] = solved

    def _pass(self) -> np.ndarray:
        order = self._random.permutation(len(self._solved))
        solved = order[self._solved[order]]
        kept = solved[: round(self._kept_solved * len(solved))]
        chosen = order[~self._solved[order] | np.isin(order, kept)]
        # If nearly all digits are solved, a pass must not become empty.
        return chosen if len(chosen) > len(order) // 10 else order
