"""A cache of media sources and processed items, bounded in bytes."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, replace
from typing import Literal

from renderers.byte_lru import ByteLRU
from renderers.errors import MediaStoreError
from renderers.fork_reset import ProcessLock
from renderers.media.item import MediaItem
from renderers.media.reference_cache import ReferenceCache
from renderers.media.source import MediaSource
from renderers.media.source_directory import SourceDirectory

# The bytes of an entry besides arrays and source bytes: a million thumbnails then count as more than nothing.
_ENTRY_BYTES = 1024

_Key = tuple[Literal["item", "source"], str]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of a store's operations so far.

    hits, misses: look-ups (`get` and `source`) that found something and that did not. evictions: items and sources that
    were evicted from memory. directory_errors: failed reads and writes, and damaged files.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    directory_errors: int = 0


class MediaStore:
    """`mm_hash` -> `MediaItem` and digest -> `MediaSource`; the least recently used is evicted first. Safe for threads.

    `max_bytes` bounds the bytes in memory, not the number of media: arrays, sources (each distinct source once, however
    many processors made items of it), a kilobyte per entry, and `references`, which take a quarter of it at most.

    With a `directory` every source is also written to that directory, and read from it after memory has evicted the
    source, by this process or another, now or later. `SourceDirectory` describes its guarantees and
    `max_directory_bytes`.

    Raises `MediaStoreError` for a directory that cannot be used.
    """

    # Only sources are written to the directory, not items: a 1024x1024 image is 6 MB of patches. Whatever is read from
    # a disk has to be hashed, and hashing those takes as long as making them from the source again.

    def __init__(
        self,
        max_bytes: int = 256 * 2**20,
        directory: str | os.PathLike[str] | None = None,
        max_directory_bytes: int | None = None,
    ) -> None:
        if directory is None and max_directory_bytes is not None:
            raise MediaStoreError("max_directory_bytes bounds a directory, and there is none; pass directory too")
        self.max_bytes = max_bytes
        self.references = ReferenceCache(max_bytes // 4, find=weakref.WeakMethod(self.source))
        self._directory = None if directory is None else SourceDirectory(directory, max_directory_bytes)
        # The source of an item counts as used after the item, so it is evicted later: an item in the store always has
        # an entry for its source, under which the source's bytes are counted.
        self._entries: ByteLRU[_Key, MediaItem | MediaSource] = ByteLRU(max_bytes)
        self._items = self._hits = self._misses = self._evictions = 0
        self._lock = ProcessLock()

    def get(self, mm_hash: str) -> MediaItem | None:
        """The item of this hash, or None if memory does not hold it."""
        with self._lock:
            item = self._entries.get(("item", mm_hash))
            if not isinstance(item, MediaItem):
                self._misses += 1
                return None
            self._entries.get(("source", item.source.digest))
            self._hits += 1
            return item

    def put(self, item: MediaItem) -> MediaItem:
        """Store the item and its source; return the item to use.

        That is the item already stored under the hash, if any, or this one with the source already stored under its
        digest. An item that is larger than the store is returned and not stored.
        """
        if item.nbytes + item.source.nbytes + 2 * _ENTRY_BYTES > self._room():
            self._write(item.source)
            return item
        source = self.add_source(item.source)
        if source is not item.source:
            item = replace(item, source=source)
        with self._lock:
            cached = self._entries.get(("item", item.mm_hash))
            if not isinstance(cached, MediaItem):
                cached = item
                self._items += 1
                self._insert(("item", item.mm_hash), item)
            # Other threads may have evicted it since it was added.
            if self._entries.get(("source", source.digest)) is None:
                self._insert(("source", source.digest), source)
            self._evict()
            return cached

    def add_source(self, source: MediaSource) -> MediaSource:
        """Store a source; return the one already stored under its digest, if any.

        A memoryview is copied: it would keep alive, or mapped, the memory that it views. Raises `MediaStoreError` if
        the store has a directory and the digest cannot be a file name of it.
        """
        with self._lock:
            cached = self._entries.get(("source", source.digest))
        if isinstance(cached, MediaSource):
            return cached
        self._write(source)
        return self._store_in_memory(source)

    def source(self, digest: str) -> MediaSource | None:
        """The source of this digest: from memory, or from the directory, where it is verified; None if absent."""
        with self._lock:
            cached = self._entries.get(("source", digest))
        if not isinstance(cached, MediaSource):
            read = None if self._directory is None else self._directory.read(digest)
            cached = None if read is None else self._store_in_memory(read)
        with self._lock:
            self._hits += cached is not None
            self._misses += cached is None
        return cached

    @property
    def nbytes(self) -> int:
        """Bytes of items and sources, with a kilobyte for each. At most `max_bytes - references.nbytes`."""
        with self._lock:  # an insertion is followed by an eviction
            return self._entries.nbytes

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            errors = 0 if self._directory is None else self._directory.errors
            return StoreStats(self._hits, self._misses, self._evictions, errors)

    def __len__(self) -> int:
        """The number of items."""
        return self._items

    def _store_in_memory(self, source: MediaSource) -> MediaSource:
        """Store a source in memory if it fits; return the source to use."""
        if not isinstance(source.data, bytes):
            source = MediaSource(source.digest, bytes(source.data))
        with self._lock:
            cached = self._entries.get(("source", source.digest))
            if isinstance(cached, MediaSource):
                return cached
            if source.nbytes + _ENTRY_BYTES <= self._room():
                self._insert(("source", source.digest), source)
                self._evict()
        return source

    def _room(self) -> int:
        return self.max_bytes - self.references.nbytes

    def _write(self, source: MediaSource) -> None:
        if self._directory is not None:
            self._directory.write(source)

    # The callers of these hold the lock.

    def _insert(self, key: _Key, medium: MediaItem | MediaSource) -> None:
        self._count_evicted(self._entries.put(key, medium, medium.nbytes + _ENTRY_BYTES))

    def _evict(self) -> None:
        self._count_evicted(self._entries.evict_to(self._room()))

    def _count_evicted(self, evicted: list[tuple[_Key, MediaItem | MediaSource]]) -> None:
        self._items -= sum(kind == "item" for (kind, _), _ in evicted)
        self._evictions += len(evicted)
