"""The requests of one model run one at a time, in the order of their numbers."""

from __future__ import annotations

import asyncio
from typing import Final

from rollouts.serve.errors import RequestError

#: How long a request of a model waits for one that comes before it.
GAP_SECONDS: Final = 60.0


class Turns:
    """Lets the requests of one model run one at a time, in the order of their numbers, which begin with 1."""

    def __init__(self) -> None:
        self._next = 1
        self._changed = asyncio.Event()
        self._arrived: set[int] = set()

    def accept(self, number: int) -> bool:
        """Take note of a request. False: one of this number ran, or waits."""
        if number < self._next or number in self._arrived:
            return False
        self._arrived.add(number)
        return True

    async def take(self, number: int) -> None:
        """Wait for the turn of a request that was accepted. Raises `RequestError` where one before it does not come."""
        while self._next != number:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), GAP_SECONDS)
            except TimeoutError:
                if self._next in self._arrived:
                    continue  # that one runs, and takes its time
                text = f"request {number} of the model waited {GAP_SECONDS:g} s for request {self._next}"
                raise RequestError(400, f"{text}, which did not come; create another model") from None

    def end(self, number: int) -> None:
        """End the turn of a request."""
        self._arrived.discard(number)
        if self._next == number:
            self._next += 1
            self._changed.set()
            self._changed = asyncio.Event()
