"""Which media one server holds already, so that each travels once."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

#: Below the 4 GiB that a server's cache of media has by default: an item is forgotten here before it is dropped there.
DEFAULT_SHIPPED_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Shipment:
    """The media of one request: `carried` go with their data, the others by name alone."""

    names: Mapping[str, int]
    carried: frozenset[str]
    era: int
    landed: Future[None] = field(default_factory=Future)

    @property
    def omitted(self) -> frozenset[str]:
        return frozenset(self.names.keys() - self.carried)


class ShippedMedia:
    """A model of a server's cache: names in the order of their last use, bounded by the bytes that they stand for.

    Of several requests that show a new item at the same time one carries it; the others wait until the server has it.
    Safe to use from many threads and event loops.
    """

    def __init__(self, max_bytes: int = DEFAULT_SHIPPED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, int] = OrderedDict()
        self._held_bytes = 0
        self._on_the_way: dict[str, Future[None]] = {}
        self._era = 0

    async def claim(self, names: Mapping[str, int], *, carry_all: bool = False) -> Shipment:
        """Decide what a request must carry of `names` (name -> bytes), once nothing of it is on the way.

        `carry_all`: everything, at once, whatever the server may hold and whoever else is sending it. What a request
        carries must be reported with `arrived` or `failed`.
        """
        if carry_all:
            with self._lock:
                return Shipment(dict(names), frozenset(names), self._era)
        while True:
            with self._lock:
                waiting = [self._on_the_way[name] for name in names if name in self._on_the_way]
                # All or nothing: two requests that each carried what the other waits for would wait for ever.
                if not waiting:
                    return self._claim(names)
            await asyncio.wait([asyncio.wrap_future(future) for future in waiting])

    def arrived(self, shipment: Shipment) -> None:
        """The server has answered: it holds what the shipment carried. Counts the first time only."""
        with self._lock:
            landed = self._land(shipment)
            if shipment.era == self._era:
                for name in landed:
                    self._hold(name, shipment.names[name])

    def failed(self, shipment: Shipment) -> None:
        """Whether the server has what the shipment carried is unknown: whoever waits for it carries it anew."""
        with self._lock:
            self._land(shipment)

    def missed(self, shipment: Shipment) -> None:
        """The server does not hold all that the shipment omitted."""
        with self._lock:
            for name in shipment.omitted:
                self._held_bytes -= self._held.pop(name, 0)
            self._land(shipment)

    def forget(self) -> None:
        """The server's caches were cleared, or may have been. What is on the way now is not counted on either."""
        with self._lock:
            self._era += 1
            self._held.clear()
            self._held_bytes = 0

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._held

    def _claim(self, names: Mapping[str, int]) -> Shipment:
        carried = frozenset(name for name in names if name not in self._held)
        shipment = Shipment(dict(names), carried, self._era)
        for name in names:
            if name in carried:
                self._on_the_way[name] = shipment.landed
            else:
                self._held.move_to_end(name)
        return shipment

    def _hold(self, name: str, size: int) -> None:
        self._held_bytes += size - self._held.pop(name, 0)
        self._held[name] = size
        while self._held_bytes > self._max_bytes:
            self._held_bytes -= self._held.popitem(last=False)[1]

    def _land(self, shipment: Shipment) -> frozenset[str]:
        """What it carried, if it was on the way until now; another's, which may carry the same by now, stays so."""
        if shipment.landed.done():
            return frozenset()
        for name in shipment.carried:
            if self._on_the_way.get(name) is shipment.landed:  # not where it carried what others carry too
                del self._on_the_way[name]
        shipment.landed.set_result(None)
        return shipment.carried
