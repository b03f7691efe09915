"""Where sources and processed media wait to be used again, bounded in bytes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from renderers.byte_lru import ByteLRU
from renderers.errors import MediaStoreError
from renderers.media.item import MediaItem
from renderers.media.reference_cache import ReferenceCache
from renderers.media.source import MediaSource
from renderers.media.source_directory import SourceDirectory

# What an entry costs besides arrays and source bytes, so that a million thumbnails do not count as nothing.
_ENTRY_BYTES = 1024

_Key = tuple[Literal["item", "source"], str]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store did so far.

    hits, misses: look-ups (`get` and `source`) that found something and that did not. evictions: items and sources that
    made room for others in memory. directory_errors: failed reads and writes, and damaged files.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    directory_errors: int = 0


class MediaStore:
    """`mm_hash` -> `MediaItem` and digest -> `MediaSource`, least recently used forgotten first. Safe for threads.

    `max_bytes` bounds what memory holds, not the number of media: arrays, sources (each distinct source once, however
    many processors made items of it), a kilobyte per entry, and what `references` holds, which is a quarter of it at most.

    With a `directory` every source is also written there, and found there when memory has forgotten it, by this process
    or another, now or later. See `SourceDirectory` for what that promises and for `max_directory_bytes`.

    Raises `MediaStoreError` for a directory that cannot be used.
    """

    # Only sources go to the directory. Items do not: a 1024x1024 image is 6 MB of patches, whose hash, without which
    # nothing read from a disk is believed, takes as long as making them from the source again.

    def __init__(
        self,
        max_bytes: int = 256 * 2**20,
        directory: str | os.PathLike[str] | None = None,
        max_directory_bytes: int | None = None,
    ) -> None:
        if directory is None and max_directory_bytes is not None:
            raise MediaStoreError("max_directory_bytes bounds a directory, and there is none; pass directory too")
        self.max_bytes = max_bytes
        self.references = ReferenceCache(max_bytes // 4, find=_weakly(self))
        self._directory = None if directory is None else SourceDirectory(directory, max_directory_bytes)
        # A source stands behind each item that was made of it: it is moved up with them, and forgotten after them. So
        # an item never outlives the entry that its source's bytes are counted under.
        self._entries: ByteLRU[_Key, MediaItem | MediaSource] = ByteLRU(max_bytes)
        self._items = self._hits = self._misses = self._evictions = 0
        self._lock = threading.Lock()

    def get(self, mm_hash: str) -> MediaItem | None:
        """The item of this name, if memory holds it."""
        with self._lock:
            item = self._entries.get(("item", mm_hash))
            if not isinstance(item, MediaItem):
                self._misses += 1
                return None
            self._entries.get(("source", item.source.digest))
            self._hits += 1
            return item

    def put(self, item: MediaItem) -> MediaItem:
        """Keep the item and its source; return the one to use, which shares what is held already.

        That is the item already held under its hash, if any, or this one with the source already held under its digest.
        An item that is larger than the store is handed back and not kept.
        """
        if item.nbytes + item.source.nbytes + 2 * _ENTRY_BYTES > self._room():
            self._write(item.source)
            return item
        source = self.add_source(item.source)
        if source is not item.source:
            item = replace(item, source=source)
        with self._lock:
            held = self._entries.get(("item", item.mm_hash))
            if not isinstance(held, MediaItem):
                held = item
                self._items += 1
                self._hold(("item", item.mm_hash), item)
            # Other threads may have pushed it out since it was added.
            if self._entries.get(("source", source.digest)) is None:
                self._hold(("source", source.digest), source)
            self._make_room()
            return held

    def add_source(self, source: MediaSource) -> MediaSource:
        """Keep a source; return the one already held under its digest, if any.

        A view is copied: it would keep alive, or mapped, whatever it is a view on. Raises `MediaStoreError` if the
        store has a directory and the digest cannot be a file name of it.
        """
        with self._lock:
            held = self._entries.get(("source", source.digest))
        if isinstance(held, MediaSource):
            return held
        self._write(source)
        return self._remember(source)

    def source(self, digest: str) -> MediaSource | None:
        """The source of this digest from memory, or else, verified, from the directory."""
        with self._lock:
            held = self._entries.get(("source", digest))
        if not isinstance(held, MediaSource):
            read = None if self._directory is None else self._directory.read(digest)
            held = None if read is None else self._remember(read)
        with self._lock:
            self._hits += held is not None
            self._misses += held is None
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of items and sources, with a kilobyte for each. `references.nbytes` comes on top; both within `max_bytes`."""
        return self._entries.nbytes

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            errors = 0 if self._directory is None else self._directory.errors
            return StoreStats(self._hits, self._misses, self._evictions, errors)

    def __len__(self) -> int:
        """The number of items."""
        return self._items

    def _remember(self, source: MediaSource) -> MediaSource:
        """Hold a source in memory if it fits; the one to use from now on."""
        if not isinstance(source.data, bytes):
            source = MediaSource(source.digest, bytes(source.data))
        with self._lock:
            held = self._entries.get(("source", source.digest))
            if isinstance(held, MediaSource):
                return held
            if source.nbytes + _ENTRY_BYTES <= self._room():
                self._hold(("source", source.digest), source)
                self._make_room()
        return source

    def _room(self) -> int:
        return self.max_bytes - self.references.nbytes

    def _write(self, source: MediaSource) -> None:
        if self._directory is not None:
            self._directory.write(source)

    # Below, the lock is held.

    def _hold(self, key: _Key, medium: MediaItem | MediaSource) -> None:
        self._count_evicted(self._entries.put(key, medium, medium.nbytes + _ENTRY_BYTES))

    def _make_room(self) -> None:
        self._count_evicted(self._entries.evict_to(self._room()))

    def _count_evicted(self, evicted: list[tuple[_Key, MediaItem | MediaSource]]) -> None:
        self._items -= sum(kind == "item" for (kind, _), _ in evicted)
        self._evictions += len(evicted)


def _weakly(store: MediaStore) -> Callable[[str], MediaSource | None]:
    """`store.source` that does not keep the store alive: a cycle would hold its megabytes until the next collection."""
    reference = weakref.ref(store)

    def find(digest: str) -> MediaSource | None:
        found = reference()
        return None if found is None else found.source(digest)

    return find
