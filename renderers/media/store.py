"""Where processed pictures wait to be used again, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

from renderers.media.item import MediaItem


class MediaStore:
    """`mm_hash` -> `MediaItem`, least recently used forgotten first. Safe for threads.

    `max_bytes` bounds pixels plus sources, not the number of pictures.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self._items: OrderedDict[str, MediaItem] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, mm_hash: str) -> MediaItem | None:
        with self._lock:
            item = self._items.get(mm_hash)
            if item is not None:
                self._items.move_to_end(mm_hash)
            return item

    def put(self, item: MediaItem) -> MediaItem:
        """Keep the item; return the one already held under its hash, if any, so that equal pictures share memory."""
        with self._lock:
            held = self._items.get(item.mm_hash)
            if held is not None:
                return held
            size = _held_bytes(item)
            if size <= self.max_bytes:
                self._items[item.mm_hash] = item
                self._nbytes += size
                while self._nbytes > self.max_bytes:
                    _, dropped = self._items.popitem(last=False)
                    self._nbytes -= _held_bytes(dropped)
            return item

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._items)


def _held_bytes(item: MediaItem) -> int:
    return item.nbytes + item.source.nbytes
