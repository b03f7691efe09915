"""Counts of durations by size."""

from __future__ import annotations

from bisect import bisect_left

#: Upper bounds in seconds, from a renderer's milliseconds to an episode's hour.
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Histogram:
    """Durations in seconds: their number, their sum, and how many are at most each of `BOUNDS`."""

    __slots__ = ("_counts", "sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of durations at most that long), ascending; the last bound is infinite."""
        pairs: list[tuple[float, int]] = []
        total = 0
        for bound, count in zip((*BOUNDS, float("inf")), self._counts.copy(), strict=True):
            total += count
            pairs.append((bound, total))
        return pairs
