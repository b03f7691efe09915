"""The requests of one model run one at a time, in the order of their numbers."""

import asyncio
import logging
from typing import Final

log = logging.getLogger("rollouts.tinker")
#: How long a request of a model waits for one that comes before it, since the last one arrived or ended.
GAP_SECONDS: Final = 60.0


class Turns:
    """Lets the requests of a model run in the order of their numbers, from 1; missing ones are skipped."""

    def __init__(self) -> None:
        self._next = 1
        self._changed = asyncio.Event()
        self._arrived: set[int] = set()

    def accept(self, number: int) -> bool:
        """Take note of a request. False: one of this number ran or waits, or it was skipped."""
        if number < self._next or number in self._arrived:
            return False
        self._arrived.add(number)
        self._note_change()
        return True

    async def take(self, number: int) -> None:
        """Wait for the turn of a request that was accepted."""
        while self._next != number:
            try:
                await asyncio.wait_for(self._changed.wait(), GAP_SECONDS)
            except TimeoutError:
                if self._next not in self._arrived:  # otherwise that one runs, and takes its time
                    first = min(self._arrived)
                    log.warning("requests %d to %d of a model did not arrive, and are skipped", self._next, first - 1)
                    self._next = first
                    self._note_change()

    def end(self, number: int) -> None:
        """End the turn of a request."""
        self._arrived.discard(number)
        if self._next == number:
            self._next += 1
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
