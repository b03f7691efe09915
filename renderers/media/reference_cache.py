"""From a reference that was resolved before to its source, without decoding, hashing or fetching it again."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from renderers.byte_lru import ByteLRU
from renderers.media.source import MediaSource

# What an entry costs besides its key: the tuple, the weak reference, the place in the table.
_ENTRY_BYTES = 448
# A data URL of so few characters is hashed as a whole.
_HASHED_WHOLE = 4096
# The coarsest time stamps that file systems in use keep.
_SETTLED_NS = 2_000_000_000


class FileState(NamedTuple):
    """A file as it stands. Another file under the path, or other contents, is another `FileState`."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int  # who writes in place and sets the old mtime again still changes this one

    @classmethod
    def from_status(cls, path: str | os.PathLike[str], status: os.stat_result) -> Self | None:
        """`status` is taken before the file is read: if it changes in between, what was read is never found again.

        None for a file that changed just now: it could change again without its times telling the difference.
        """
        if time.time_ns() - status.st_ctime_ns < _SETTLED_NS:
            return None
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return cls(os.fspath(path), status.st_dev, status.st_ino, status.st_size, *times)


class _DataURL:
    """A data URL as a key. Its hash is that of a few samples: two URLs that have them in common are told apart by
    comparing, which is quicker than hashing megabytes that were read anew.
    """

    __slots__ = ("_hash", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) <= _HASHED_WHOLE:
            self._hash = hash(text)
        else:
            starts = (len(text) // 4, len(text) // 2, len(text) // 4 * 3, len(text) - 64)
            self._hash = hash((len(text), *(text[start : start + 64] for start in starts)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DataURL) and self.text == other.text


_Key = int | str | FileState | _DataURL


class _Entry(NamedTuple):
    source: weakref.ref[MediaSource]
    digest: str
    copy: bytes | None  # bytes that are not the source's own, kept so that nothing else can get their address


class ReferenceCache:
    """Immutable references and the sources they became; least recently used forgotten first. Safe for threads.

    - `bytes` are known by identity: the very same object, while it is alive.
    - data URLs are known by value; the string is kept, and compared with, which is quicker than to hash it.
    - `http:` and `https:` URLs are known by value and keep their source: what a URL meant in a conversation it means
      until it is forgotten, whatever the server says by then.
    - a path is known as the `FileState` that it was before it was read: `FileState.from_status(path, status)`.

    Anything else (bytearray, arrays, PIL images, paths as such) can change and is never remembered. Except for URLs a
    source is held weakly: what the store forgets is not kept alive here. Whether a policy allows a reference is for the
    caller to ask first.

    One half of `max_bytes` is for the references themselves, and for bytes that equal their source's but are another
    object; the other half is for the sources of URLs. With `find` (digest -> source or None) a URL whose source had to
    make room still means that source for as long as `find` finds it.
    """

    def __init__(self, max_bytes: int, find: Callable[[str], MediaSource | None] | None = None) -> None:
        self.max_bytes = max_bytes
        self._find = find
        self._entries: ByteLRU[_Key, _Entry] = ByteLRU(max_bytes // 2)
        self._url_sources: ByteLRU[str, MediaSource] = ByteLRU(max_bytes // 2)  # by digest
        self._lock = threading.Lock()

    def get(self, value: object) -> MediaSource | None:
        """The source that `value` became, or None if that is not known (any more)."""
        key = _key(value)
        if key is None:
            return None
        entry = self._entries.get(key)
        if entry is None:
            return None
        source = entry.source()
        if _is_web_url(key):
            if source is None and self._find is not None:
                source = self._find(entry.digest)
            if source is not None:
                self._keep(source)
        # The id of bytes that are gone may be that of others by now. Those whose entry is alive cannot be gone: either
        # their source or the entry holds them.
        if source is not None and (type(value) is not bytes or source.data is value or entry.copy is value):
            return source
        with self._lock:
            if self._entries.get(key) is entry:
                self._entries.pop(key)
        return None

    def put(self, value: object, source: MediaSource) -> MediaSource:
        """Remember that `value` became `source`; what cannot be remembered is passed over.

        Returns `source`, or for a URL that is known already the source that it has meant so far.
        """
        key = _key(value)
        if key is None:
            return source
        known = self.get(key) if _is_web_url(key) else None
        if known is not None:
            return known
        copy = value if type(value) is bytes and source.data is not value else None
        text = key.text if isinstance(key, _DataURL) else None
        nbytes = _ENTRY_BYTES + sum(sys.getsizeof(held) for held in (key, copy, text) if held is not None)
        if nbytes > self.max_bytes // 2:
            return source
        with self._lock:
            if _is_web_url(key):
                before = self._entries.get(key)
                meanwhile = None if before is None else before.source()
                if meanwhile is not None:  # another thread fetched it too
                    return meanwhile
                self._keep(source)
            self._entries.put(key, _Entry(weakref.ref(source), source.digest, copy), nbytes)
        return source

    @property
    def nbytes(self) -> int:
        """Bytes held, as counted against `max_bytes`."""
        return self._entries.nbytes + self._url_sources.nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def _keep(self, source: MediaSource) -> None:
        if self._url_sources.get(source.digest) is None:
            self._url_sources.put(source.digest, source, source.nbytes + _ENTRY_BYTES)


def _key(value: Any) -> _Key | None:
    """What an immutable value is known by. Exact types: a subclass may compare as it likes."""
    kind = type(value)
    if kind is bytes:
        return id(value)
    if kind is FileState or _is_web_url(value):
        return value  # type: ignore[no-any-return]
    return _DataURL(value) if kind is str and value[:5].lower() == "data:" else None


def _is_web_url(key: object) -> bool:
    return type(key) is str and key[:8].lower().startswith(("http://", "https://"))
