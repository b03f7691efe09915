"""A bounded number of places, which are given to those that wait share by share."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairPlaces:
    """At most `count` blocks run at once. A place that becomes free is that of the share that had none for longest."""

    # Several blocks run at once, and to their ends. `DeviceTurns` shares the time of one device among
    # threads, and interrupts what computes; the lock of `BoundedPool` only keeps an order: neither can do the
    # work of another.

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by share, the next one first

    @asynccontextmanager
    async def place(self, share: str) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            given = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(share, deque()).append(given)
            try:
                await given
            except asyncio.CancelledError:
                if not given.cancelled():  # it was given at the same moment
                    self._give()
                raise
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        while self._waiting:
            share = next(iter(self._waiting))
            line = self._waiting.pop(share)
            while line and line[0].done():  # cancelled
                line.popleft()
            if line:
                line.popleft().set_result(None)
                if line:
                    self._waiting[share] = line
                return
        self._free += 1
