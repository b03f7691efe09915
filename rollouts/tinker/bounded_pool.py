"""A bounded number of things that are made when they are first used, such as the adapters of an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollouts.errors import RolloutsError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

log = logging.getLogger("rollouts.tinker")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    made: asyncio.Task[T]
    users: int = 0


class BoundedPool(Generic[K, T]):
    """At most `limit` things by key. `make` makes one, `end` ends the one that was not used for the longest time.

    One that is used is not ended: where all are, a further one is waited for, also by those that come later.
    `make` and `end` run one at a time, and to their ends, also where their callers are cancelled. A `make`
    that raises is tried again by the next user.
    """

    def __init__(self, limit: int, make: Callable[[K], Awaitable[T]], end: Callable[[K, T], Awaitable[None]]) -> None:
        self._limit = limit
        self._make = make
        self._end = end
        self._entries: dict[K, _Entry[T]] = {}  # the last used one at the end
        self._changed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._in_order = asyncio.Lock()  # otherwise one that always has users would keep a further one waiting for ever

    @asynccontextmanager
    async def using(self, key: K) -> AsyncIterator[T]:
        """The thing of a key, which is not ended inside the block. Raises what `make` raises."""
        async with self._in_order:
            while (entry := self._entries.pop(key, None)) is None:
                idle = next((other for other, each in self._entries.items() if not each.users), None)
                if len(self._entries) < self._limit:
                    entry = _Entry(asyncio.create_task(self._made(key, None)))
                elif idle is not None:
                    old = self._entries.pop(idle)
                    entry = _Entry(asyncio.create_task(self._made(key, (idle, old.made))))
                else:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                entry.made.add_done_callback(lambda made: made.cancelled() or made.exception())
                break
            self._entries[key] = entry
            entry.users += 1
        try:
            yield await asyncio.shield(entry.made)
        finally:
            entry.users -= 1
            failed = entry.made.done() and (entry.made.cancelled() or entry.made.exception() is not None)
            if failed and self._entries.get(key) is entry:
                del self._entries[key]
            self._changed.set()

    async def close(self) -> None:
        """End all that there are; their users must have ended."""
        while self._entries:
            key, entry = self._entries.popitem()
            await self._ended(key, entry.made)

    async def _made(self, key: K, old: tuple[K, asyncio.Task[T]] | None) -> T:
        async with self._one_at_a_time:
            if old is not None:
                await self._ended(*old)
            return await self._make(key)

    async def _ended(self, key: K, made: asyncio.Task[T]) -> None:
        await asyncio.wait([made])
        if made.cancelled() or made.exception() is not None:
            return
        try:
            await self._end(key, made.result())
        except RolloutsError as error:  # one that is gone with its server needs no end
            log.warning("%s could not be ended: %s", key, error)
