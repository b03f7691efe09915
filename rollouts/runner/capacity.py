"""How many episodes run at once, and how many are claimed."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Capacity:
    """At most `limit` episodes run at once, each inside `async with capacity.slots`, in the order in which they come.

    Claims announce episodes that will need a slot: more groups are started while there are fewer claims than slots.
    Episodes that wait for another attempt have no claim. They are counted: where both together are twice as many as the
    slots, because an engine does not respond, for example, no group is started.

    `assembling` counts the groups whose episodes have ended, and which are not finished: their rewards or their record
    take time. They have no claim, and hold their episodes.

    `num_slots` returns how many episodes the workers of the runner can run, which may be fewer and may change.
    """

    def __init__(self, limit: int, num_slots: Callable[[], int] | None = None) -> None:
        self._most = limit
        self._num_slots = num_slots
        self.claimed = 0
        self.waiting = 0  # for another attempt
        self.assembling = 0
        self.changed = asyncio.Event()  # set when claims are released, and when `limit` has changed
        self.slots = asyncio.Semaphore(limit)

    @property
    def limit(self) -> int:
        """How many episodes can run at once."""
        return self._most if self._num_slots is None else min(self._most, self._num_slots())


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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An episode without a claim waits for its next attempt."""
        self._capacity.waiting += 1
        try:
            yield
        finally:
            self._capacity.waiting -= 1
            self._capacity.changed.set()
