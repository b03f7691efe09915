"""The one LRU cache, its keys, and the layouts of renderings that it keeps."""

from __future__ import annotations

import itertools
import marshal
import threading
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, cast

from renderers.process.fork_reset import register_fork_reset

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(Generic[K, V]):
    """An entry of a cache; `key` and `value` are None once it has been removed.

    Uses are numbered: `last_use` is the last one, `queued_use` the last one before the entry was queued for eviction.
    """

    __slots__ = ("key", "last_use", "nbytes", "queued_use", "value")

    def __init__(self, key: K, value: V, nbytes: int, last_use: int) -> None:
        self.key: K | None = key
        self.value: V | None = value
        self.nbytes = nbytes
        self.last_use = self.queued_use = last_use


class ByteLRU(Generic[K, V]):
    """Key -> value, at most `max_bytes` by the callers' own count; the least recently used entry is evicted first.

    Safe for threads. Neither a key nor a value is None. To bound the number of entries instead of their bytes, count
    each as one byte.
    """

    # A read takes no lock and moves nothing: it stores the number of this use in the entry. `_queue` holds the entries
    # of the time when it was filled, the least recently used last. The last one that was not used since is evicted
    # next, because all others were used after it; the queue is filled again, which sorts all entries, when it is empty.

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[K, _Entry[K, V]] = {}
        self._queue: list[_Entry[K, V]] = []
        self._next_use = itertools.count().__next__  # atomic, so that no two uses have the same number
        self._nbytes = 0
        self._lock = threading.Lock()
        register_fork_reset(self)

    def get(self, key: K) -> V | None:
        """The value of `key`, which becomes the most recently used; None if there is no entry."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.last_use = self._next_use()
        return entry.value

    def put(self, key: K, value: V, nbytes: int) -> list[tuple[K, V]]:
        """Set the value of `key`, which counts as `nbytes` bytes; the (key, value) pairs evicted for it, oldest first.

        A value larger than `max_bytes` is not kept, and neither is the value that `key` had before.
        """
        with self._lock:
            if nbytes > self.max_bytes:
                self._pop(key)
                return []
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(key, value, nbytes, self._next_use())
            else:  # in place, so that a concurrent read finds the former value or the new one
                self._nbytes -= entry.nbytes
                entry.value, entry.nbytes, entry.last_use = value, nbytes, self._next_use()
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
            self._queue.clear()
            self._nbytes = 0

    def reset_after_fork(self) -> None:
        """Keep the entries, which a thread of the parent may have been changing."""
        self._lock = threading.Lock()
        self._queue = []
        self._nbytes = sum(entry.nbytes for entry in self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes held, by the callers' own count; at most `max_bytes`."""
        with self._lock:  # `put` adds a value before it evicts others for it
            return self._nbytes

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry of `key`; the order of use stays as it is."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    # The callers of these hold the lock.

    def _pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        value = entry.value
        entry.key = entry.value = None
        self._nbytes -= entry.nbytes
        return value

    def _evict_to(self, max_bytes: int) -> list[tuple[K, V]]:
        evicted = []
        while self._nbytes > max_bytes:
            if not self._queue:
                self._fill_queue()
            entry = self._queue.pop()
            key, value = entry.key, entry.value
            if key is None or value is None or entry.last_use != entry.queued_use:  # removed, or used since
                continue
            del self._entries[key]
            self._nbytes -= entry.nbytes
            evicted.append((key, value))
        return evicted

    def _fill_queue(self) -> None:
        self._queue.extend(self._entries.values())
        for entry in self._queue:
            entry.queued_use = entry.last_use
        self._queue.sort(key=attrgetter("queued_use"), reverse=True)


# A cache key for plain data: equal keys for equal values of equal types only.


_SCALARS = frozenset((str, int, float, bool, type(None)))


def cache_key(value: Any) -> bytes | None:
    """Key of a value made of strings, numbers, None, lists, tuples and dicts; None for any other value.

    `marshal` by itself also accepts numpy's numbers and arrays, and writes those of different types as equal bytes.
    """
    try:
        # Version 2 writes equal values as equal bytes; later ones depend on which objects are shared.
        key = marshal.dumps(value, 2)
    except ValueError:  # it holds an object of another type, or is nested too deeply, for example inside itself
        return None
    return key if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Whether a value that is not nested inside itself holds nothing but plain data."""
    waiting = [value]
    for item in waiting:  # the list grows meanwhile
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is dict:
            waiting += item
            waiting += item.values()
        elif kind is list or kind is tuple:
            waiting += item
        else:
            return False
    return True


# A cache of what is computed of printed text: token layouts, and the extensions of bridges.


class Sized(Protocol):
    """A value that knows about how many bytes it takes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class LayoutCache:
    """Values by all inputs that they depend on, at most `max_bytes` together. Safe to share between threads.

    The values are shared, so that they may not be changed. With 0 bytes, nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._values: ByteLRU[bytes, Sized] = ByteLRU(max_bytes)

    def get_or_make(self, kind: str, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The value of equal inputs of a kind, or a new one. What `make` raises is raised again by the next call."""
        key = cache_key((kind, *inputs)) if self._values.max_bytes else None
        if key is None:  # the inputs hold something other than plain data; a template may still print it
            return make()
        cached = self._values.get(key)
        if cached is not None:
            return cast(T, cached)
        made = make()
        self._values.put(key, made, len(key) + made.nbytes)
        return made
