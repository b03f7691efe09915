"""The one LRU cache, its keys, and the layouts of renderings that it keeps."""

import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar, cast

from renderers.process.fork_reset import register_fork_reset

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """Key -> value, at most `max_bytes` by the callers' own count; the least recently used entry is evicted first.

    Safe for threads. No value is None. To bound the number of entries instead of their bytes, count each as one byte.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with its bytes; the most recently used one last
        self._nbytes = 0
        self._lock = threading.RLock()  # a value that is freed within a call may call the cache
        register_fork_reset(self)

    def get(self, key: K) -> V | None:
        """The value of `key`, which becomes the most recently used; None if there is no entry."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Set the value of `key`, which counts as `nbytes` bytes; others are evicted for it.

        A value larger than `max_bytes` is not kept, and neither is the value that `key` had before.
        """
        with self._lock:
            self.pop(key)
            if nbytes <= self.max_bytes:
                self.evict_to(self.max_bytes - nbytes)
                self._entries[key] = value, nbytes
                self._nbytes += nbytes

    def pop(self, key: K) -> None:
        """Remove the entry of `key`, if there is one."""
        with self._lock:
            _, nbytes = self._entries.pop(key, (None, 0))
            self._nbytes -= nbytes

    def evict_to(self, max_bytes: int) -> None:
        """Evict until at most `max_bytes` are held."""
        with self._lock:
            while self._nbytes > max_bytes:
                _, (_, nbytes) = self._entries.popitem(last=False)
                self._nbytes -= nbytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def reset_after_fork(self) -> None:
        """Keep the entries, which a thread of the parent may have been changing."""
        self._lock = threading.RLock()
        self._nbytes = sum(nbytes for _, nbytes in self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes held, by the callers' own count; at most `max_bytes`."""
        return self._nbytes

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry of `key`; the order of use stays as it is."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


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


class Sized(Protocol):
    """A value that knows about how many bytes it takes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class LayoutCache:
    """Values by all inputs, shared, so unchanged; at most `max_bytes`. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._values: ByteLRU[bytes, Sized] = ByteLRU(max_bytes)

    def get_or_make(self, kind: str, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The value of equal inputs of a kind, or a new one. What `make` raises is not kept."""
        key = cache_key((kind, *inputs)) if self._values.max_bytes else None
        if key is None:  # the inputs hold something other than plain data; a template may still print it
            return make()
        cached = self._values.get(key)
        if cached is not None:
            return cast(T, cached)
        made = make()
        self._values.put(key, made, len(key) + made.nbytes)
        return made
