"""How many episodes run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Capacity:
    """At most `limit` episodes run at once; those that wait for a slot are served in their order.

    Claims announce episodes that will need a slot: more groups are started while there are fewer claims than slots.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.claimed = 0
        self.running = 0
        self.changed = asyncio.Event()  # set when claims are released
        self._slots = asyncio.Semaphore(limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


class Claims:
    """The claims of one group."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count
        self._capacity.claimed += count

    def release(self, count: int | None = None) -> None:
        """Give back `count` claims; None: all."""
        count = self._count if count is None else min(count, self._count)
        self._count -= count
        self._capacity.claimed -= count
        self._capacity.changed.set()
