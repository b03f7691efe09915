"""How fast a total grows."""

from __future__ import annotations


class RecentRate:
    """Growth per second of a total over the last one to four windows of `window` seconds.

    It is 0 once nothing was added for two windows.
    """

    __slots__ = ("_begun", "_earlier_begun", "_earlier_total", "_total", "_total_then", "_window")

    def __init__(self, now: float, window: float = 10.0) -> None:
        self._window = window
        self._total = self._total_then = self._earlier_total = 0.0
        self._begun = self._earlier_begun = now

    def add(self, amount: float, now: float) -> None:
        self._total += amount
        since = now - self._begun
        if since >= self._window:
            # After a pause of a window or more, the window before the new one is the pause.
            paused = since >= 2 * self._window
            self._earlier_total = self._total - amount if paused else self._total_then
            self._earlier_begun = now - self._window if paused else self._begun
            self._total_then, self._begun = self._total, now

    def per_second(self, now: float) -> float:
        """The rate at the time `now`, taken over at least one second. May be called from any thread."""
        if now - self._begun >= 2 * self._window:
            return 0.0
        return (self._total - self._earlier_total) / max(now - self._earlier_begun, 1.0)
