"""A cache of media sources and processed items, bounded in bytes, and of the references that were read."""

import sys
import weakref
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from renderers.media.item import MediaItem, MediaSource
from renderers.process.caches import ByteLRU
from renderers.process.fork_reset import ProcessLock

# The bytes of an entry besides its key: the tuple, the weak reference, the place in the table.
_REFERENCE_BYTES = 448


class _DataURL:
    """A data URL as a key. It is hashed by a few samples: URLs with equal samples are distinguished by
    comparison, which is quicker than hashing megabytes.
    """

    __slots__ = ("_hash", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # Data URLs up to this many characters are hashed as a whole.
        if len(text) <= 4096:
            self._hash = hash(text)
        else:
            starts = (len(text) // 4, len(text) // 2, len(text) // 4 * 3, len(text) - 64)
            self._hash = hash((len(text), *(text[start : start + 64] for start in starts)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DataURL) and self.text == other.text


_ReferenceKey = int | str | _DataURL


class _Entry(NamedTuple):
    source: weakref.ref[MediaSource]
    copy: bytes | None  # bytes other than the source's own object, kept alive so that no other object gets their id


class ReferenceCache:
    """Immutable reference -> the source that was loaded from it; the least recently used is evicted first.

    - `bytes` are found by identity: the very same object, while it is alive.
    - data URLs are found by value; the string is kept and compared, which is quicker than hashing it.
    - `http:` and `https:` URLs are found by value: a URL has the meaning of its first fetch for as long as that
      source is in use or in a store, whatever the server would answer by then.

    Other values (bytearray, arrays, PIL images, paths) can change and are never cached. Sources are referenced
    weakly: one that the store evicts is not kept alive here. The caller checks first whether the policy allows
    a reference. `max_bytes` bounds the references, and bytes that equal their source's but are another object.
    Safe for threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: ByteLRU[_ReferenceKey, _Entry] = ByteLRU(max_bytes)
        self._lock = ProcessLock()

    def get(self, value: object) -> MediaSource | None:
        """The source that was loaded from `value`, or None."""
        key = _key(value)
        entry = None if key is None else self._entries.get(key)
        if key is None or entry is None:
            return None
        source = entry.source()
        # An entry may outlive its bytes, and other bytes may have got the same id. The entry is valid if the
        # source or the entry itself holds the very object.
        if source is not None and (type(value) is not bytes or source.data is value or entry.copy is value):
            return source
        with self._lock:
            if self._entries.get(key) is entry:
                self._entries.pop(key)
        return None

    def put(self, value: object, source: MediaSource) -> MediaSource:
        """Cache `source` under `value`, if `value` is immutable and not too large.

        Returns `source`, or for a URL that is cached already the source cached for it.
        """
        key = _key(value)
        if key is None:
            return source
        copy = value if type(value) is bytes and source.data is not value else None
        text = key.text if isinstance(key, _DataURL) else None
        nbytes = _REFERENCE_BYTES + sum(sys.getsizeof(held) for held in (key, copy, text) if held is not None)
        if nbytes > self.max_bytes:
            return source
        with self._lock:
            entry = self._entries.get(key) if type(key) is str else None
            # Another thread may have fetched it meanwhile.
            if entry is not None and (fetched := entry.source()) is not None:
                return fetched
            self._entries.put(key, _Entry(weakref.ref(source), copy), nbytes)
        return source

    @property
    def nbytes(self) -> int:
        """Bytes in use, as counted against `max_bytes`."""
        return self._entries.nbytes

    def __len__(self) -> int:
        return len(self._entries)


def _key(value: Any) -> _ReferenceKey | None:
    """The key of an immutable value. Exact types only: a subclass may define its own equality."""
    kind = type(value)
    if kind is bytes:
        return id(value)
    if kind is not str:
        return None
    if value[:8].lower().startswith(("http://", "https://")):
        return str(value)
    return _DataURL(value) if value[:5].lower() == "data:" else None


# The bytes of an entry besides arrays and source bytes: a million thumbnails then count as more than nothing.
_ENTRY_BYTES = 1024

_Key = tuple[Literal["item", "source"], str]


class MediaStore:
    """`mm_hash` -> `MediaItem` and digest -> `MediaSource`; the least recently used is evicted first. Safe for threads.

    `max_bytes` bounds the bytes in memory, not the number of media: arrays, sources (each distinct source
    once, however many processors made items of it), a kilobyte per entry, and `references`, which take a
    quarter of it at most.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.references = ReferenceCache(max_bytes // 4)
        # The source of an item counts as used after the item, so it is evicted later: an item in the store
        # always has an entry for its source, under which the source's bytes are counted.
        self._entries: ByteLRU[_Key, MediaItem | MediaSource] = ByteLRU(max_bytes)
        self._lock = ProcessLock()

    def get(self, mm_hash: str) -> MediaItem | None:
        """The item of this hash, or None if memory does not hold it."""
        with self._lock:
            item = self._entries.get(("item", mm_hash))
            if not isinstance(item, MediaItem):
                return None
            self._entries.get(("source", item.source.digest))  # its source was used, too
            return item

    def put(self, item: MediaItem) -> MediaItem:
        """Store the item and its source; return the item to use.

        That is the item already stored under the hash, if any, or this one with the source already stored
        under its digest. An item that is larger than the store is returned and not stored.
        """
        if item.nbytes + item.source.nbytes + 2 * _ENTRY_BYTES > self._room():
            return item
        source = self.add_source(item.source)
        if source is not item.source:
            item = replace(item, source=source)
        with self._lock:
            cached = self._entries.get(("item", item.mm_hash))
            if isinstance(cached, MediaItem):
                item = cached
            else:
                self._insert(("item", item.mm_hash), item)
            # Other threads may have evicted it since it was added.
            if self._entries.get(("source", source.digest)) is None:
                self._insert(("source", source.digest), source)
            self._entries.evict_to(self._room())
            return item

    def add_source(self, source: MediaSource) -> MediaSource:
        """Store a source if it fits, a memoryview copied; return the one stored under its digest."""
        with self._lock:
            cached = self._entries.get(("source", source.digest))
            if isinstance(cached, MediaSource):
                return cached
            if not isinstance(source.data, bytes):
                source = MediaSource(source.digest, bytes(source.data))
            if source.nbytes + _ENTRY_BYTES <= self._room():
                self._insert(("source", source.digest), source)
                self._entries.evict_to(self._room())
        return source

    def source(self, digest: str) -> MediaSource | None:
        """The source of this digest, or None if memory does not hold it."""
        with self._lock:
            cached = self._entries.get(("source", digest))
        return cached if isinstance(cached, MediaSource) else None

    @property
    def nbytes(self) -> int:
        """Bytes of items and sources, with a kilobyte for each. At most `max_bytes - references.nbytes`."""
        with self._lock:  # an insertion is followed by an eviction
            return self._entries.nbytes

    def _room(self) -> int:
        return self.max_bytes - self.references.nbytes

    def _insert(self, key: _Key, medium: MediaItem | MediaSource) -> None:
        self._entries.put(key, medium, medium.nbytes + _ENTRY_BYTES)
