"""A byte-bounded cache of encoded runs that many threads read without a lock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class EncodedRun(NamedTuple):
    """One BPE pass: token ids, and per token the character of the run where it starts (int32, same length)."""

    ids: list[int]
    starts: np.ndarray


class RunCache:
    """Text -> `EncodedRun`, least recently used runs forgotten first, in two generations.

    A hit in the old generation moves the run to the young one; when the young one holds half the bytes, it becomes the
    old one and the previous old one is dropped. Dict reads and writes are atomic in CPython, so the hot path takes no
    lock; two threads that race at a turn-over lose at most some cached runs, never correctness.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._half = max_bytes // 2
        self._young: dict[str, EncodedRun] = {}
        self._old: dict[str, EncodedRun] = {}
        self._young_bytes = 0

    def get(self, text: str) -> EncodedRun | None:
        run = self._young.get(text)
        if run is None and (run := self._old.get(text)) is not None:
            self.put(text, run)
        return run

    def put(self, text: str, run: EncodedRun) -> None:
        size = _held_bytes(text, run)
        if size > self._half:
            return
        if self._young_bytes + size > self._half:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[text] = run
        self._young_bytes += size

    @property
    def nbytes(self) -> int:
        """Bytes held by both generations, keys included (an estimate of what CPython allocates)."""
        return sum(_held_bytes(text, run) for part in (self._young, self._old) for text, run in list(part.items()))


def _held_bytes(text: str, run: EncodedRun) -> int:
    # 8 bytes per list slot and 28 per int object above the small-int cache; a str and a dict entry cost about 150.
    return 4 * len(text) + 36 * len(run.ids) + run.starts.nbytes + 150
