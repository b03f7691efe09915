"""Requests to stop the running batch, from any thread."""

from __future__ import annotations

import threading


class Interruptions:
    """Counts the updates of the weights that wait for the running batch to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0

    def request(self) -> None:
        """An update waits; batches stop until `end` was called as often as this."""
        with self._lock:
            self._waiting += 1

    def end(self) -> None:
        """The update no longer waits."""
        with self._lock:
            self._waiting -= 1

    def are_requested(self) -> bool:
        return self._waiting > 0
