"""A byte-bounded cache that many threads read without a lock."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Least recently used entries are forgotten first, in two generations.

    A hit in the old generation moves the entry to the young one; when the young one holds half the bytes, it becomes
    the old one and the previous old one is dropped. Dict reads and writes are atomic in CPython, so the hot path takes
    no lock; two threads that race at a turn-over lose at most some cached entries, never correctness.
    """

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[K, tuple[V, int]] = {}
        self._old: dict[K, tuple[V, int]] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, *found)
        return None if found is None else found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keep `value`, which holds about `nbytes` bytes together with its key; too large a one is not kept."""
        if nbytes > self._half:
            return
        if self._young_bytes + nbytes > self._half:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[key] = (value, nbytes)
        self._young_bytes += nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held, by the callers' own count."""
        return self._young_bytes + self._old_bytes
