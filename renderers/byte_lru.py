"""A cache bounded in bytes that evicts its least recently used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """Key -> value, at most `max_bytes` by the callers' own count; the least recently used entry is evicted first.

    Safe for threads. To bound the number of entries instead of their bytes, count each as one byte.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # The key stands in its entry as well: an entry is moved by that very object, without comparing an equal key
        # again, which may be a text of megabytes.
        self._entries: OrderedDict[K, tuple[K, V, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value of `key`, which becomes the most recently used; None if there is no entry."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(entry[0])
        return entry[1]

    def put(self, key: K, value: V, nbytes: int) -> list[tuple[K, V]]:
        """Set the value of `key`, which counts as `nbytes` bytes; the (key, value) pairs evicted for it, oldest first.

        A value larger than `max_bytes` is not kept, and neither is the value that `key` had before.
        """
        with self._lock:
            self._pop(key)
            if nbytes > self.max_bytes:
                return []
            self._entries[key] = (key, value, nbytes)
            self._nbytes += nbytes
            return self._evict_to(self.max_bytes)

    def pop(self, key: K) -> V | None:
        """Remove the entry of `key`; its value, or None if there is no entry."""
        with self._lock:
            return self._pop(key)

    def evict_to(self, max_bytes: int) -> list[tuple[K, V]]:
        """Evict until at most `max_bytes` are held; the (key, value) pairs evicted, oldest first."""
        with self._lock:
            return self._evict_to(max_bytes)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def copy(self) -> ByteLRU[K, V]:
        """Another cache with the same entries in the same order."""
        other = ByteLRU[K, V](self.max_bytes)
        with self._lock:
            other._entries, other._nbytes = self._entries.copy(), self._nbytes
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held, by the callers' own count."""
        return self._nbytes

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry of `key`; the order of use stays as it is."""
        with self._lock:
            return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    # The callers of these hold the lock.

    def _pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._nbytes -= entry[2]
        return entry[1]

    def _evict_to(self, max_bytes: int) -> list[tuple[K, V]]:
        evicted = []
        while self._nbytes > max_bytes:
            key, value, nbytes = self._entries.popitem(last=False)[1]
            self._nbytes -= nbytes
            evicted.append((key, value))
        return evicted
