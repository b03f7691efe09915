"""Which media one server holds, so that the data of each item is sent once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from renderers.process.caches import ByteLRU
from rollouts.engines.event_loop import EngineLoop


@dataclass(frozen=True, slots=True)
class MediaReservation:
    """The media of one request (name -> bytes): the data of `included` is sent, of the others only the name.

    `ended` is set when the reservation is committed, released or evicted. `epoch` counts the calls of
    `ServerMediaCache.clear` before it.
    """

    names: Mapping[str, int]
    included: frozenset[str]
    epoch: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def omitted(self) -> frozenset[str]:
        return frozenset(self.names.keys() - self.included)


@dataclass(frozen=True, slots=True)
class MediaCacheCounts:
    """How many items, of how many bytes, reservations included (their data are sent) and omitted (a name is sent).

    The data of an item whose request was sent again are counted again.
    """

    included_items: int = 0
    included_bytes: int = 0
    omitted_items: int = 0
    omitted_bytes: int = 0

    def __add__(self, other: MediaCacheCounts) -> MediaCacheCounts:
        return MediaCacheCounts(
            self.included_items + other.included_items,
            self.included_bytes + other.included_bytes,
            self.omitted_items + other.omitted_items,
            self.omitted_bytes + other.omitted_bytes,
        )


class ServerMediaCache:
    """A model of a server's media cache: names, bounded by the bytes of their items, least recently used first out.

    If several requests need a new item at the same time, one includes its data; the others wait until the
    server has it. `max_bytes` is below the 4 GiB that a server's media cache has by default: an item is
    evicted here before the server evicts it.
    """

    def __init__(self, max_bytes: int = 2 * 2**30) -> None:
        self._held: ByteLRU[str, int] = ByteLRU(max_bytes)
        self._epoch = 0
        self.counts = MediaCacheCounts()  # of all reservations so far
        self._pending: dict[str, asyncio.Event] = {}
        self._loop = EngineLoop()

    async def reserve(self, names: Mapping[str, int], *, include_all: bool = False) -> MediaReservation:
        """Decide which items of `names` (name -> bytes) a request includes, once none of them is being sent.

        `include_all`: include every item, without waiting. Each reservation must end with `commit`, `release`
        or `evict`. Raises `EngineError` on another event loop than that of the reservations before, while it
        is open.
        """
        if self._loop.enter("media"):
            self._pending.clear()  # what a closed loop was sending never ends
        while True:
            waiting = [] if include_all else [self._pending[name] for name in names if name in self._pending]
            # All or nothing: two requests that each included an item for which the other waits would
            # deadlock.
            if not waiting:
                included = frozenset(name for name in names if include_all or self._held.get(name) is None)
                reservation = MediaReservation(names, included, self._epoch)
                self._count(reservation)
                if not include_all:
                    self._pending |= dict.fromkeys(included, reservation.ended)
                return reservation
            for sent in waiting:
                await sent.wait()

    def commit(self, reservation: MediaReservation) -> None:
        """Record that the server holds the included items. Has no effect on a reservation that has ended."""
        included = self._end(reservation)
        if reservation.epoch == self._epoch:
            for name in included:
                self._held.put(name, reservation.names[name], reservation.names[name])

    def release(self, reservation: MediaReservation) -> None:
        """End a reservation whose request may not have reached the server: a waiting request includes the items."""
        self._end(reservation)

    def evict(self, reservation: MediaReservation) -> None:
        """Remove the omitted items: the server does not hold all of them. Ends the reservation."""
        for name in reservation.omitted:
            self._held.pop(name)
        self._end(reservation)

    def clear(self) -> None:
        """Remove all items, because the server may have lost them; a `commit` of a pending request adds none."""
        self._epoch += 1
        self._held.clear()

    def _count(self, reservation: MediaReservation) -> None:
        names, included = reservation.names, reservation.included
        nbytes = sum(names[name] for name in included)
        self.counts += MediaCacheCounts(len(included), nbytes, len(names) - len(included), sum(names.values()) - nbytes)

    def _end(self, reservation: MediaReservation) -> frozenset[str]:
        """The included items of a reservation that was pending until now; empty if it had ended."""
        if reservation.ended.is_set():
            return frozenset()
        for name in reservation.included:
            if self._pending.get(name) is reservation.ended:  # not an item of `include_all` that another request sends
                del self._pending[name]
        reservation.ended.set()
        return reservation.included
