"""A point in time that everything a fetch does has to be done by."""

from __future__ import annotations

import time


class Deadline:
    """`remaining()` seconds are left; `TimeoutError` once none are."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
